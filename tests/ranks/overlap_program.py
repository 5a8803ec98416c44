"""What slow collectives cost a step of stage 3 on the simulated device:
`torchrun --nproc_per_node 2 -m tests.ranks.overlap_program [LATENCY_MS] [COMPUTE_MS]`. Rank 0 prints one JSON object.

Every unit computes for COMPUTE_MS in forward and again in backward (it sleeps, so that ranks that share processors do
not disturb each other), and every gather and reduction takes LATENCY_MS longer than it would. What is not hidden: the
first gather of a forward, that of a backward, and the last reduction.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import offload

UNITS, WIDTH, STEPS = 24, 64, 7


class Computing(torch.autograd.Function):
    """Calls `during(index, backward)` in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: int, during: Callable[[int, bool], None]) -> Tensor:
        ctx.index, ctx.during = index, during
        during(index, False)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.during(ctx.index, True)
        return gradients[0], None, None


class Block(nn.Module):
    def __init__(self, index: int, during: Callable[[int, bool], None]) -> None:
        super().__init__()
        self.index, self.during = index, during
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(Computing.apply(x, self.index, self.during))


class Tower(nn.Module):
    def __init__(self, units: int, during: Callable[[int, bool], None]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(index, during) for index in range(units))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def config(device: str = "sim") -> dict[str, Any]:
    """Stage 3, one unit ahead, everything in host memory."""
    return {
        "device": device,
        "memory": {"host": 64 << 20, "device": 16 << 20},
        "placement": dict.fromkeys(("parameters", "gradients", "optimizer"), "host"),
        "swap": {"staging": 1 << 20},
        "schedule": {"optimizer_step": "barrier", "prefetch_units": 1},
        "parallel": {"stage": 3, "timeout": 60.0, "verify_every": 0},
    }


def seconds(latency: float, compute: float) -> float:
    """The median step."""
    model = Tower(UNITS, lambda index, backward: time.sleep(compute))
    with offload.initialize(model, config()) as engine:
        engine._memory.device.delay = 0.0  # type: ignore[attr-defined]
        cluster = engine._cluster
        assert cluster is not None
        cluster.gathering._channel._latency = cluster.reduction._channel._latency = latency
        x, taken = torch.ones(4, WIDTH), []
        for _ in range(STEPS):
            began = time.perf_counter()
            engine.backward(engine(x))
            engine.step()
            taken.append(time.perf_counter() - began)
        return statistics.median(taken[2:])


def main(latency: float, compute: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        slow, quick = seconds(latency, compute), seconds(0.0, compute)
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, (slow, quick))
        if dist.get_rank() == 0:
            slow, quick = max(s for s, _ in found), max(q for _, q in found)
            exposed = 2 * UNITS * compute
            print(
                json.dumps(
                    {
                        "units": UNITS,
                        "latency_seconds": latency,
                        "unit_seconds": compute,
                        "step_seconds": round(quick, 4),
                        "step_seconds_with_latency": round(slow, 4),
                        "ratio": round(slow / quick, 4),
                        "ratio_if_nothing_overlapped": round((exposed + 3 * UNITS * latency) / exposed, 4),
                    }
                )
            )
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    numbers = [float(argument) / 1e3 for argument in sys.argv[1:]]
    main(numbers[0] if numbers else 15.0e-3, numbers[1] if len(numbers) > 1 else 30.0e-3)
