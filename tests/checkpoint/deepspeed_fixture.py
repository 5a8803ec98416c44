"""Makes a DeepSpeed ZeRO checkpoint with its real library: `python deepspeed_fixture.py DIRECTORY STAGE WORLD DTYPE`.

Run in an environment that has DeepSpeed; ranks are processes over gloo. Beside the checkpoint it writes what a reader
must find: `expected.pt` with fp32 values, moments and steps by parameter name, from DeepSpeed's own accessors.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.multiprocessing as mp
from torch import nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 33)
        self.second = nn.Linear(33, 21)
        self.frozen = nn.Linear(21, 5)
        self.last = nn.Linear(5, 1)
        for parameter in self.frozen.parameters():
            parameter.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.frozen(torch.relu(self.second(torch.relu(self.first(x)))))).float().pow(2).mean()


def run(rank: int, directory: str, stage: int, world: int, dtype: str) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", DS_ACCELERATOR="cpu"
    )
    os.environ.setdefault("MASTER_PORT", "29771")
    torch.set_num_threads(1)
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    model = Net()
    decayed = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    plain = [p for p in model.parameters() if p.requires_grad and p.dim() <= 1]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": plain, "weight_decay": 0.0}], lr=1e-2)
    config = {
        "train_batch_size": 2 * world,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        dtype: {"enabled": dtype == "bf16"},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for step in range(3):
        x = torch.randn(2, 7, generator=torch.Generator().manual_seed(10 * step + rank))
        engine.backward(engine(x.to(torch.bfloat16) if dtype == "bf16" else x))
        engine.step()
    engine.save_checkpoint(directory)
    if stage < 3:
        # The accessors below want the states of the first step linked.
        engine.optimizer._link_all_hp_params()
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    expected = {}
    for name, p in engine.module.named_parameters():
        if not p.requires_grad:
            continue
        expected[name] = {
            "master": safe_get_full_fp32_param(p).clone(),
            "exp_avg": safe_get_full_optimizer_state(p, "exp_avg").clone(),
            "exp_avg_sq": safe_get_full_optimizer_state(p, "exp_avg_sq").clone(),
        }
    if rank == 0:
        torch.save(expected, os.path.join(directory, "expected.pt"))
    torch.distributed.barrier()


if __name__ == "__main__":
    _, directory, stage, world, dtype = sys.argv
    mp.spawn(run, args=(directory, int(stage), int(world), dtype), nprocs=int(world))
