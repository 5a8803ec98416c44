"""Several paths: shares in proportion to bandwidth, full and slow ones named; and how much of a drive a run wears."""

from __future__ import annotations

import errno
import logging
from pathlib import Path

import pytest
import torch

from swap import PAGE, FaultPlan, SwapStats, SwapStore
from swap import stats as stats_module
from swap.space import SwapSpace
from swap.wear import WearLedger

MIB = 1 << 20


class FakeFile:
    """A path with room for so many bytes."""

    def __init__(self, name: str, room: int) -> None:
        self.path, self.free_bytes, self.size = name, room, 0

    def grow(self, system: object, nbytes: int) -> None:
        from swap import SwapIOError

        if nbytes > self.free_bytes:
            raise SwapIOError(operation="allocate", path=self.path, offset=0, nbytes=nbytes, errno=errno.ENOSPC)
        self.free_bytes -= nbytes
        self.size += nbytes


def space(weights: list[float], rooms: list[int]) -> SwapSpace:
    files = [FakeFile(f"path{number}", room) for number, room in enumerate(rooms)]
    return SwapSpace(files, None, stripe=MIB, capacity=None, weights=weights)  # type: ignore[arg-type]


def taken(found: SwapSpace, sizes: list[int], paths: int) -> list[int]:
    shares = [0] * paths
    for size in sizes:
        for segment in found.allocate(size) or ():
            shares[segment.path] += segment.nbytes
    return shares


def test_long_extents_are_dealt_out_in_proportion() -> None:
    assert taken(space([3.0, 1.0], [1 << 40] * 2), [400 * MIB], 2) == [300 * MIB, 100 * MIB]
    assert taken(space([1.0, 1.0, 2.0], [1 << 40] * 3), [8 * MIB], 3) == [2 * MIB, 2 * MIB, 4 * MIB]


def test_short_extents_add_up_to_the_proportion() -> None:
    shares = taken(space([5.0, 1.0], [1 << 40] * 2), [2 * MIB] * 90, 2)
    assert shares == [150 * MIB, 30 * MIB]


def test_a_full_path_is_named_once_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    found = space([1.0, 1.0], [1 << 40, 8 * MIB])
    with caplog.at_level(logging.WARNING):
        shares = taken(found, [32 * MIB] * 4, 2)
    assert sum(shares) == 128 * MIB and shares[1] <= 8 * MIB
    assert [record.getMessage() for record in caplog.records] == [
        "swap: path path1 is full (No space left on device): the other paths take its part"
    ]


def test_a_slow_path_is_named_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    clock = [0.0]
    monkeypatch.setattr(stats_module.time, "monotonic", lambda: clock[0])
    stats = SwapStats(["fast", "slow"], weights=[2.0, 1.0])

    def move(path: int, seconds: float, nbytes: int) -> None:
        stats.begin(write=False, path=path)
        clock[0] += seconds
        stats.end(write=False, path=path, nbytes=nbytes, bounced=False)

    with caplog.at_level(logging.WARNING):
        for _ in range(8):  # as fast as its weight promises
            move(0, 0.1, 200 * MIB)
            move(1, 0.1, 100 * MIB)
        assert not caplog.records
        assert stats.path_rates(write=False) == pytest.approx((2000 * MIB, 1000 * MIB))
        for _ in range(40):
            move(0, 0.1, 200 * MIB)
            move(1, 1.0, 100 * MIB)
    (record,) = caplog.records
    assert "path slow reads at" in record.getMessage() and "memory.nvme_paths" in record.getMessage()


def test_a_store_on_two_paths_with_weights(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    with pytest.raises(ValueError, match="weights"):
        SwapStore(paths, weights=[1.0])
    with pytest.raises(ValueError, match="weights"):
        SwapStore(paths, weights=[1.0, 0.0])
    with SwapStore(paths, weights=[3.0, 1.0]) as store:
        data = torch.randint(0, 256, (32 * MIB + 5 * PAGE,), dtype=torch.uint8)
        extent = store.allocate(data.numel())
        store.write(extent, data).wait(60)
        buffer = torch.zeros_like(data)
        store.read(extent, buffer).wait(60)
        assert torch.equal(buffer, data)
        first, second = store.stats.path_write_bytes
        assert first == 24 * MIB + 5 * PAGE and second == 8 * MIB


def test_wear_is_counted_from_the_first_step() -> None:
    ledger = WearLedger(["a", "b"], 10**9)
    ledger.begin_steps((10**6, 0))
    a, b = ledger.report((3 * 10**6, 10**6), steps=2)
    assert (a.written_bytes, a.bytes_per_step, a.percent_of_life) == (3 * 10**6, 10**6, pytest.approx(0.3))
    assert a.steps_left == 997 and b.steps_left == (10**9 - 10**6) * 2 // 10**6
    unknown = WearLedger(["a"], None).report((5,), steps=0)[0]
    assert unknown.to_dict() == {
        "written_bytes": 5,
        "bytes_per_step": 0.0,
        "percent_of_life": None,
        "steps_left": None,
    }


def test_one_warning_when_the_run_would_take_much(caplog: pytest.LogCaptureFixture) -> None:
    ledger = WearLedger(["drive"], 10**9)
    ledger.begin_steps((0,))
    with caplog.at_level(logging.WARNING):
        ledger.check((10**5,), steps=1, total_steps=99)
        assert not caplog.records
        for _ in range(3):
            ledger.check((10**5,), steps=1, total_steps=101)
    (record,) = caplog.records
    for word in ("drive", "swap.endurance_tbw", "1.0 %", "steps are left"):
        assert word in record.getMessage()


def test_the_store_itself_warns_when_a_hundredth_is_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), SwapStore([tmp_path], endurance=100 * MIB) as store:
        extent = store.allocate(MIB)
        data = torch.zeros(MIB, dtype=torch.uint8)
        store.write(extent, data).wait(60)
        assert not caplog.records
        for _ in range(3):
            store.write(extent, data).wait(60)
        assert len(caplog.records) == 1
    with pytest.raises(ValueError, match="endurance"):
        SwapStore([tmp_path], endurance=0)


def test_a_full_disk_behind_one_of_two_paths(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    plan = FaultPlan().fail("allocate", errno.ENOSPC, nth=2, times=1)
    with caplog.at_level(logging.WARNING), SwapStore(paths, faults=plan) as store:
        extent = store.allocate(64 * MIB)
        assert sum(segment.nbytes for segment in extent.segments) == 64 * MIB
