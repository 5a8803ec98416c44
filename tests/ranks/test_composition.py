"""What models and loops do beyond plain training, on several ranks: the same bits as the loop in one process."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.engine.common import assert_states_equal, decoder, placed, running, states_of, token_batches
from tests.ranks.harness import RankPool
from tests.ranks.reference import SCALE, Policy, RankReference
from tests.ranks.training import own_folder

PoolOf = Callable[[int], RankPool]
STEPS = 3
ACCEPTANCE = pytest.mark.acceptance
stages = pytest.mark.parametrize("stage", [0, pytest.param(1, marks=ACCEPTANCE), 2, 3])


class Mixture(nn.Module):
    """Two experts of which a batch uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(70, 70) for _ in range(2))

    def forward(self, x: Tensor, which: int) -> Tensor:
        return torch.tanh(self.experts[which](x))


class Experts(nn.Module):
    """A mixture between layers that all batches use; one of these is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 70)
        self.frozen = nn.Linear(70, 70).requires_grad_(False)
        self.mixture = Mixture()
        self.last = nn.Linear(70, 1)

    def forward(self, x: Tensor, which: int) -> Tensor:
        hidden = torch.tanh(self.frozen(torch.tanh(self.first(x))))
        output: Tensor = self.last(self.mixture(hidden, which))
        return output


def mean_square(model: Any, batch: Any) -> Tensor:
    loss: Tensor = model(*batch).square().mean()
    return loss


def batches(step: int, micro: int, make: Callable[[int, int, torch.Generator], Any]) -> list[list[Any]]:
    """Micro-batches of a step by rank: `make(rank, k, generator)`."""
    return [
        [make(rank, k, torch.Generator().manual_seed(100 * step + 10 * rank + k)) for k in range(micro)]
        for rank in range(dist.get_world_size())
    ]


def check(
    model: Callable[[], nn.Module],
    stage: int,
    folder: Path,
    make: Callable[[int, int, torch.Generator], Any],
    *,
    micro: int = 1,
    dtype: str = "fp32",
    loss: Callable[[Any, Any], Any] = mean_square,
    on_tier: str = "host",
    blocks: Callable[[nn.Module], object] | None = None,
    clip: float | None = None,
    wrap: list[str] | str = "auto",
    states_on: str | None = None,
) -> None:
    """Trains with engine and reference, and compares all states and losses."""
    world, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    mine = model()
    torch.manual_seed(0)
    each = stage == 3 and micro > 1
    policy = Policy(world=world, shard=world, dtype=dtype, each=each, clip=clip)
    twin = RankReference(model(), policy, loss=loss)
    if blocks is not None:
        blocks(mine)
    case = dataclasses.replace(placed("cpu", on_tier, dtype=dtype), optimizer=states_on or on_tier)
    sections = {
        "parallel": {"stage": stage, "timeout": 120.0},
        "schedule": {"micro_batch_order": "batch_major"},
        "precision": {"initial_loss_scale": SCALE},
        "units": {"wrap": wrap},
    }
    with running(mine, case, own_folder(folder), max_grad_norm=clip, **sections) as engine:
        for step in range(STEPS):
            by_rank = batches(step, micro, make)
            result = engine.train_batch(by_rank[rank], lambda outputs, batch: loss(lambda *_, **__: outputs, batch))
            expected, norm = twin.train(by_rank)
            assert (result.loss, result.grad_norm) == (expected, norm), (step, result, expected, norm)
        assert_states_equal(states_of(engine), twin.states())


def an_expert(rank: int, k: int, generator: torch.Generator) -> tuple[Tensor, int]:
    return torch.randn(4, 6, generator=generator), rank % 2


def experts(stage: int, folder: Path, wrap: list[str] | str) -> None:
    check(Experts, stage, folder, an_expert, micro=2, on_tier="nvme", wrap=wrap)


@stages
def test_unused_parameters_differ_by_rank_and_some_are_frozen(stage: int, pool_of: PoolOf, tmp_path: Path) -> None:
    pool_of(2).run(experts, stage, tmp_path, ["Mixture"] if stage == 3 else "auto")


def test_units_that_only_some_ranks_use_are_refused_by_name_in_stage_3(pool_of: PoolOf, tmp_path: Path) -> None:
    """Their weights are gathered from all ranks, and the others do not come."""
    outcomes = pool_of(2).outcomes(experts, 3, tmp_path, "auto")
    assert all(outcome.kind == "ParallelError" for outcome in outcomes)
    said = "ranks do different things: rank . is to gather the weights of .*, but rank . is to "
    assert any(re.search(said, outcome.message) for outcome in outcomes)


class Tiny(nn.Module):
    """Fewer elements than ranks, and a parameter without any."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.nothing.sum()


def tiny(stage: int, folder: Path, states_on: str) -> None:
    def make(rank: int, k: int, generator: torch.Generator) -> tuple[Tensor]:
        return (torch.randn(3, generator=generator),)

    check(Tiny, stage, folder, make, states_on=states_on)


@pytest.mark.parametrize(
    ("stage", "states_on"),
    [
        *((stage, "host") for stage in (0, 2, 3)),
        (3, "nvme"),
        *(pytest.param(stage, "nvme", marks=ACCEPTANCE) for stage in (0, 1, 2)),
        pytest.param(1, "host", marks=ACCEPTANCE),
    ],
)
def test_more_ranks_than_elements(stage: int, states_on: str, pool_of: PoolOf, tmp_path: Path) -> None:
    """A rank without any states has no swap file, though states were to rest on one."""
    pool_of(3).run(tiny, stage, tmp_path, states_on)


def summed(model: Any, ids: Tensor) -> tuple[Tensor, int]:
    logits = model(ids).logits.float()
    targets = ids[:, 1:].reshape(-1)
    return F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), targets, reduction="sum"), targets.numel()


def uneven(rank: int, k: int, generator: torch.Generator) -> Tensor:
    """Sequences of other lengths on every rank and in every micro-batch."""
    return torch.randint(0, 97, (1 + rank, 5 + 3 * k), generator=generator)


def counted(stage: int, folder: Path) -> None:
    check(decoder, stage, folder, uneven, micro=2, loss=summed, dtype="bf16")


@stages
def test_uneven_micro_batches_with_token_counts(stage: int, pool_of: PoolOf, tmp_path: Path) -> None:
    pool_of(2).run(counted, stage, tmp_path)


def cross_entropy(model: Any, ids: Tensor) -> Tensor:
    loss: Tensor = model(ids, labels=ids).loss
    return loss


def checkpoint_blocks(model: nn.Module, *, reentrant: bool) -> None:
    for layer in model.layers:  # type: ignore[union-attr]
        forward = layer.forward

        def repeated(*args: Any, forward: Any = forward, **kwargs: Any) -> Any:
            return checkpoint(forward, *args, use_reentrant=reentrant, **kwargs)

        layer.forward = repeated  # type: ignore[assignment, method-assign]


def compile_blocks(model: nn.Module) -> None:
    for layer in model.layers:  # type: ignore[union-attr]
        layer.forward = torch.compile(layer.forward, backend="aot_eager")  # type: ignore[assignment, method-assign]


def blocks(stage: int, folder: Path, kind: str) -> None:
    """A model whose blocks are recomputed or compiled gives what the plain one gives."""
    world, rank = dist.get_world_size(), dist.get_rank()
    twin = RankReference(decoder(), Policy(world=world, shard=world), loss=cross_entropy)
    mine = decoder()
    compile_blocks(mine) if kind == "compiled" else checkpoint_blocks(mine, reentrant=kind == "reentrant")
    with running(
        mine, placed("cpu", "host"), own_folder(folder), max_grad_norm=None, parallel={"stage": stage, "timeout": 120.0}
    ) as engine:
        for step in range(2):
            everything = token_batches(world, seed=step)
            ids = everything[rank]
            engine.backward(engine(ids, labels=ids).loss)
            engine.step()
            twin.train([[batch] for batch in everything])
        assert_states_equal(states_of(engine), twin.states())


@pytest.mark.parametrize(
    ("kind", "stage"),
    [
        ("reentrant", 3),
        ("not_reentrant", 2),
        ("compiled", 3),
        pytest.param("reentrant", 2, marks=ACCEPTANCE),
        pytest.param("not_reentrant", 3, marks=ACCEPTANCE),
        pytest.param("compiled", 2, marks=ACCEPTANCE),
    ],
)
def test_recomputed_and_compiled_blocks(stage: int, kind: str, pool_of: PoolOf, tmp_path: Path) -> None:
    pool_of(2).run(blocks, stage, tmp_path, kind)


def by_hand(stage: int, folder: Path) -> None:
    """no_sync, gradients read, set and clipped between backward and step, weights edited in place."""
    world, rank = dist.get_world_size(), dist.get_rank()
    policy = Policy(world=world, shard=world)
    twin = RankReference(decoder(), policy, loss=lambda model, ids: 2 * cross_entropy(model, ids))
    with running(
        decoder(), placed("cpu", "host"), own_folder(folder), max_grad_norm=None,
        parallel={"stage": stage, "timeout": 120.0},
    ) as engine:  # fmt: skip
        by_rank = [token_batches(2, seed=r) for r in range(world)]
        with engine.no_sync():
            engine.backward(engine(by_rank[rank][0], labels=by_rank[rank][0]).loss)
        engine.backward(engine(by_rank[rank][1], labels=by_rank[rank][1]).loss)
        held: list[dict[str, tuple[Tensor, int]]] = [{}]
        sent = [twin._local(by_rank[r], [0, 1], [], []) for r in range(world)]
        twin._reduce(sent, held[0])
        gradients = twin._over_replicas(held)
        for name, gradient in gradients.items():
            found = engine.get_full(name, "grad")
            assert found is not None and torch.equal(found.reshape(-1), gradient), name
        name = "layers.1.mlp.down_proj.weight"
        value = torch.linspace(-1, 1, gradients[name].numel()).view(twin.parameters[name].shape)
        dict(engine.module.named_parameters())[name].grad = value
        gradients[name] = value.reshape(-1)
        twin.max_grad_norm = 0.1
        norm = engine.clip_grad_norm_(0.1)
        engine.step()
        expected = twin.update(gradients, 1.0)
        assert expected is not None and torch.equal(norm, torch.tensor(expected))
        assert_states_equal(states_of(engine), twin.states())
        parameter = dict(engine.module.named_parameters())[name]
        with engine.gathered(name, modify=True), torch.no_grad():
            parameter.mul_(2)
        twin.parameters[name].data.mul_(2)
        ids = by_rank[rank][0]
        engine.backward(engine(ids, labels=ids).loss)
        engine.step()
        twin.max_grad_norm = None
        twin.loss_of = cross_entropy
        twin.train([[batches[0]] for batches in by_rank])
        assert_states_equal(states_of(engine), twin.states())


@stages
def test_gradients_and_weights_by_hand(stage: int, pool_of: PoolOf, tmp_path: Path) -> None:
    pool_of(2).run(by_hand, stage, tmp_path)


OVERFLOWS = [False, True, True, False, True, True, True, True, False, False]


def overflowing(stage: int, folder: Path) -> list[tuple[bool, float]]:
    """The loss is infinite in some steps, on rank 1 only."""
    torch.manual_seed(0)
    rank, found = dist.get_rank(), []
    settings = {"initial_loss_scale": 64.0, "loss_scale_window": 2, "hysteresis": 2, "min_loss_scale": 16.0}
    with running(
        decoder(), placed("cpu", "nvme", dtype="fp16"), own_folder(folder), max_grad_norm=None, precision=settings,
        parallel={"stage": stage, "timeout": 120.0},
    ) as engine:  # fmt: skip
        for step, overflow in enumerate(OVERFLOWS):
            before = states_of(engine) if overflow else None
            ids = token_batches(2, seed=step)[rank]
            loss = engine(ids, labels=ids).loss
            engine.backward(loss * (float("inf") if overflow and rank == 1 else 1.0))
            result = engine.step()
            found.append((result.stepped, engine._scale))
            if before is not None:
                assert_states_equal(states_of(engine), before)
                assert "is not finite" in str(result.skipped_reason)
    return found


def documented(overflows: list[bool]) -> list[tuple[bool, float]]:
    """Two overflows halve the scale (not below 16), two good steps in a row double it; both fill the hysteresis."""
    scale, left, good, found = 64.0, 2, 0, []
    for overflow in overflows:
        if overflow:
            good, left = 0, left - 1
            if left == 0:
                scale, left = max(16.0, scale / 2), 2
        else:
            good += 1
            if good % 2 == 0:
                scale, left = scale * 2, 2
        found.append((not overflow, scale))
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_an_overflow_on_one_rank_skips_the_step_on_all(stage: int, pool_of: PoolOf, tmp_path: Path) -> None:
    for found in pool_of(2).run(overflowing, stage, tmp_path):
        assert found == documented(OVERFLOWS)
