"""Stages, tiers, schedules, orders and devices give the same bits, which are those of a loop in one process.

The policy of `tests.ranks.reference.Policy` is all that bits depend on: the number of ranks, how many of them divide
state, dtypes, and whether micro-batches are summed before or after they are reduced.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swap.faults import FaultPlan
from tests.engine.common import TIERS, Trace, assert_equal, pairwise, product
from tests.ranks.harness import RankPool
from tests.ranks.training import Run, expected_of, runs_of, trained, trained_digest

PoolOf = Callable[[int], RankPool]
STAGES = (0, 1, 2, 3)
STEP = [("barrier", True), ("barrier", False), ("deferred", True), ("deferred", False), ("eager", False)]
FACTORS: dict[str, Any] = {
    "stage": STAGES,
    "parameters": TIERS,
    "gradients": TIERS,
    "optimizer": TIERS,
    "device": ["cpu", "sim"],
    "step": STEP,
    "order": ["batch_major", "layer_major"],
    "activations": ["keep", "recompute", "host", "nvme"],
    "numbers": [("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "split"), ("bf16", "compact"), ("fp16", "fp32")],
    "reduce": ["auto", "fp32", "bf16"],
    "accumulate": ["auto", "local", "reduced"],
    "micro": [1, 3],
    "persistent": [0, 200],
    "kept": [True, False],
}


def check(run: Run, pool: RankPool, folder: Path) -> None:
    results = pool.run(trained_digest, run, folder)
    trace = results[0][1]
    assert_equal(trace, expected_of(run))
    assert len({digest for digest, _ in results}) == 1, "ranks differ"


@pytest.mark.parametrize("run", runs_of(pairwise(FACTORS), world=2, wide=False), ids=str)
def test_two_ranks(run: Run, pool_of: PoolOf, tmp_path: Path) -> None:
    check(run, pool_of(2), tmp_path)


FEWER = {
    **FACTORS,
    "gradients": ["host", "nvme"],
    "step": [("barrier", True), ("deferred", True), ("eager", False)],
    "activations": ["keep"],
    "numbers": [("fp32", "fp32"), ("bf16", "compact"), ("bf16", "fp32")],
    "reduce": ["auto", "bf16"],
    "accumulate": ["auto", "reduced"],
    "micro": [1, 2],
    "limit": ["auto", 1 << 20],
}


@pytest.mark.parametrize("run", runs_of(pairwise(FEWER, seed=1), world=3, wide=True), ids=str)
def test_three_ranks_of_a_wide_model(run: Run, pool_of: PoolOf, tmp_path: Path) -> None:
    check(run, pool_of(3), tmp_path)


def slow(run: Run, folder: Path) -> Trace:
    return trained(run, folder, faults=FaultPlan(seed=1).delay(0.02, operation="write"))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_early_reductions_wait_for_gradients_on_their_way_to_the_disk(
    stage: int, pool_of: PoolOf, tmp_path: Path
) -> None:
    run = Run(world=2, stage=stage, gradients="nvme", schedule="eager", clip=False, wide=True)
    assert_equal(pool_of(2).run(slow, run, tmp_path)[0], expected_of(run))


@pytest.mark.parametrize("schedule", ["barrier", "eager"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_micro_batches_that_are_to_be_reduced_one_by_one(
    stage: int, schedule: str, pool_of: PoolOf, tmp_path: Path
) -> None:
    """In stages 0 and 1 that says nothing, whenever units are updated."""
    run = Run(world=2, stage=stage, schedule=schedule, clip=False, micro=3, accumulate="reduced")
    check(run, pool_of(2), tmp_path)


HYBRID = {**FEWER, "stage": [1, 2, 3], "parameters": ["host", "nvme"], "optimizer": ["host", "nvme"]}


@pytest.mark.parametrize("run", runs_of(pairwise(HYBRID, seed=2), world=4, shard=2, wide=False), ids=str)
def test_two_replicas_of_two_shards(run: Run, pool_of: PoolOf, tmp_path: Path) -> None:
    check(run, pool_of(4), tmp_path)


# Stages x tiers x schedules x devices in full, for a policy that uses them all.
FULL = {
    **{name: [values[0]] for name, values in FACTORS.items()},
    **{name: FACTORS[name] for name in ("stage", "parameters", "gradients", "optimizer", "device", "step", "order")},
    "numbers": [("bf16", "fp32")],
    "micro": [2],
}


@pytest.mark.acceptance
@pytest.mark.parametrize("wide", [False, True], ids=["small", "wide"])
@pytest.mark.parametrize("stage", STAGES)
def test_every_combination(stage: int, wide: bool, pool_of: PoolOf, tmp_path: Path) -> None:
    for run in runs_of(list(product({**FULL, "stage": [stage]})), world=2, wide=wide):
        check(run, pool_of(2), tmp_path)


@pytest.mark.acceptance
@pytest.mark.parametrize("seed", range(3, 8))
def test_more_covers(seed: int, pool_of: PoolOf, tmp_path: Path) -> None:
    for run in runs_of(pairwise(FACTORS, seed=seed), world=2, wide=False):
        check(run, pool_of(2), tmp_path)
    for run in runs_of(pairwise(FACTORS, seed=seed + 100), world=3, wide=True):
        check(run, pool_of(3), tmp_path)
    for run in runs_of(pairwise(HYBRID, seed=seed + 200), world=4, shard=2, wide=seed % 2 == 0):
        check(run, pool_of(4), tmp_path)
