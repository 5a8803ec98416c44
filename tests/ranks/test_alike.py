"""Ranks that do not do the same: they are found out at once, or do what is right, but never train on silently."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

import offload
from offload.errors import GradientError, ParallelError
from offload.parallel.alike import check_alike
from tests.engine.common import (
    assert_states_equal,
    config_of,
    decoder,
    placed,
    running,
    states_of,
    token_batches,
    two_groups,
    warmup_cosine,
)
from tests.ranks.harness import RankPool
from tests.ranks.reference import Policy, RankReference
from tests.ranks.training import loss_of, own_folder

PoolOf = Callable[[int], RankPool]
ACCEPTANCE = pytest.mark.acceptance


def engine_of(folder: Path, stage: int, *, timeout: float = 60.0, **parallel: Any) -> Any:
    settings = {"stage": stage, "timeout": timeout, "place_ranks": False, **parallel}
    return running(decoder(), placed("cpu", "host"), own_folder(folder), max_grad_norm=None, parallel=settings)


def skips_a_backward(folder: Path, stage: int) -> None:
    """Rank 1 computes a loss in step 1, and thinks better of it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    twin = RankReference(decoder(), Policy(world=world, shard=world), loss=loss_of)
    with engine_of(folder, stage) as engine:
        for step in range(3):
            by_rank = token_batches(world, seed=step)
            loss = loss_of(engine, by_rank[rank])
            if step != 1 or rank == 0:
                engine.backward(loss)
            if step == 1:
                engine.clip_grad_norm_(1e3)
            result = engine.step()
            held: dict[str, tuple[Tensor, int]] = {}
            sent = [twin._local([by_rank[r]], [0], [], []) if step != 1 or r == 0 else {} for r in range(world)]
            twin._reduce(sent, held)
            assert result.grad_norm == twin.update({name: g for name, (g, _) in held.items()}, 1.0)
        assert_states_equal(states_of(engine), twin.states())


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=ACCEPTANCE), 2])
def test_a_rank_without_a_backward_counts_as_zero(stage: int, pool_of: PoolOf, tmp_path: Path) -> None:
    pool_of(2).run(skips_a_backward, tmp_path, stage)


def test_ranks_that_wait_for_each_other_are_told_so(pool_of: PoolOf, tmp_path: Path) -> None:
    """In stage 3 a backward gathers weights, in which the other rank takes no part: long before the timeout."""
    outcomes = pool_of(2).outcomes(skips_a_backward, tmp_path, 3)
    assert all(o.kind == "ParallelError" and o.at < 50 and not o.left for o in outcomes), outcomes
    said = "ranks wait for each other: rank . is to .*, which rank . has not come to; it is to .*, which rank . has not"
    assert all(re.search(said, outcome.message) for outcome in outcomes), outcomes


def other_numbers_of_backwards(folder: Path) -> None:
    rank = dist.get_rank()
    with engine_of(folder, 2) as engine:
        ids = token_batches(2)[rank]
        for _ in range(3):
            for _ in range(2 if rank == 0 else 1):
                engine.backward(loss_of(engine, ids))
            engine.step()


def test_other_numbers_of_backwards_are_found(pool_of: PoolOf, tmp_path: Path) -> None:
    outcomes = pool_of(2).outcomes(other_numbers_of_backwards, tmp_path)
    assert all(outcome.kind == "ParallelError" for outcome in outcomes), outcomes
    assert any("ranks wait for each other" in o.message and o.at < 50 for o in outcomes), outcomes


def leftovers(folder: Path, stage: int, apart: bool) -> None:
    rank = dist.get_rank()
    with engine_of(folder, stage) as engine:
        ids = token_batches(2)[rank]
        if apart:
            with engine.no_sync():
                engine.backward(loss_of(engine, ids))
        else:
            engine.backward(loss_of(engine, ids))
        with pytest.raises(GradientError, match="gradients of an earlier backward"):
            engine.train_batch([{"input_ids": ids, "labels": ids}])
        engine.zero_grad()
        engine.clip_grad_norm_(1.0)  # of nothing
        engine.train_batch([{"input_ids": ids, "labels": ids}])


@pytest.mark.parametrize(("stage", "apart"), [(0, False), (1, False), (2, False), (3, True)])
def test_gradients_before_a_batch_are_refused(stage: int, apart: bool, pool_of: PoolOf, tmp_path: Path) -> None:
    pool_of(2).run(leftovers, tmp_path, stage, apart)


def clipped_by_hand(folder: Path, stage: int) -> None:
    """With replicas of shards: clipped twice, gradients read in between, by all ranks alike."""
    rank, world = dist.get_rank(), dist.get_world_size()
    twin = RankReference(decoder(), Policy(world=world, shard=2), loss=loss_of)
    twin.max_grad_norm = 0.1
    with engine_of(folder, stage, shard_size=2) as engine:
        for step in range(2):
            by_rank = token_batches(world, seed=step)
            engine.backward(loss_of(engine, by_rank[rank]))
            norm = engine.clip_grad_norm_(0.1)
            assert engine.get_full("norm.weight", "grad") is not None
            engine.step()
            _, expected = twin.train([[ids] for ids in by_rank])
            assert expected is not None and torch.equal(norm, torch.tensor(expected))
        assert_states_equal(states_of(engine), twin.states())


@pytest.mark.parametrize("stage", [pytest.param(1, marks=ACCEPTANCE), 3])
def test_clipping_by_hand_with_replicas(stage: int, pool_of: PoolOf, tmp_path: Path) -> None:
    pool_of(4).run(clipped_by_hand, tmp_path, stage)


def clipped_by_torch(folder: Path, stage: int) -> None:
    """torch's own function reads and writes reduced gradients wherever their parts rest."""
    rank = dist.get_rank()
    twin = decoder()
    with engine_of(folder, stage) as engine:
        for step in range(2):
            engine.backward(loss_of(engine, token_batches(2, seed=step)[rank]))
            for name, p in twin.named_parameters():
                p.grad = engine.get_full(name, "grad")
            norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (engine.module, twin)]
            assert torch.equal(*norms)
            for name, p in twin.named_parameters():
                assert torch.equal(engine.get_full(name, "grad"), p.grad), name
            assert engine.step().stepped


@pytest.mark.parametrize("stage", [pytest.param(0, marks=ACCEPTANCE), pytest.param(2, marks=ACCEPTANCE), 3])
def test_clipping_by_torch(stage: int, pool_of: PoolOf, tmp_path: Path) -> None:
    pool_of(2).run(clipped_by_torch, tmp_path, stage)


def counted_on_one(folder: Path, schedule: str) -> None:
    rank = dist.get_rank()
    options: dict[str, Any] = {"optimizer": {"check_finite": False}, "parallel": {"stage": 3, "place_ranks": False}}
    case = placed("cpu", "host", schedule=schedule)
    with running(decoder(), case, own_folder(folder), max_grad_norm=None, **options) as engine:
        ids = token_batches(2)[rank]
        before = states_of(engine)
        with pytest.raises(ValueError, match="token counts on ranks 0 of 2 only"):
            engine.train_batch(
                [{"input_ids": ids, "labels": ids}],
                lambda outputs, _: (outputs.loss * 22, 22) if rank == 0 else outputs.loss,
            )
        assert_states_equal(states_of(engine), before)
        engine.train_batch([{"input_ids": ids, "labels": ids}])


@pytest.mark.parametrize("schedule", ["barrier", "eager"])
def test_token_counts_on_some_ranks_only(schedule: str, pool_of: PoolOf, tmp_path: Path) -> None:
    pool_of(2).run(counted_on_one, tmp_path, schedule)


# What rank 1 sets up otherwise, and the words that say so.
DIFFERENT: dict[str, tuple[dict[str, Any], str]] = {
    "stage": ({"parallel": {"stage": 1}}, "parallel.stage: 2 on rank 0, 1 on rank 1"),
    "lr": ({"optimizer": {"lr": 1e-2}}, "optimizer.lr: 0.003 on rank 0, 0.01 on rank 1"),
    "clip": ({"optimizer": {"max_grad_norm": 0.5}}, "optimizer.max_grad_norm: not there on rank 0, 0.5 on rank 1"),
    "seed": ({"seed": 5}, "seed: 0 on rank 0, 5 on rank 1"),
    "wire": ({"precision": {"reduce_dtype": "bf16"}}, "precision.reduce_dtype: auto on rank 0, bf16 on rank 1"),
    "order": ({"schedule": {"micro_batch_order": "layer_major"}}, "schedule.micro_batch_order: auto on rank 0"),
    "frozen": ({}, r"parameters of unit layers.1: 9, of names, shapes and dtypes \w+ on rank 0, 9, "),
    "groups": ({}, r"param_groups\[0\]: 29 parameters, of names \w+ on rank 0, 22 parameters"),
    "scheduler": ({}, "lr_scheduler: not there on rank 0, LambdaLR on rank 1"),
    "weights": ({}, "replicas differ at the start: the weights of layers.0 on rank 1"),
}


def set_up_otherwise(folder: Path) -> None:
    rank, own = dist.get_rank(), own_folder(folder)
    for what, (changes, said) in DIFFERENT.items():
        changes = changes if rank == 1 else {}
        parallel = {"stage": 2, "timeout": 30.0, "place_ranks": False, **changes.get("parallel", {})}
        others = {key: value for key, value in changes.items() if key != "parallel"}
        config = config_of(placed("cpu", "host"), own, max_grad_norm=None, parallel=parallel, **others)
        model, options = decoder(), {}
        if what == "weights":
            values = {name: p.detach().clone() for name, p in decoder(seed=4).named_parameters()}
            if rank == 1:
                values["layers.0.mlp.up_proj.weight"][0, 0] += 1
            save_file(values, own / "model.safetensors")
            options["weights"] = own / "model.safetensors"
        if rank == 1:
            options |= {"param_groups": two_groups(model)} if what == "groups" else {}
            options |= {"lr_scheduler": warmup_cosine} if what == "scheduler" else {}
            model.layers[1].requires_grad_(what != "frozen")
        with pytest.raises(ParallelError, match=said):
            offload.initialize(model, config, **options)
        dist.barrier()


def test_ranks_that_are_set_up_otherwise(pool_of: PoolOf, tmp_path: Path) -> None:
    pool_of(2).run(set_up_otherwise, tmp_path)


def test_only_differences_are_shown_and_few() -> None:
    check_alike([{"a": 1, "b": 2}] * 3, "ranks differ")
    with pytest.raises(ParallelError) as caught:
        check_alike([{"a": 1, "b": 2}, {"a": 1}, {"a": 1, "b": 2}], "ranks differ")
    assert str(caught.value) == "ranks differ: b: 2 on ranks 0, 2, not there on rank 1; all ranks need the same"
    with pytest.raises(ParallelError, match="and 4 more"):
        check_alike([{str(i): i for i in range(9)}, {}], "ranks differ")


def learns_otherwise(folder: Path, stage: int, how: str) -> None:
    rank = dist.get_rank()
    with engine_of(folder, stage) as engine:
        ids = token_batches(2)[rank]
        for _ in range(3):
            engine.backward(loss_of(engine, ids))
            if rank == 1 and how == "lr":
                engine.optimizer.param_groups[0]["lr"] *= 0.5  # as a scheduler does that looks at this rank's own loss
            if how == "clip":
                engine.clip_grad_norm_(0.1 * (1 + rank))
            if how == "freeze" and rank == 1:
                next(engine.module.parameters()).requires_grad_(False)
            engine.step()


@pytest.mark.parametrize(
    ("stage", "how", "said"),
    [
        (0, "lr", r"param_groups\[0\].lr: 0.003 on rank 0, 0.0015 on rank 1"),
        (3, "lr", r"param_groups\[0\].lr: 0.003 on rank 0, 0.0015 on rank 1"),
        (2, "clip", "the factor of gradients: "),
        (1, "freeze", r"what was frozen: nothing on rank 0, 1 parameters, of names \w+ \(embed\S+\) on rank 1"),
    ],
)
def test_steps_with_different_values_are_found(
    stage: int, how: str, said: str, pool_of: PoolOf, tmp_path: Path
) -> None:
    outcomes = pool_of(2).outcomes(learns_otherwise, tmp_path, stage, how)
    for outcome in outcomes:
        assert outcome.kind == "ParallelError" and not outcome.left, outcome
        assert re.search(f"the last step was made with different values: {said}", outcome.message), outcome


def does_not_begin(folder: Path, what: str) -> None:
    own, fails = own_folder(folder), dist.get_rank() == 1
    config = config_of(placed("cpu", "nvme"), own, parallel={"stage": 3, "timeout": 60.0})
    options: dict[str, Any] = {}
    if fails and what == "path":
        config["memory"]["nvme_paths"] = [str(own / "none")]
    if fails and what == "budget":
        config["memory"]["host"] = 4096
    if fails and what == "scheduler":
        options["lr_scheduler"] = lambda _: (_ for _ in ()).throw(KeyError("no such schedule"))
    offload.initialize(decoder(), config, **options).close()


@pytest.mark.parametrize(
    ("what", "said"),
    [("path", "SwapPathError: swap path"), ("budget", "PlanError: the plan"), ("scheduler", "KeyError: 'no such")],
)
def test_why_a_rank_does_not_begin_is_said_on_the_others(what: str, said: str, pool_of: PoolOf, tmp_path: Path) -> None:
    first, second = pool_of(2).outcomes(does_not_begin, tmp_path, what)
    assert first.kind == "ParallelError" and f"the first failure was on rank 1: {said}" in first.message, first
    assert second.kind == said.partition(":")[0], second
    assert not first.left and not second.left


def does_not_come(folder: Path, what: str) -> list[str]:
    """Rank 1 is refused before it meets the others: twice, then all begin."""
    said = []
    for attempt in range(3):
        config = config_of(placed("cpu", "host"), own_folder(folder), parallel={"stage": 3, "timeout": 60.0})
        options: dict[str, Any] = {}
        if attempt < 2 and (what == "all" or dist.get_rank() == 1):
            config["parallel"] |= {"stages": 3} if attempt == 0 else {"shard_size": 5}
        try:
            offload.initialize(decoder(), config, **options).close()
        except (ValueError, ParallelError) as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("what", ["one", "all"])
def test_a_rank_that_is_refused_before_it_meets_the_others(what: str, pool_of: PoolOf, tmp_path: Path) -> None:
    """They need not wait for it."""
    outcomes = pool_of(2).outcomes(does_not_come, tmp_path, what)
    assert all(len(o.value) == 2 and o.at < 50 for o in outcomes), outcomes
    assert all("stages" in o.value[0] and "shard_size = 5" in o.value[1] for o in outcomes), outcomes
    if what == "one":
        assert all("another rank has failed; rank 1: " in text for text in outcomes[0].value)
