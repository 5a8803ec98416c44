"""States that are read in backward for the step to come: when that begins, what it never changes, and what becomes of
reads that turn out to be of no use.

Every test compares with training in memory, bit for bit: an update that began with a stale read would differ.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.schedule.ahead import ChunkRead, ReadAhead
from swap import FaultPlan
from swap.errors import BudgetError, SwapIOError
from tests.engine.common import Case, Reference, decoder, running, token_batches

BATCHES = token_batches(5)
WHERE = ("host", "nvme")


def case_of(tier: str = "host", **changes: Any) -> Case:
    return Case(optimizer="nvme", parameters=tier, gradients=tier, wide=True, **{"staging": 1 << 20, **changes})


def backward(engine: offload.Engine, ids: torch.Tensor) -> None:
    engine.backward(engine(ids, labels=ids).loss)


def read_early(engine: offload.Engine) -> int:
    """Waits until no more can be read ahead and all of that is there; the slots that are held."""
    ahead, staging, store = engine._updates._ahead, engine._memory.staging, engine._memory.store
    assert staging is not None and store is not None
    deadline = time.monotonic() + 20
    while (ahead.unread and len(ahead) < staging.count - 2) or store.stats.in_flight:
        assert time.monotonic() < deadline, "reads ahead do not go on"
        time.sleep(0.002)
    return len(ahead)


def given_back(engine: offload.Engine) -> bool:
    """Whether every slot is free; a write gives its slot back just after it has ended."""
    staging = engine._memory.staging
    assert staging is not None
    deadline = time.monotonic() + 20
    while staging.in_use and time.monotonic() < deadline:
        time.sleep(0.002)
    return staging.in_use == 0


def values(engine: offload.Engine) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in engine.named_full_parameters()}


def in_memory(between: Callable[[Reference, int], None] | None = None) -> dict[str, torch.Tensor]:
    twin = Reference(decoder(wide=True))
    for number, ids in enumerate(BATCHES):
        twin.backward(twin.model(ids, labels=ids).loss)
        if between is not None:
            between(twin, number)
        twin.step()
    return {name: p.detach() for name, p in twin.model.named_parameters()}


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many chunks updates took that were read before, and how many they had to read."""
    found = {"ahead": 0, "now": 0}
    take = ReadAhead.take

    def counted(self: ReadAhead, *key: Any) -> ChunkRead | None:
        chunk = take(self, *key)
        found["now" if chunk is None else "ahead"] += 1
        return chunk

    monkeypatch.setattr(ReadAhead, "take", counted)
    return found


@pytest.mark.parametrize("schedule", ["barrier", "deferred"])
@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("tier", WHERE)
def test_reads_begin_in_backward_and_cost_nothing_more(
    tier: str, device: str, schedule: str, tmp_path: Path, used: dict[str, int]
) -> None:
    read = {}
    # With two slots nothing can be read before its turn.
    for staging in (1 << 20, 128 << 10):
        case = case_of(tier, device=device, schedule=schedule, staging=staging, chunk=16 << 10)
        with running(decoder(wide=True), case, tmp_path) as engine:
            assert engine._memory.staging is not None
            count = engine._memory.staging.count
            early = []
            for ids in BATCHES:
                backward(engine, ids)
                early.append(read_early(engine))
                engine.step()
            found = values(engine)
            engine.synchronize()
            read[staging] = engine.counters()["nvme_read_bytes"]
            assert given_back(engine)
        expected = in_memory()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert early == [0, *[max(0, min(count - 2, early[1]))] * 4] and (early[1] > 3) == (count > 5)
    assert used["ahead"] >= 4 * early[1] and read[1 << 20] <= read[128 << 10]


def first_name(engine: offload.Engine) -> str:
    return next(iter(dict(engine.module.named_parameters())))


@pytest.mark.parametrize("tier", WHERE)
@pytest.mark.parametrize("what", ["moment", "parameter", "weight"])
def test_what_is_written_after_it_was_read_is_read_again(
    what: str, tier: str, tmp_path: Path, used: dict[str, int]
) -> None:
    """Edits between backward and step, of the states or of the weight that is part of the master."""
    found = []
    for staging in (1 << 20, 128 << 10):
        with running(decoder(wide=True), case_of(tier, staging=staging, chunk=16 << 10), tmp_path) as engine:
            name = first_name(engine)
            for ids in BATCHES:
                backward(engine, ids)
                read_early(engine)
                if what == "weight":
                    with engine.gathered([engine.module.get_parameter(name)], modify=True):
                        engine.module.get_parameter(name).data.mul_(0.5)
                else:
                    kind = "exp_avg" if what == "moment" else "parameter"
                    engine.set_full(name, kind, engine.get_full(name, kind) * 0.5)
                engine.step()
            found.append(values(engine))
            if staging == 1 << 20:
                assert used["ahead"] > 0
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_a_skipped_step_keeps_what_was_read(tmp_path: Path, used: dict[str, int]) -> None:
    twin = Reference(decoder(wide=True))
    with running(decoder(wide=True), case_of(), tmp_path) as engine:
        for number, ids in enumerate(BATCHES):
            if number == 3:
                loss = engine(ids, labels=ids).loss
                engine.backward(loss * float("nan"))
                held = read_early(engine)
                before = engine.counters()["nvme_read_bytes"]
                assert not engine.step().stepped and len(engine._updates._ahead) == held > 3
                backward(engine, ids)
                assert read_early(engine) == held
                assert engine.counters()["nvme_read_bytes"] == before
            else:
                backward(engine, ids)
            twin.backward(twin.model(ids, labels=ids).loss)
            engine.step()
            twin.step()
        found = values(engine)
    assert all(torch.equal(found[name], p.detach()) for name, p in twin.model.named_parameters())
    assert used["ahead"] > 0


@pytest.mark.parametrize("accumulated", [1, 3])
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_gradients_find_slots_beside_reads_ahead(accumulated: int, device: str, tmp_path: Path) -> None:
    """Contributions to gradients on nvme, without room to gather them, and across devices take slots in backward."""
    twin = Reference(decoder(wide=True))
    for staging in (192 << 10, 512 << 10):
        case = case_of("nvme", device=device, staging=staging, chunk=16 << 10)
        twin = Reference(decoder(wide=True))
        with running(decoder(wide=True), case, tmp_path, memory={"host": staging + (300 << 10)}) as engine:
            for _ in range(2):
                for ids in BATCHES[:accumulated]:
                    backward(engine, ids)
                    twin.backward(twin.model(ids, labels=ids).loss)
                read_early(engine)
                engine.step()
                twin.step()
            found = values(engine)
        assert all(torch.equal(found[name], p.detach()) for name, p in twin.model.named_parameters())


class _Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(72, 72) for _ in range(3))

    def forward(self, x: torch.Tensor, used: tuple[int, ...]) -> torch.Tensor:
        for index in used:
            x = self.parts[index](x)
        return x


def test_reads_for_units_without_a_gradient_are_given_back(tmp_path: Path, used: dict[str, int]) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 72)
    plan = [(0, 1, 2), (1, 2), (2,), (0, 2), (0, 1, 2), (1,)]
    torch.manual_seed(1)
    twin = Reference(_Branches())
    torch.manual_seed(1)
    model = _Branches()
    with running(model, case_of(chunk=4 << 10), tmp_path, units={"wrap": ["Linear"]}) as engine:
        for parts in plan:
            engine.backward(engine(x, parts).square().sum())
            read_early(engine)
            engine.step()
            engine.synchronize()
            assert given_back(engine)
            twin.backward(twin.model(x, parts).square().sum())
            twin.step()
        found = values(engine)
    assert all(torch.equal(found[name], p.detach()) for name, p in twin.model.named_parameters())
    assert used["ahead"] > 0


@pytest.mark.parametrize("what", ["freeze", "evaluate", "synchronize", "zero_grad", "load", "hand over"])
def test_what_happens_between_backward_and_step(what: str, tmp_path: Path) -> None:
    found = []
    for staging in (1 << 20, 128 << 10):
        case = case_of(device="sim", staging=staging, chunk=16 << 10)
        with running(decoder(wide=True), case, tmp_path, memory={"nvme": 512 << 20}) as engine:
            for number, ids in enumerate(BATCHES):
                backward(engine, ids)
                read_early(engine)
                if what == "freeze" and number == 2:
                    engine.module.get_parameter(first_name(engine)).requires_grad_(False)
                elif what == "evaluate":
                    with torch.no_grad():
                        engine(ids, labels=ids)
                elif what == "synchronize":
                    engine.synchronize()
                    assert len(engine._updates._ahead) == 0
                elif what == "zero_grad" and number % 2:
                    engine.zero_grad()
                    backward(engine, ids)
                elif what == "load" and number == 1:
                    engine.zero_grad()
                    engine.save_checkpoint(tmp_path / f"saved{staging}")
                    backward(engine, ids)
                elif what == "load" and number == 3:
                    engine.zero_grad()
                    engine.load_checkpoint(tmp_path / f"saved{staging}")
                    assert len(engine._updates._ahead) == 0
                    backward(engine, ids)
                elif what == "hand over":
                    engine.offload_states()
                    engine.reload_states()
                engine.step()
            found.append(values(engine))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize("lost", [False, True], ids=["closed", "forgotten"])
def test_an_engine_that_ends_gives_everything_back(lost: bool, tmp_path: Path) -> None:
    before = threading.active_count()
    faults = FaultPlan(seed=1).delay(0.02, operation="read")
    engine = offload.initialize(
        decoder(wide=True),
        {
            "device": "cpu",
            "memory": {"nvme_paths": [str(tmp_path)], "nvme": "256MiB", "host": "256MiB"},
            "placement": {"parameters": "host", "gradients": "host", "optimizer": "nvme"},
            "swap": {"engine": "threads", "staging": "1MiB", "chunk": "16KiB"},
        },
        faults=faults,
    )
    for ids in BATCHES[:2]:
        backward(engine, ids)
        if ids is BATCHES[0]:
            engine.step()
    deadline = time.monotonic() + 20
    while not len(engine._updates._ahead):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    staging = engine._memory.staging
    assert staging is not None and staging.in_use > 0
    if not lost:
        engine.close()
    del engine
    gc.collect()
    gc.collect()
    assert staging.in_use == 0 and threading.active_count() == before


def test_an_error_of_a_read_ahead_is_the_errors_of_the_update(tmp_path: Path) -> None:
    faults = FaultPlan(seed=0)
    with running(decoder(wide=True), case_of(schedule="barrier"), tmp_path, faults=faults) as engine:
        for ids in BATCHES[:2]:
            backward(engine, ids)
            engine.step()
        faults.fail(operation="read")
        backward(engine, BATCHES[2])
        assert read_early(engine) > 0
        with pytest.raises(SwapIOError, match="read"):
            engine.step()
        with pytest.raises(offload.OffloadError, match="failed"):
            backward(engine, BATCHES[3])
        assert given_back(engine)


def test_marks_of_a_plane_tell_every_write(tmp_path: Path) -> None:
    """In swap files: none while a write is under way, another one after it, never the same again once it is freed."""
    faults = FaultPlan(seed=1).delay(0.05, operation="write")
    with running(decoder(wide=True), case_of(), tmp_path, faults=faults) as engine:
        plane = next(s for s in engine._states.values() if s.trainable).planes["exp_avg"]
        first = plane.mark()
        assert first is not None and plane.mark() == first
        source = torch.zeros(plane.entries(plane.base, plane.end), dtype=plane.spec.dtype)
        ticket = plane.submit_write(plane.base, plane.end, source)
        assert plane.mark() is None
        ticket.wait()
        second = plane.mark()
        assert second is not None and second != first
        plane.read(plane.base, plane.end, source)
        assert plane.mark() == second
        plane.free()
        assert plane.mark() != second


@pytest.mark.parametrize(
    "case",
    [
        Case(device="sim", parameters="nvme", gradients="host", optimizer="device", wide=True, staging=1 << 20),
        Case(parameters="host", gradients="nvme", optimizer="host", wide=True, staging=1 << 20),
    ],
    ids=str,
)
def test_no_slot_and_no_device_memory_is_held_for_nothing(case: Case, tmp_path: Path) -> None:
    """Chunks of which nothing is in a file, and those whose kernel would hold device memory through backward."""
    with running(decoder(wide=True), case, tmp_path) as engine:
        for ids in BATCHES:
            backward(engine, ids)
            assert read_early(engine) == 0
            assert engine.memory().current["device"].get("step", 0) == 0
            engine.step()
        found = values(engine)
    expected = in_memory()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_read_ahead_that_cannot_be_prepared_costs_no_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_arguments: Any, **_options: Any) -> None:
        raise BudgetError(tier="device", kind="step", requested=2, used=0, limit=1, what="a chunk")

    with running(decoder(wide=True), case_of(schedule="barrier"), tmp_path) as engine:
        for number, ids in enumerate(BATCHES):
            with monkeypatch.context() as patch:
                if number == 2:
                    patch.setattr("offload.schedule.ahead.ChunkRead.__init__", refused)
                backward(engine, ids)
                held = read_early(engine)
            assert (held > 0) == (number not in (0, 2))
            engine.step()
        found = values(engine)
        engine.synchronize()
        assert given_back(engine)
    expected = in_memory()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
