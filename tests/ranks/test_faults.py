"""What ends one rank ends all, with an error that says who and what."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import offload
from tests.engine.common import config_of, decoder, placed, token_batches
from tests.ranks.harness import Outcome, RankPool
from tests.ranks.training import own_folder

PoolOf = Callable[[int], RankPool]
CULPRIT = 1


class CulpritError(Exception):
    """Raised on one rank only."""


def training(where: str, stage: int, folder: Path) -> None:
    """Rank 1 fails in the second step."""
    culprit = dist.get_rank() == CULPRIT
    config = config_of(placed("cpu", "host"), own_folder(folder), parallel={"stage": stage, "timeout": 4.0})
    with offload.initialize(decoder(), config) as engine:
        for step in range(3):
            fails = culprit and step == 1
            ids = token_batches(2, seed=step)[dist.get_rank()]
            if fails and where == "late":
                time.sleep(30)
            if fails and where == "forward":
                engine.module.layers[1].register_forward_pre_hook(_raise)
            loss = engine(ids, labels=ids).loss
            if fails and where == "backward":
                loss.register_hook(_raise)
            engine.backward(loss)
            if fails and where == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if fails and where == "step":
                engine.optimizer.param_groups[0]["lr"] = "fast"
            if fails and where == "elsewhere":
                engine.get_full("norm.weight", "grad")
            engine.step()
        engine.synchronize()


def _raise(*_: Any) -> None:
    raise CulpritError("the cause of it all")


def ended(pool: RankPool, where: str, stage: int, folder: Path) -> list[Outcome]:
    began = time.monotonic()
    outcomes = pool.outcomes(training, where, stage, folder, timeout=50.0)
    print(where, stage, f"{time.monotonic() - began:.1f} s", *(o.message for o in outcomes), sep="\n  ")
    assert all(outcome.failed for outcome in outcomes)
    return outcomes


LONG = pytest.mark.acceptance


@pytest.mark.parametrize(
    ("where", "stage"),
    [
        ("backward", 3),
        pytest.param("forward", 0, marks=LONG),
        pytest.param("forward", 3, marks=LONG),
        pytest.param("backward", 0, marks=LONG),
        pytest.param("step", 0, marks=LONG),
        pytest.param("step", 3, marks=LONG),
    ],
)
def test_a_rank_that_raises(where: str, stage: int, pool_of: PoolOf, tmp_path: Path) -> None:
    outcomes = ended(pool_of(2), where, stage, tmp_path)
    assert outcomes[1].kind in ("CulpritError", "ValueError")
    assert outcomes[0].kind == "ParallelError"
    assert f"rank 1: {outcomes[1].kind}: {outcomes[1].message}" in outcomes[0].message


@pytest.mark.parametrize("stage", [pytest.param(0, marks=LONG), 3])
def test_a_rank_that_is_killed(stage: int, pool_of: PoolOf, tmp_path: Path) -> None:
    outcomes = ended(pool_of(2), "killed", stage, tmp_path)
    assert outcomes[1].exit == -signal.SIGKILL
    assert outcomes[0].kind == "ParallelError" and "another rank is gone" in outcomes[0].message


def test_ranks_that_call_different_things(pool_of: PoolOf, tmp_path: Path) -> None:
    outcomes = ended(pool_of(2), "elsewhere", 1, tmp_path)
    assert any("ranks do different things" in outcome.message for outcome in outcomes)


@LONG
def test_a_rank_that_does_not_come(pool_of: PoolOf, tmp_path: Path) -> None:
    outcomes = pool_of(2).outcomes(training, "late", 3, tmp_path, timeout=50.0)
    assert outcomes[0].kind == "ParallelError" and outcomes[0].at < 20
