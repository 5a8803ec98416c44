"""The measured tables of memory and communication, on a small model under `torchrun`; what they count with."""

from __future__ import annotations

import json

import pytest

from offload.bench import communication, memory
from tests.ranks.harness import run_torchrun


def test_ranges_are_counted_once() -> None:
    union = memory.merged([(0, 10), (5, 12), (20, 30), (12, 13)])
    assert union == [(0, 13), (20, 30)]
    assert memory.common(union, [(8, 22), (29, 40)]) == 5 + 2 + 1


def test_the_formulas_are_those_of_the_table() -> None:
    totals = [[sum(memory.formula(stage, world).values()) for stage in range(4)] for world in (1, 8)]
    assert totals == [[16, 16, 16, 16], [16, 5.5, 3.75, 2]]
    assert [communication.formula(stage, 8, 8) for stage in range(4)] == [2, 2, 2, 3]
    assert [communication.formula(stage, 8, 8, micro=8) for stage in range(4)] == [2, 2, 2, 17]
    assert communication.formula(3, 8, 4) == 3.5


def bench(name: str, nproc: int, *options: str) -> dict[str, object]:
    ended = run_torchrun(["-m", "offload", "bench", name, "--json", *options], nproc=nproc, timeout=900, apart=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.left == []
    found: dict[str, object] = json.loads(ended.stdout)
    return found


@pytest.mark.parametrize("nproc", [pytest.param(1, marks=pytest.mark.acceptance), 2])
def test_memory(nproc: int) -> None:
    rows = bench("memory", nproc, "--layers", "4")["stages"]
    assert [row["stage"] for row in rows] == [0, 1, 2, 3]  # type: ignore[attr-defined]
    for row in rows:  # type: ignore[attr-defined]
        assert abs(row["deviation"]) < 0.02, row


@pytest.mark.acceptance
@pytest.mark.parametrize("nproc", [4, 8])
def test_memory_on_more_ranks(nproc: int) -> None:
    for row in bench("memory", nproc)["stages"]:  # type: ignore[attr-defined]
        assert abs(row["deviation"]) < 0.02, row


@pytest.mark.acceptance
@pytest.mark.parametrize("nproc", [2, 4, 8])
def test_communication(nproc: int) -> None:
    for row in bench("communication", nproc)["rows"]:  # type: ignore[attr-defined]
        assert abs(row["deviation"]) < 0.02, row
        assert -0.01 < row["loopback_deviation"] < 0.05, row
