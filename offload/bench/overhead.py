"""What the engine's Python costs for every unit and pass, beside the same model without it.

Time is that of the thread that runs forward and backward (`time.thread_time`), so waits for disks and copies, which are
other threads' work, are not in it; the plain model's own time is subtracted. What moves bytes in that thread is in it,
above all the copy of each gradient to where it rests: what that takes at least, one copy of as many bytes as a unit has
from memory that no cache holds, is shown beside it.
"""

from __future__ import annotations

import json as json_module
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import offload

LIMIT = 1.0
"""Milliseconds per unit and pass that we promise for many small parameters."""

DEFAULT_ROUNDS = 15
_BATCH = 4
_EVICTED = 24 << 20
"""Elements that are written to push others out of the caches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Milliseconds per unit (medians over rounds). `plain`: the same pass without an engine; `copy`: a copy of the
    unit's gradients, which is part of backward.
    """

    model: str
    device: str
    tier: str
    units: int
    parameters_per_unit: int
    elements_per_unit: int
    forward_ms: float
    backward_ms: float
    plain_forward_ms: float
    plain_backward_ms: float
    step_ms: float
    copy_ms: float


class _Unit(nn.Module):
    """A chain of scalings, each by a parameter of its own: little compute, much bookkeeping."""

    def __init__(self, count: int, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(shape)) for _ in range(count)])

    def forward(self, x: Tensor) -> Tensor:
        for scale in self.scales:
            x = x * scale
        return x


class _Huge(nn.Module):
    """One matrix."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(width))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def small_parameters(units: int = 50, each: int = 40) -> tuple[nn.Module, Tensor]:
    """A model of `units * each` parameters of 64 elements, and an input."""
    return nn.Sequential(*(_Unit(each, (64,)) for _ in range(units))), torch.ones(_BATCH, 64)


def huge_parameters(units: int = 3, width: int = 2048) -> tuple[nn.Module, Tensor]:
    """A model of `units` matrices of `width` squared elements, and an input."""
    return nn.Sequential(*(_Huge(width) for _ in range(units))), torch.ones(_BATCH, width)


def lone_parameters() -> tuple[nn.Module, Tensor]:
    """As many units as `huge_parameters` has, of one matrix each, with next to no bytes: what of the other's time is
    not its memory's.
    """
    return huge_parameters(width=64)


def _copy_seconds(source: Tensor, target: Tensor) -> float:
    """Seconds of the thread for one copy of memory that was used a while ago."""
    torch.ones(_EVICTED)
    start = time.thread_time()
    target.copy_(source)
    return time.thread_time() - start


def measure(
    build: Callable[[], tuple[nn.Module, Tensor]], *, name: str, device: str, tier: str, rounds: int, folder: Path
) -> Result:
    """Times forward, backward and step of a model with an engine, and forward and backward without one.

    The two take turns, round by round.
    """
    plain, x = build()
    model, _ = build()
    units = len(list(model.children()))
    config = {
        "device": device,
        "memory": {"nvme_paths": [str(folder)]},
        "placement": {"parameters": tier, "gradients": tier, "optimizer": tier},
        "units": {"wrap": [type(next(model.children())).__name__]},
    }
    times: dict[str, list[float]] = {
        key: [] for key in ("forward", "backward", "plain_forward", "plain_backward", "step", "copy")
    }
    gradients = torch.ones(sum(p.numel() for p in plain.parameters()) // units)
    rest = torch.empty_like(gradients)
    with offload.initialize(model, config) as engine:
        for _ in range(rounds + 2):
            for prefix, module in (("plain_", plain), ("", model)):
                start = time.thread_time()
                loss = module(x).sum()
                middle = time.thread_time()
                loss.backward()
                times[f"{prefix}forward"].append(middle - start)
                times[f"{prefix}backward"].append(time.thread_time() - middle)
            start = time.thread_time()
            engine.step()
            times["step"].append(time.thread_time() - start)
            plain.zero_grad()
            times["copy"].append(_copy_seconds(gradients, rest) * units)
    ms = {key: statistics.median(values[2:]) * 1e3 / units for key, values in times.items()}
    counts = [p.numel() for p in plain.parameters()]
    return Result(
        model=name,
        device=device,
        tier=tier,
        units=units,
        parameters_per_unit=len(counts) // units,
        elements_per_unit=sum(counts) // units,
        forward_ms=ms["forward"] - ms["plain_forward"],
        backward_ms=ms["backward"] - ms["plain_backward"],
        plain_forward_ms=ms["plain_forward"],
        plain_backward_ms=ms["plain_backward"],
        step_ms=ms["step"],
        copy_ms=ms["copy"],
    )


def run(
    as_json: bool, *, rounds: int = DEFAULT_ROUNDS, path: str | None = None, devices: Sequence[str] = ("cpu",)
) -> str:
    """All cases as a table, or as one JSON object. `path`: where swap files go (default: a temporary folder)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a pass of tiny operations is one thread's work
    try:
        with tempfile.TemporaryDirectory(prefix="offload-overhead-", dir=path) as folder:
            results = [
                measure(build, name=name, device=device, tier=tier, rounds=rounds, folder=Path(folder))
                for name, build in (("small", small_parameters), ("huge", huge_parameters), ("lone", lone_parameters))
                for device in devices
                for tier in ("device", "host", "nvme")
            ]
    finally:
        torch.set_num_threads(threads)
    if as_json:
        return json_module.dumps({"limit_ms": LIMIT, "results": [asdict(result) for result in results]}, indent=2)
    lines = ["model  device  tier    units  parameters  elements  forward ms  backward ms  (copy)  step ms  (plain)"]
    for r in results:
        lines.append(
            f"{r.model:6} {r.device:7} {r.tier:6} {r.units:6} {r.parameters_per_unit:11} {r.elements_per_unit:9,} "
            f"{r.forward_ms:11.3f} {r.backward_ms:12.3f}  ({r.copy_ms:.3f}) {r.step_ms:8.3f}  "
            f"({r.plain_forward_ms:.3f}, {r.plain_backward_ms:.3f})"
        )
    lines.append(
        "ms of the computing thread per unit and pass, beyond the plain model's; units hold as many parameters each; "
        "copy: of backward, what copying a unit's gradients takes; lone: huge with matrices of 64 x 64"
    )
    return "\n".join(lines)
