"""Gradients add up over any number of backward calls, the same on every tier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import gradients
from offload.gradients import Held, _copy_all, _Entry
from offload.layout import Slot

from .common import (
    CLIP,
    HYPER,
    TIERS,
    Case,
    Reference,
    Trace,
    assert_equal,
    decoder,
    pairwise,
    placed,
    running,
    states_of,
    token_batches,
)

STEPS = 2
SPLITS = {"one batch": 1, "three": 3, "four": 4, "twelve": 12}


def samples(step: int) -> Tensor:
    """The twelve samples of a step, each of as many targets as any other."""
    return token_batches(1, size=12, seed=100 + step)[0]


def losses_of(forward: Callable[..., Any], ids: Tensor, parts: int) -> list[Tensor]:
    """Losses of `parts` micro-batches whose sum is the mean loss of all samples."""
    return [forward(part, labels=part).loss / parts for part in ids.chunk(parts)]


def engine_run(case: Case, folder: Path, parts: int, *, together: bool = False) -> Trace:
    """`together`: all forwards first, then one backward for each loss."""
    losses, norms = [], []
    with running(decoder(wide=case.wide), case, folder) as engine:
        for step in range(STEPS):
            losses.append(_accumulate(engine, engine.backward, samples(step), parts, together))
            norms.append(engine.step().grad_norm)
        return Trace(losses=losses, norms=norms, states=states_of(engine))


def _accumulate(
    forward: Callable[..., Any], backward: Callable[[Tensor], None], ids: Tensor, parts: int, together: bool
) -> float:
    total = 0.0
    if together:
        for loss in losses_of(forward, ids, parts):
            backward(loss)
            total += float(loss.detach())
        return total
    for part in ids.chunk(parts):
        loss = forward(part, labels=part).loss / parts
        backward(loss)
        total += float(loss.detach())
    return total


@cache
def reference_run(dtype: str, wide: bool, parts: int) -> Trace:
    twin = Reference(decoder(wide=wide), dtype=dtype)
    losses, norms = [], []
    for step in range(STEPS):
        losses.append(_accumulate(twin.model, twin.backward, samples(step), parts, False))
        norms.append(twin.step())
    return Trace(losses=losses, norms=norms, states=twin.states())


FACTORS: dict[str, Sequence[Any]] = {
    "parameters": TIERS,
    "gradients": TIERS,
    "optimizer": TIERS,
    "engine": ("threads", "aiofiles"),
    "chunk": (16 << 10, 64 << 10),
    "device": ("cpu", "sim"),
    "dtype": ("fp32", "bf16"),
    "parts": (1, 3, 4, 12),
    "together": (False, True),
    "wide": (False, True),
}


@pytest.mark.parametrize("row", pairwise(FACTORS), ids=lambda row: "-".join(str(v) for v in row.values()))
def test_the_same_micro_batches_give_the_same_bits_everywhere(row: dict[str, Any], swap_folder: Path) -> None:
    row = dict(row)
    parts, together = row.pop("parts"), row.pop("together")
    case = Case(**row)
    assert_equal(engine_run(case, swap_folder, parts, together=together), reference_run(case.dtype, case.wide, parts))


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_raw_then_summed_gradients_in_bf16_on_each_tier(tier: str, device: str, swap_folder: Path) -> None:
    case = Case(device=device, gradients=tier, dtype="bf16", wide=True)
    with running(decoder(wide=True), case, swap_folder) as engine:
        twin = Reference(decoder(wide=True), dtype="bf16")
        name = "layers.0.mlp.up_proj.weight"
        for count in range(1, 4):
            for forward, backward in ((engine, engine.backward), (twin.model, twin.backward)):
                backward(forward(samples(count), labels=samples(count)).loss)
            expected = twin.gradients[name][0]
            found = engine.get_full(name, "grad")
            assert found is not None and found.dtype == torch.float32
            assert expected.dtype == (torch.bfloat16 if count == 1 else torch.float32)
            assert torch.equal(found.reshape(-1), expected.float())
        assert engine.step().grad_norm == twin.step()


@pytest.mark.parametrize("split", list(SPLITS))
def test_splits_of_the_same_samples_agree(split: str, swap_folder: Path) -> None:
    """Within DESIGN's bounds for closed loops in fp32, with clipping that binds."""
    whole = reference_run("fp32", False, 1)
    found = engine_run(Case(), swap_folder, SPLITS[split], together=split == "four")
    assert found.losses == pytest.approx(whole.losses, rel=1e-6)
    assert found.norms == pytest.approx(whole.norms, rel=1e-6)
    assert all(norm is not None and norm > 2 * CLIP for norm in found.norms)
    bound = 0.01 * HYPER["lr"] * STEPS
    for name, entry in whole.states.items():
        assert float((found.states[name]["parameter"] - entry["parameter"]).abs().max()) <= bound, name


def test_zero_grad_forgets_what_was_accumulated(swap_folder: Path) -> None:
    twin = Reference(decoder())
    with running(decoder(), Case(), swap_folder) as engine:
        ids = samples(0)
        engine.backward(engine(ids, labels=ids).loss)
        engine.zero_grad()
        assert all(engine.get_full(name, "grad") is None for name in twin.parameters)
        ids = samples(1)
        engine.backward(engine(ids, labels=ids).loss)
        twin.backward(twin.model(ids, labels=ids).loss)
        assert engine.step().grad_norm == twin.step()


def test_plain_backward_is_the_engines_backward(swap_folder: Path) -> None:
    with running(decoder(), Case(), swap_folder) as engine:
        twin = Reference(decoder())
        for step in range(2):
            ids = samples(step)
            engine(ids, labels=ids).loss.backward()
            twin.backward(twin.model(ids, labels=ids).loss)
            assert engine.step().grad_norm == twin.step()


@pytest.mark.parametrize("tier", TIERS)
def test_accumulation_in_the_gradients_own_dtype(tier: str, swap_folder: Path) -> None:
    case = Case(gradients=tier, dtype="bf16", wide=True)
    precision = {"compute_dtype": "bf16", "accumulate_dtype": "bf16"}
    with running(decoder(wide=True), case, swap_folder, precision=precision) as engine:
        model = decoder(wide=True).to(torch.bfloat16)
        ids = samples(0)
        for _ in range(3):
            engine.backward(engine(ids, labels=ids).loss)
            model(ids, labels=ids).loss.backward()
        for name, p in model.named_parameters():
            found = engine.get_full(name, "grad")
            assert found is not None and p.grad is not None and torch.equal(found, p.grad), name


def test_memory_of_gradients_is_given_back_after_the_step(swap_folder: Path) -> None:
    case = Case(gradients="host", parameters="host", optimizer="host")
    with running(decoder(), case, swap_folder) as engine:
        for step in range(2):
            for part in samples(step).chunk(3):
                engine.backward(engine(part, labels=part).loss)
            report = engine.memory()
            assert 0 < report.current["host"]["gradients"] <= report.planned["host"]["gradients"]
            engine.step()
            engine._memory.trim()
            assert engine.memory().current["host"].get("gradients", 0) == 0


def test_small_gradients_of_any_strides_move_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """In whatever order they come, those without a gap between them in one call; nothing else is written to."""
    generator = torch.Generator().manual_seed(0)
    values = [
        torch.randn(4, 3, generator=generator).t(),
        torch.randn((), generator=generator),
        torch.randn(1, generator=generator).expand(5),
        torch.randn(2, 2, 2, 2, generator=generator).to(memory_format=torch.channels_last),
        torch.randn(14, generator=generator)[::2],
    ]
    slots, offset = [], 64
    for index, value in enumerate(values):
        offset += 2 if index == 3 else 0
        shape, numel = tuple(value.shape), value.numel()
        slots.append(Slot(name=str(index), shape=shape, numel=numel, offset=offset, trainable=True))
        offset += value.numel()
    entries = [_Entry(slot, Held.RAW, late=value) for slot, value in zip(slots, values, strict=True)]
    calls: list[int] = []
    cat = torch.cat

    def counted(tensors: Any, **options: Any) -> Tensor:
        calls.append(len(tensors))
        return cat(tensors, **options)

    monkeypatch.setattr(torch, "cat", counted)
    target = torch.full((offset - 60 + 8,), 7.0)
    _copy_all(target, 60, [entries[i] for i in (3, 0, 4, 2, 1)])
    expected = torch.full_like(target, 7.0)
    for slot, value in zip(slots, values, strict=True):
        expected[slot.offset - 60 : slot.end - 60] = value.reshape(-1)
    assert torch.equal(target, expected) and calls == [3, 2]


def test_a_step_without_elements_takes_no_memory(swap_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient of a parameter without elements is held, but no plane is made for its neighbours, which have none."""

    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.empty, self.unused = nn.Parameter(torch.zeros(0)), nn.Parameter(torch.zeros(64, 128))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.empty.sum()

    made = []
    begin = gradients.Plane.__init__

    def noted(plane: gradients.Plane, *args: Any, **options: Any) -> None:
        made.append(options["kind"])
        begin(plane, *args, **options)

    model = nn.ModuleList([Partly()])
    with running(model, placed("cpu", "host"), swap_folder, units={"wrap": ["Partly"]}) as engine:
        monkeypatch.setattr(gradients.Plane, "__init__", noted)
        engine.module[0](torch.ones(2, requires_grad=True)).sum().backward()  # type: ignore[index]
        assert engine.step().stepped and made == []
