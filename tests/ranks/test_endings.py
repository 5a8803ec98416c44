"""A user's own loop on two ranks: however one of them ends, all do, and the others say why."""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist

from tests import programs
from tests.ranks.harness import ROOT, run_torchrun

PROGRAM = ["-m", "tests.ranks.loop_program"]


def _by_hand(how: str) -> list[tuple[int, str]]:
    """Exit status and errors by rank. No launcher, which would end the others before they can speak, but its store."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes: list[programs.Program] = []
    try:
        for rank in range(2):
            environment = {
                **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
            }  # fmt: skip
            processes.append(programs.Program(*PROGRAM, how, env=environment))
        errors = [process.communicate(timeout=200)[1] for process in processes]
        return [(process.wait(), error) for process, error in zip(processes, errors, strict=True)]
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.parametrize("how", ["raises", pytest.param("raises-in-with", marks=pytest.mark.acceptance)])
def test_an_exception_is_what_all_end_with(how: str) -> None:
    (first, said), (second, own) = _by_hand(how)
    assert first != 0 and second != 0
    assert own.count("RuntimeError: the loader has no more") == 1
    assert "the first failure was on rank 1: RuntimeError: the loader has no more" in said or (
        "another rank has failed; rank 1: RuntimeError: the loader has no more" in said
    )


@pytest.mark.parametrize("how", ["exits", pytest.param("leaves", marks=pytest.mark.acceptance)])
def test_a_rank_that_is_over_ends_the_others(how: str) -> None:
    (first, said), (second, _) = _by_hand(how)
    assert first != 0 and "ParallelError" in said
    assert second == (3 if how == "exits" else 0)


def test_ranks_that_wait_for_different_things_end_with_an_error_not_an_abort() -> None:
    """Nobody closes the engines, whose threads wait for messages that never come."""
    for status, said in _by_hand("diverges"):
        assert status == 1 and "ranks do different things" in said, said
        assert "terminate called" not in said


@pytest.mark.parametrize("how", ["done", pytest.param("forgets", marks=pytest.mark.acceptance)])
def test_an_end_that_is_meant(how: str) -> None:
    ended = run_torchrun([*PROGRAM, how], nproc=2, timeout=200)
    assert ended.returncode == 0 and not ended.left, ended.stderr
    assert ended.stdout.count("done") == 2


@pytest.mark.acceptance
@pytest.mark.parametrize("how", ["raises", "raises-in-with", "exits", "leaves"])
def test_a_launcher_ends_what_is_left(how: str) -> None:
    ended = run_torchrun([*PROGRAM, how], nproc=2, timeout=200)
    assert ended.returncode != 0 and not ended.left
    if how.startswith("raises"):
        assert "RuntimeError: the loader has no more" in ended.stderr
