"""FSDP2 ranks over gloo that save or load a `torch.distributed.checkpoint`: `fsdp_program.py save|load DIRECTORY FILE`.

FILE: what the model and optimizer hold, by parameter name, as `torch.save` writes it.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

WORLD = 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 80)
        self.second = nn.Linear(80, 75)
        self.last = nn.Linear(75, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.second(torch.relu(self.first(x))))).pow(2).mean()


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(step))


def full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    found = {}
    for name, p in model.named_parameters():
        state = optimizer.state[p]
        found[name] = {"parameter": full(p.detach()), "step": int(state["step"])}
        found[name] |= {kind: full(state[kind]) for kind in ("exp_avg", "exp_avg_sq")}
    return found


def run(rank: int, action: str, directory: str, file: str, port: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(WORLD), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the parent's
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0 if action == "save" else 1)
    model = Net()
    mesh = init_device_mesh("cpu", (WORLD,))
    for module in (model.first, model.second, model):
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3 if action == "save" else 1):
        model(batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, states = get_state_dict(model, optimizer)
    if action == "save":
        dcp.save({"model": weights, "optim": states}, checkpoint_id=directory)
    else:
        del states["param_groups"]  # only tensors are in a checkpoint that was written elsewhere
        tree = {"model": weights, "optim": states}
        dcp.load(tree, checkpoint_id=directory)
        groups = get_state_dict(model, optimizer)[1]["param_groups"]
        set_state_dict(
            model,
            optimizer,
            model_state_dict=tree["model"],
            optim_state_dict={**tree["optim"], "param_groups": groups},
        )
    found = held(model, optimizer)
    if rank == 0:
        torch.save(found, file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(run, args=(*sys.argv[1:4], str(store.port)), nprocs=WORLD)
