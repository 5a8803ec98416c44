"""A training loop of your own around the engine: accumulation, a torch scheduler, evaluation, full weights at the end.

    python examples/plain_loop.py --steps 40 --state nvme --host 64MiB

The model is never held whole: its parameters are created unit by unit and rest on the tier named by --state.
"""

from __future__ import annotations

import argparse
import os
import tempfile

# Read when torch is loaded: OpenMP threads that spin while they wait starve the I/O threads on few cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

import offload
from offload.data import TextData
from offload.models import Llama, LlamaConfig

MICRO_BATCHES = 4


def make_scheduler(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    warmup = max(1, steps // 10)
    rise = LinearLR(optimizer, start_factor=1 / warmup, total_iters=warmup)
    fall = CosineAnnealingLR(optimizer, T_max=max(1, steps - warmup), eta_min=1e-4)
    return SequentialLR(optimizer, [rise, fall], milestones=[warmup])


def without_decay(model: torch.nn.Module) -> list[dict]:
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def evaluate(engine: offload.Engine, data: TextData) -> float:
    engine.eval()
    with torch.no_grad():
        losses = [engine(**batch).loss.item() for batch in data.eval_batches(4)]
    engine.train()
    return sum(losses) / len(losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--state", choices=["device", "host", "nvme"], default="nvme")
    parser.add_argument("--host", default="auto", help="host budget, such as 64MiB")
    parser.add_argument("--hidden", type=int, default=256)
    arguments = parser.parse_args()

    sizes = LlamaConfig(vocab_size=256, hidden_size=arguments.hidden, layers=6, heads=4, max_positions=128)
    data = TextData(files=None, context=128, batch_size=2, seed=0)
    with offload.empty_init():
        model = Llama(sizes)

    with tempfile.TemporaryDirectory() as directory:
        config = {
            "memory": {"host": arguments.host, "nvme_paths": [directory]},
            "placement": {name: arguments.state for name in ("parameters", "gradients", "optimizer")},
            "optimizer": {"lr": 1e-3, "max_grad_norm": 1.0},
        }
        with offload.initialize(
            model,
            config,
            param_groups=without_decay(model),
            lr_scheduler=lambda optimizer: make_scheduler(optimizer, arguments.steps),
        ) as engine:
            print(engine.describe())
            print(f"held-out loss before: {evaluate(engine, data):.3f}")
            for step in range(arguments.steps):
                total = 0.0
                for micro_batch in range(MICRO_BATCHES):
                    loss = engine(**data.train_batch(step, micro_batch)).loss
                    engine.backward(loss / MICRO_BATCHES)
                    total += loss.item() / MICRO_BATCHES
                result = engine.step()
                if not result.stepped:
                    print(f"step {step + 1} skipped: {result.skipped_reason}")
                elif (step + 1) % 10 == 0:
                    lr = engine.optimizer.param_groups[0]["lr"]
                    print(f"step {step + 1}: loss {total:.3f}, gradient norm {result.grad_norm:.2f}, next lr {lr:.1e}")
            print(f"held-out loss after: {evaluate(engine, data):.3f}")
            largest = max((tensor.abs().max().item(), name) for name, tensor in engine.named_full_parameters())
            print(f"largest weight: {largest[0]:.3f} in {largest[1]}")


if __name__ == "__main__":
    main()
