"""The harness itself: results, failures with their tracebacks, stuck ranks with their stacks, nothing left."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.ranks.harness import RankPool, RanksFailedError, RanksStuckError, run_torchrun

PoolOf = Callable[[int], RankPool]


def total(offset: int) -> int:
    value = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(value)
    return int(value)


def raises_on(rank: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == rank:
        store.set("raised", "yes")
        raise KeyError("the culprit")
    store.wait(["raised"])
    time.sleep(1.0)
    raise RuntimeError("a consequence")


def killed_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)


def stays() -> None:
    time.sleep(60)


def test_results_come_by_rank_and_a_pool_is_used_again(pool_of: PoolOf) -> None:
    pool = pool_of(2)
    assert pool.run(total, 10) == [21, 21]
    pids = pool.pids
    assert pool.run(total, offset=0) == [1, 1]
    assert pool.pids == pids


def test_the_first_failure_comes_first_and_the_pool_goes_on(pool_of: PoolOf) -> None:
    with pytest.raises(RanksFailedError, match=r"(?s)^rank 1 failed .*the culprit.*rank 0 failed .*a consequence"):
        pool_of(2).run(raises_on, 1)
    assert pool_of(2).run(total, 0) == [1, 1]


def test_a_killed_rank_is_told(pool_of: PoolOf) -> None:
    outcomes = pool_of(2).outcomes(killed_on, 1)
    assert outcomes[1].exit == -signal.SIGKILL and not outcomes[0].failed


def test_stuck_ranks_are_killed_and_show_their_stacks(pool_of: PoolOf) -> None:
    pool = pool_of(2)
    pool.run(total, 0)
    pids = pool.pids
    with pytest.raises(RanksStuckError, match=r"(?s)rank 0.*in stays.*rank 1.*in stays"):
        pool.run(stays, timeout=5.0)
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_commands_under_torchrun_leave_nothing() -> None:
    code = "import os, subprocess, sys; subprocess.Popen(['sleep', '60']); "
    code += "sys.stdout.write(f'rank {os.environ[\"RANK\"]}\\n')"  # in one piece
    ended = run_torchrun(["--no-python", sys.executable, "-c", code], nproc=2)
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.split()) == ["0", "1", "rank", "rank"]
    assert sorted(ended.left) == ["sleep 60", "sleep 60"]
