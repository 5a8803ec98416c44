"""What ends one rank ends all, with an error that says who and what."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import offload
from offload.errors import ParallelError
from tests.engine.common import config_of, decoder, placed, token_batches
from tests.ranks.harness import Outcome, RankPool
from tests.ranks.training import own_folder

PoolOf = Callable[[int], RankPool]
CULPRIT = 1


class CulpritError(Exception):
    """Raised on one rank only."""


def training(where: str, stage: int, folder: Path) -> None:
    """Rank 1 fails in the second step."""
    culprit, store = dist.get_rank() == CULPRIT, dist.distributed_c10d._get_default_store()
    # No failure but those that are late may take its time: a loaded machine must not look like one.
    timeout = 6.0 if where.startswith("late") else 60.0
    config = config_of(placed("cpu", "host"), own_folder(folder), parallel={"stage": stage, "timeout": timeout})
    try:
        with offload.initialize(decoder(), config) as engine:
            for step in range(3):
                fails = culprit and step == 1
                ids = token_batches(2, seed=step)[dist.get_rank()]
                if fails and where == "late":
                    store.wait(["given up"], timedelta(seconds=60))
                if fails and where == "forward":
                    engine.module.layers[1].register_forward_pre_hook(_raise)
                loss = engine(ids, labels=ids).loss
                if fails and where == "backward":
                    loss.register_hook(_raise)
                if fails and where == "late backward":
                    store.wait(["given up"], timedelta(seconds=60))
                engine.backward(loss)
                if fails and where == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                if fails and where == "step":
                    engine.optimizer.param_groups[0]["lr"] = "fast"
                if fails and where == "elsewhere":
                    engine.get_full("norm.weight", "grad")
                engine.step()
            engine.synchronize()
    except ParallelError:
        store.set("given up", "yes")
        raise


def _raise(*_: Any) -> None:
    raise CulpritError("the cause of it all")


def ended(pool: RankPool, where: str, stage: int, folder: Path) -> list[Outcome]:
    began = time.monotonic()
    outcomes = pool.outcomes(training, where, stage, folder, timeout=120.0)
    print(where, stage, f"{time.monotonic() - began:.1f} s", *(o.message for o in outcomes), sep="\n  ")
    assert all(outcome.failed for outcome in outcomes)
    assert all(outcome.left == () for outcome in outcomes), "threads or files are left behind"
    return outcomes


LONG = pytest.mark.acceptance


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("where", ["forward", "backward", "step"])
def test_a_rank_that_raises(where: str, stage: int, pool_of: PoolOf, tmp_path: Path) -> None:
    outcomes = ended(pool_of(2), where, stage, tmp_path)
    assert outcomes[1].kind in ("CulpritError", "ValueError")
    assert outcomes[0].kind == "ParallelError"
    assert f"rank 1: {outcomes[1].kind}: {outcomes[1].message}" in outcomes[0].message


@pytest.mark.parametrize("stage", [pytest.param(0, marks=LONG), 3])
def test_a_rank_that_is_killed(stage: int, pool_of: PoolOf, tmp_path: Path) -> None:
    outcomes = ended(pool_of(2), "killed", stage, tmp_path)
    assert outcomes[1].exit == -signal.SIGKILL
    assert outcomes[0].kind == "ParallelError" and "rank 1 is gone" in outcomes[0].message


def test_ranks_that_call_different_things(pool_of: PoolOf, tmp_path: Path) -> None:
    outcomes = ended(pool_of(2), "elsewhere", 1, tmp_path)
    assert any("ranks do different things" in outcome.message for outcome in outcomes)


@pytest.mark.parametrize(("where", "stage"), [pytest.param("late", 3, marks=LONG), ("late backward", 2)])
def test_a_rank_that_does_not_come(where: str, stage: int, pool_of: PoolOf, tmp_path: Path) -> None:
    outcomes = ended(pool_of(2), where, stage, tmp_path)
    assert outcomes[0].kind == "ParallelError" and "parallel.timeout = 6 s" in outcomes[0].message
