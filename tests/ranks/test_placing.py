"""A rank's share of its machine: threads and NUMA nodes, taken once and given back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from offload.parallel import placing
from optimizer_cpu import threads as kernel_threads


@pytest.fixture
def as_launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As a rank of `torchrun` begins."""
    before = torch.get_num_threads()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    kernel_threads.set_threads(None)


def _nodes(folder: Path, *lists: str) -> Path:
    for node, text in enumerate(lists):
        (folder / f"node{node}").mkdir()
        (folder / f"node{node}" / "cpulist").write_text(text + "\n")
    return folder


def test_lists_of_cpus() -> None:
    assert placing.parse_cpus("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert placing.parse_cpus("\n") == set()


def test_nodes_are_shared_equally() -> None:
    nodes = {0: {0, 1, 2, 3}, 1: {4, 5, 6, 7}, 2: set[int]()}
    everything = set(range(8))
    assert [placing.own_node(everything, nodes, rank, 4) for rank in range(4)] == [0, 0, 1, 1]
    assert [placing.own_node(everything, nodes, rank, 2) for rank in range(2)] == [0, 1]
    assert placing.own_node(everything, nodes, 0, 3) is None  # not equally
    assert placing.own_node(everything, nodes, 0, 1) is None
    assert placing.own_node({0, 1}, nodes, 0, 2) is None  # bound by a launcher
    assert placing.own_node({0, 1, 4}, nodes, 0, 2) is None  # unequal nodes
    assert placing.own_node(everything, {}, 0, 2) is None  # unknown


def test_the_share_is_taken_once_and_given_back(
    as_launched: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(kernel_threads, "default_threads", lambda: 3)
    root = _nodes(tmp_path, "0-4095")
    first = placing.place(0, 2, root=root)
    second = placing.place(0, 2, root=root)
    try:
        assert torch.get_num_threads() == 3
        assert str(placing.current()).startswith("2 ranks on this machine: 3 threads each;")
        first()
        first()
        assert torch.get_num_threads() == 3
    finally:
        first()
        second()
    assert torch.get_num_threads() == 1
    assert placing.current() is None


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs sched_setaffinity")
def test_a_rank_keeps_to_its_node(as_launched: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("needs two CPUs")
    ordered = sorted(before)[: len(before) // 2 * 2]
    halves = ordered[: len(ordered) // 2], ordered[len(ordered) // 2 :]
    os.sched_setaffinity(0, ordered)
    try:
        monkeypatch.setattr(kernel_threads, "default_threads", lambda: 1)
        undo = placing.place(1, 2, root=_nodes(tmp_path, *(",".join(map(str, half)) for half in halves)))
        try:
            assert os.sched_getaffinity(0) == set(halves[1])
            assert "NUMA node 1" in str(placing.current())
            assert kernel_threads.get_threads() == 1  # of the share, not of what is left of it
        finally:
            undo()
        assert os.sched_getaffinity(0) == set(ordered)
    finally:
        os.sched_setaffinity(0, before)


def test_what_the_program_has_chosen_stays(as_launched: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kernel_threads, "default_threads", lambda: 3)
    torch.set_num_threads(2)
    undo = placing.place(0, 2, root=_nodes(tmp_path, "0"))
    assert torch.get_num_threads() == 2 and placing.current() is None
    undo()
    torch.set_num_threads(1)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    undo = placing.place(0, 2, root=tmp_path)
    assert torch.get_num_threads() == 1 and placing.current() is None
    undo()
