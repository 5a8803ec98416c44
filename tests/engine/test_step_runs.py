"""Updates of parameters that lie side by side are one range for the kernel: the same bits, fewer ranges."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from offload import state
from offload.gradients import TakenGradients
from offload.state import ChunkJob, Run, Update
from tests.engine.common import cover

SHAPES = [(64,), (64,), (10,), (128,), (64, 64), (4096,), (5000,), (64,), (0,), (192,), (4096,)]


class _Sum(nn.Module):
    """Parameters with and without padding behind them, larger and smaller than a block, and an empty one."""

    def __init__(self) -> None:
        super().__init__()
        values = [torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape) for shape in SHAPES]
        self.parts = nn.ParameterList([nn.Parameter(value) for value in values])

    def forward(self, x: Tensor) -> Tensor:
        terms = [(p.float() * x + p.float().square() * 0.1 * n).sum() for n, p in enumerate(self.parts, 1)]
        return torch.stack(terms).sum()


def _one_by_one(updates: Sequence[Update], gradients: TakenGradients, lo: int, hi: int) -> Iterator[Run]:
    """The obvious way: a range for each parameter."""
    for update in sorted(updates, key=lambda update: update.slot.offset):
        slot = update.slot
        if slot.numel and slot.offset < hi and lo < slot.end:
            yield Run(slot.offset, slot.end, update.hyper, gradients.where(slot.name))


def trained(folder: Path, fmt: str, tier: str, groups: str, *, frozen: bool) -> dict[str, Tensor]:
    """Every weight and state after three steps, of which the second leaves a unit alone."""
    model = nn.ModuleDict({"a": _Sum(), "b": _Sum()})
    named = dict(model.named_parameters())
    named["a.parts.3"].requires_grad_(not frozen)
    used = [p for p in named.values() if p.requires_grad]
    chosen = {
        "one": [{"params": used}],
        "alternating": [{"params": used[n::2], "lr": 1e-2 * (n + 1)} for n in range(2)],
    }[groups]
    config = {
        "memory": {"nvme_paths": [str(folder)]},
        "placement": {"parameters": tier, "gradients": tier, "optimizer": tier},
        "swap": {"chunk": "16KiB", "staging": "1MiB"},
        "units": {"wrap": ["_Sum"]},
        "optimizer": {"lr": 1e-2, "weight_decay": 0.1, "state_format": fmt},
        "precision": {"compute_dtype": "bf16"},
    }
    with offload.initialize(model, config, param_groups=chosen) as engine:
        for step in range(3):
            loss = model["a"](torch.tensor(0.5 + step))
            engine.backward(loss if step == 1 else loss + model["b"](torch.tensor(2.0)))
            engine.step()
        found = {name: value.clone() for name, value in engine.named_full_parameters()}
        for name, parameter in named.items():
            kinds = ("parameter", "exp_avg", "exp_avg_sq") if parameter.requires_grad else ("weight",)
            for kind in kinds:
                value = engine.get_full(name, kind)
                assert value is not None
                found[f"{name} {kind}"] = value
    return found


@cover(
    {
        "fmt": ["fp32", "split", "compact"],
        "tier": ["device", "host", "nvme"],
        "groups": ["one", "alternating"],
        "frozen": [False, True],
    }
)
def test_runs_give_the_bits_of_their_parts(
    fmt: str, tier: str, groups: str, frozen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranges: list[tuple[int, int]] = []
    start = ChunkJob.start

    def noted(job: ChunkJob, source: Any) -> None:
        ranges.extend((run.start, run.end) for run in job._runs)
        start(job, source)

    monkeypatch.setattr(ChunkJob, "start", noted)
    fast = trained(tmp_path, fmt, tier, groups, frozen=frozen)
    merged = len(ranges)
    ranges.clear()
    monkeypatch.setattr(state, "_runs", _one_by_one)
    slow = trained(tmp_path, fmt, tier, groups, frozen=frozen)
    assert merged < len(ranges)
    assert fast.keys() == slow.keys()
    for name, value in slow.items():
        assert torch.equal(fast[name], value), name
