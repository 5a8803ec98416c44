"""Chunks of an optimizer step: as large as a staging slot has room for, each element once, the numbers those of small
ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload.models import Llama, LlamaConfig
from offload.state import ChunkJob
from swap import FaultPlan
from tests.engine.common import TIERS, Case, Reference, decoder, pairwise, product, running, token_batches

SIZES = LlamaConfig(vocab_size=193, hidden_size=96, intermediate_size=600, layers=2, heads=2, max_positions=16)
WHERE = {"device": ("cpu", "sim"), "parameters": TIERS, "gradients": TIERS, "optimizer": ("host", "nvme")}


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[tuple[int, int]]]:
    """By unit, the chunks that steps have begun; none may take more of its slot than there is."""
    found: dict[str, list[tuple[int, int]]] = {}
    start = ChunkJob.start

    def noted(job: ChunkJob, staging: Any) -> None:
        start(job, staging)
        assert job._gradients is not None and job._read is not None
        staged = [operand._staged for operand in (*job._read.operands.values(), *job._gradients.parts)]
        region = job._read.slot.tensor
        inside = [t for t in staged if t is not None and 0 <= t.data_ptr() - region.data_ptr() < region.numel()]
        pages = sum(-(-t.nbytes // 4096) * 4096 for t in inside)
        assert pages <= region.numel()
        found.setdefault(job.state.flat.unit, []).append((job.lo, job.hi))

    monkeypatch.setattr(ChunkJob, "start", noted)
    return found


def trained(folder: Path, where: tuple[str, ...], fmt: str, *, chunk: str = "16KiB") -> dict[str, torch.Tensor]:
    device, parameters, gradients, optimizer = where
    torch.manual_seed(0)
    model = Llama(SIZES)
    config = {
        "device": device,
        "memory": {"nvme_paths": [str(folder)], "nvme": "256MiB", "host": "256MiB"},
        "placement": {"parameters": parameters, "gradients": gradients, "optimizer": optimizer},
        "swap": {"engine": "threads", "staging": "1MiB", "chunk": chunk},
        "optimizer": {"lr": 1e-2, "max_grad_norm": 0.5, "weight_decay": 0.1, "state_format": fmt},
        "precision": {"compute_dtype": "bf16"},
    }
    with offload.initialize(model, config) as engine:
        for ids in token_batches(2):
            for _ in range(2):
                engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
        engine.synchronize()
        return {n: v.clone() for n, v in engine.named_full_parameters()}


@pytest.mark.parametrize("everywhere", [False, pytest.param(True, marks=pytest.mark.acceptance)])
@pytest.mark.parametrize("fmt", ["compact", "fp32"])
def test_every_element_once_and_the_same_numbers(
    fmt: str, everywhere: bool, tmp_path: Path, ranges: dict[str, list[tuple[int, int]]]
) -> None:
    expected = trained(tmp_path, ("cpu", "host", "host", "host"), fmt)
    whole = {unit: (min(lo for lo, _ in found), max(hi for _, hi in found)) for unit, found in ranges.items()}
    for row in product(WHERE) if everywhere else pairwise(WHERE, seed=len(fmt)):
        where = tuple(row.values())
        ranges.clear()
        values = trained(tmp_path, where, fmt)
        assert all(torch.equal(values[name], expected[name]) for name in expected), where
        for unit, found in ranges.items():
            steps = [found[: len(found) // 2], found[len(found) // 2 :]]
            assert steps[0] == steps[1]
            assert [hi for _, hi in steps[0][:-1]] == [lo for lo, _ in steps[0][1:]]
            assert (steps[0][0][0], steps[0][-1][1]) == whole[unit]


def test_what_does_not_pass_through_a_slot_leaves_room_in_it(
    tmp_path: Path, ranges: dict[str, list[tuple[int, int]]]
) -> None:
    counts = {}
    for parameters, gradients in (("nvme", "nvme"), ("host", "host")):
        ranges.clear()
        trained(tmp_path, ("cpu", parameters, gradients, "nvme"), "compact")
        counts[parameters] = len(ranges["layers.0"])
    # 3.125 bytes an element instead of 3.125 + 2 + 4 (sums of two contributions)
    assert counts["host"] <= 0.5 * counts["nvme"]


@pytest.mark.parametrize("alone", [False, True], ids=["all", "one unit"])
def test_slots_that_are_read_ahead_leave_two(alone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a forward, and of a unit that is updated alone, which has nothing else to wait for."""
    schedule = "barrier" if alone else "deferred"
    case = Case(optimizer="nvme", parameters="host", gradients="host", staging=1 << 20, wide=True, schedule=schedule)
    taken = []
    start = ChunkJob.start

    def noted(job: ChunkJob, staging: Any) -> None:
        start(job, staging)
        updates = engine._updates
        taken.append(sum(update.started for update in updates._pending.values()))

    monkeypatch.setattr(ChunkJob, "start", noted)
    model = decoder(wide=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not alone or name.startswith("layers.1."))
    with running(model, case, tmp_path) as engine:
        assert engine._memory.staging is not None
        count = engine._memory.staging.count
        for ids in token_batches(2):
            engine.backward(engine(ids, labels=ids).loss)
            engine.step()
        engine.synchronize()
    assert 3 < max(taken) <= count - 2


def test_a_chunk_does_not_wait_for_writes_of_the_ones_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within one update chunks read what no other writes; the next update waits for all of them."""
    case = Case(optimizer="nvme", parameters="host", gradients="host", wide=True, schedule="barrier")
    beside, after = [], []
    start = ChunkJob.start

    def noted(job: ChunkJob, staging: Any) -> None:
        (after if job._first else beside).append(job.state.writing)
        start(job, staging)
        if job._first:
            assert not job.state.writing

    monkeypatch.setattr(ChunkJob, "start", noted)
    faults = FaultPlan(seed=1).delay(0.05, operation="write")
    twin = Reference(decoder(wide=True))
    with running(decoder(wide=True), case, tmp_path, faults=faults) as engine:
        for ids in token_batches(3):
            engine.backward(engine(ids, labels=ids).loss)
            engine.step()
            twin.backward(twin.model(ids, labels=ids).loss)
            twin.step()
        found = {name: value.clone() for name, value in engine.named_full_parameters()}
    assert any(beside)
    assert all(torch.equal(found[name], p.detach()) for name, p in twin.model.named_parameters())
