"""Two nodes with two ranks each: the same bits as one node with four, and one end for both when something is lost."""

from __future__ import annotations

import dataclasses
import json
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

from tests.engine.common import assert_equal
from tests.offload.test_cli import TINY
from tests.ranks.harness import Ended, RankPool
from tests.ranks.namespaces import TwoNodes, report, why_not
from tests.ranks.training import Run, expected_of, trained_digest

RUNS = [
    Run(world=4, shard=shard, parameters=tier, optimizer=tier, gradients=tier, numbers=("bf16", "fp32"))
    for shard in (None, 2)
    for tier in ("host", "nvme")
]
pytestmark = pytest.mark.timeout(400)  # six processes have to start, on a machine that may do much else
LONG = 180.0
"""Seconds that nothing should need."""
ENDLESS = (*TINY, "train.batch_size=4", "train.steps=1000000", "parallel.stage=3", f"parallel.timeout={LONG:g}")


@cache
def _reason() -> str | None:
    return why_not()


@pytest.fixture
def nodes() -> Iterator[TwoNodes]:
    if reason := _reason():
        pytest.skip(reason)
    with TwoNodes() as made:
        yield made


def _folders(folder: Path) -> list[Path]:
    made = [folder / "node0", folder / "node1"]
    for path in made:
        path.mkdir()
    return made


PROGRAM = ["-m", "tests.ranks.node_program", json.dumps([dataclasses.asdict(run) for run in RUNS])]


def _equal_one(ended: Ended, pool: RankPool, folder: Path) -> None:
    """What rank 0 has printed is what four ranks on one node find, and that is the reference's."""
    found = dict(line.split()[1:] for line in ended.stdout.splitlines() if line.startswith("run "))
    for number, run in enumerate(RUNS):
        digest, trace = pool.run(trained_digest, run, folder / f"one{number}")[0]
        assert found[str(number)] == digest, run
        assert_equal(trace, expected_of(run))


def _ended_by_the_timeout(ended: Sequence[Ended]) -> None:
    for e in ended:
        assert "ParallelError" in e.stderr and "parallel.timeout = 8 s" in e.stderr, report(ended)
        assert "Aborted" not in e.stderr, report(ended)


def test_two_nodes_equal_one_and_a_lost_link_ends_both(
    nodes: TwoNodes, pool_of: Callable[[int], RankPool], tmp_path: Path
) -> None:
    """Nothing arrives and nothing is refused: ranks end by the timeout, and by what they cannot ask any more."""
    nodes.start([*PROGRAM, "endless"], _folders(tmp_path))
    _until(lambda: "step 5" in nodes.said(0), nodes)
    nodes.cut()
    ended = nodes.wait_for_ranks(LONG)
    _ended_by_the_timeout(ended)
    _equal_one(ended[0], pool_of(4), tmp_path)


@pytest.mark.acceptance
def test_two_nodes_end_as_they_are_meant_to(
    nodes: TwoNodes, pool_of: Callable[[int], RankPool], tmp_path: Path
) -> None:
    nodes.start(PROGRAM, _folders(tmp_path))
    ended = nodes.wait(LONG)
    assert [e.returncode for e in ended] == [0, 0], report(ended)
    assert not any(e.left for e in ended)
    _equal_one(ended[0], pool_of(4), tmp_path)


def _until(condition: Callable[[], bool], nodes: TwoNodes) -> None:
    deadline = time.monotonic() + LONG
    while not condition():
        if time.monotonic() > deadline or not any(mark.processes() for mark in nodes.marks()):
            raise AssertionError(report(nodes.wait(1.0)))
        time.sleep(0.1)


@pytest.mark.parametrize("more", [("parallel.shard_size=2",), pytest.param((), marks=pytest.mark.acceptance)], ids=str)
def test_a_rank_that_is_killed_ends_both(nodes: TwoNodes, tmp_path: Path, more: tuple[str, ...]) -> None:
    folders = _folders(tmp_path)
    metrics = folders[0] / "run" / "metrics.jsonl"
    nodes.start(["-m", "offload", "train", *ENDLESS, *more, "--run-dir", "run"], folders)
    _until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 3, nodes)
    nodes.marks()[1].processes(ranks=True)[-1].send_signal(signal.SIGKILL)
    ended = nodes.wait(LONG / 2)  # long before the timeout
    assert all(e.returncode != 0 and not e.left for e in ended), report(ended)
    assert "is gone" in ended[0].stderr and "Signal 9 (SIGKILL)" in ended[1].stderr, report(ended)


@pytest.mark.acceptance
@pytest.mark.parametrize("shard", ["4", "2"])
def test_a_link_that_is_lost_ends_both(nodes: TwoNodes, tmp_path: Path, shard: str) -> None:
    nodes.start(["-m", "tests.ranks.loop_program", "endless", shard], _folders(tmp_path))
    _until(lambda: "step 5" in nodes.said(0), nodes)
    nodes.cut()
    _ended_by_the_timeout(nodes.wait_for_ranks(LONG))
