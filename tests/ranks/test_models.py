"""Structures and loops that other systems get wrong on several ranks, against the loop in one process, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from offload.checkpoint.reader import Source
from offload.errors import OffloadError
from tests.engine.common import assert_states_equal, decoder, placed, running, states_of, token_batches
from tests.ranks.harness import RankPool
from tests.ranks.reference import Policy, RankReference
from tests.ranks.training import loss_of, own_folder

PoolOf = Callable[[int], RankPool]
ACCEPTANCE = pytest.mark.acceptance
HYPER: dict[str, Any] = {"max_grad_norm": None}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(70), nn.Linear(70, 70)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + torch.tanh(self.linear(self.norm(x).to(self.linear.weight.dtype)))
        return found


class Recurrent(nn.Module):
    """A block that is used three times, one that integers alone lead to, and parameters of the whole model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 70)
        self.shared, self.other, self.last = Block(), Block(), nn.Linear(70, 1)
        self.scale, self.shift = nn.Parameter(torch.ones(70)), nn.Parameter(torch.zeros(()))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) * self.scale
        for block in (self.shared, self.other, self.shared, self.shared):
            x = block(x)
        found: Tensor = self.last(x) + self.shift
        return found


def square(model: Any, ids: Tensor) -> Tensor:
    loss: Tensor = model(ids).float().square().mean()
    return loss


def ids_of(step: int, world: int) -> list[Tensor]:
    return [torch.randint(0, 11, (5,), generator=torch.Generator().manual_seed(10 * step + r)) for r in range(world)]


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Three groups, each with a rate and a decay of its own; one of them of a single scalar."""
    named = dict(model.named_parameters())
    shift = [named.pop("shift")]
    matrices = [p for p in named.values() if p.dim() > 1]
    rest = [p for p in named.values() if p.dim() <= 1]
    return [{"params": matrices}, {"params": rest, "lr": 7e-3, "weight_decay": 0.0}, {"params": shift, "lr": 1e-4}]


def structures(folder: Path, stage: int, dtype: str) -> None:
    """Shared blocks, groups, dtypes that mix, evaluation in between, freezing and thawing of what is in a group."""
    rank, world = dist.get_rank(), dist.get_world_size()
    keep = ("*norm*",) if dtype == "bf16" else ()
    torch.manual_seed(0)
    model = Recurrent()
    torch.manual_seed(0)
    other = Recurrent()
    policy = Policy(world=world, shard=world, dtype=dtype)
    kept = [name for name, _ in other.named_parameters() if "norm" in name] if keep else ()
    twin = RankReference(other, policy, loss=square, groups=groups_of(other), keep=kept)
    sections = {
        "parallel": {"stage": stage, "timeout": 60.0, "place_ranks": False},
        "precision": {"compute_dtype": dtype if dtype == "bf16" else "auto", "keep": list(keep)},
        "units": {"wrap": ["Block"]},
    }
    moved = []
    case = placed("cpu", "nvme" if stage == 3 else "host", dtype=dtype)
    with running(model, case, own_folder(folder), param_groups=groups_of(model), **HYPER, **sections) as engine:
        for step in range(5):
            if step in (2, 4):
                for module in (model.other, other.other):
                    module.requires_grad_(step == 4)
            by_rank = ids_of(step, world)
            engine.backward(square(engine, by_rank[rank]))
            norm = engine.step().grad_norm
            before = engine.counters()
            _, expected = twin.train([[ids] for ids in by_rank])
            assert norm == expected, step
            moved.append(before["gradients_communicated_bytes"])
            engine.eval()
            with torch.no_grad():
                assert torch.equal(engine(by_rank[0]), other(by_rank[0]))
            engine.train()
        assert_states_equal(states_of(engine), twin.states())
    assert moved[1] - moved[0] == moved[4] - moved[3], "what a step sends grows"


@pytest.mark.parametrize(
    ("stage", "dtype"),
    [
        (3, "fp32"),
        (2, "bf16"),
        *(pytest.param(s, d, marks=ACCEPTANCE) for s, d in [(0, "fp32"), (0, "bf16"), (2, "fp32"), (3, "bf16")]),
    ],
)
def test_shared_blocks_groups_and_mixed_dtypes(stage: int, dtype: str, pool_of: PoolOf, tmp_path: Path) -> None:
    pool_of(2).run(structures, tmp_path, stage, dtype)


def thawed(folder: Path, stage: int) -> None:
    model = decoder()
    model.layers[1].requires_grad_(False)
    groups = [{"params": list(model.parameters())}]
    parallel = {"stage": stage, "timeout": 60.0, "place_ranks": False}
    with running(model, placed("cpu", "host"), own_folder(folder), param_groups=groups, parallel=parallel) as engine:
        ids = token_batches(2)[dist.get_rank()]
        engine.backward(loss_of(engine, ids))
        engine.step()
        with pytest.raises(OffloadError, match=r"training .*layers\.1.* is not possible on several ranks"):
            model.layers[1].requires_grad_(True)
            engine.backward(loss_of(engine, ids))
            engine.step()


def test_thawing_what_has_no_state_is_refused(pool_of: PoolOf, tmp_path: Path) -> None:
    """Not trained on with gradients that go nowhere."""
    pool_of(2).run(thawed, tmp_path, 3)


def adversaries(folder: Path, stage: int) -> None:
    """Two engines that take turns, and a loss through both, of which each has its own part."""
    rank, world = dist.get_rank(), dist.get_world_size()

    def model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 70), nn.Tanh(), nn.Linear(70, 6))

    policy = Policy(world=world, shard=world)
    ours, plain = [model(1), model(2)], [model(1), model(2)]
    twins = [RankReference(m, policy, loss=lambda *_: None) for m in plain]
    sections = {"parallel": {"stage": stage, "timeout": 60.0, "place_ranks": False}, "units": {"wrap": ["Linear"]}}
    case = placed("cpu", "host")
    with (
        running(ours[0], case, own_folder(folder), **HYPER, **sections) as first,
        running(ours[1], case, own_folder(folder), **HYPER, **sections) as second,
    ):
        for step in range(4):
            xs = [torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * step + r)) for r in range(world)]
            first.backward(second(first(xs[rank])).square().mean())
            sent: list[list[dict[str, Tensor]]] = [[], []]
            for x in xs:
                plain[1](plain[0](x)).square().mean().backward()
                for at, twin in enumerate(twins):
                    twin._collect()
                    sent[at].append({name: g for name, (g, _) in twin.gradients.items()})
                    twin.gradients = {}
            for at, engine in ((0, first), (1, second)) if step % 2 else ((1, second), (0, first)):
                held: dict[str, tuple[Tensor, int]] = {}
                twins[at]._reduce(sent[at], held)
                assert engine.step().grad_norm == twins[at].update({n: g for n, (g, _) in held.items()}, 1.0)
        for at, engine in ((0, first), (1, second)):
            assert_states_equal(states_of(engine), twins[at].states())


@pytest.mark.parametrize("stage", [pytest.param(0, marks=ACCEPTANCE), pytest.param(2, marks=ACCEPTANCE), 3])
def test_two_engines_and_a_joint_loss(stage: int, pool_of: PoolOf, tmp_path: Path) -> None:
    pool_of(2).run(adversaries, tmp_path, stage)


def read_in_a_load(folder: Path, stage: int) -> tuple[int, int]:
    """Bytes of states that this rank has read, and those that all of them have."""
    parallel = {"stage": stage, "timeout": 60.0, "place_ranks": False}
    found: dict[str, int] = {}
    real = Source.read

    def read(self: Source, parameter: str, plane: str, lo: int, hi: int, out: Tensor) -> None:
        found[plane] = found.get(plane, 0) + out.nbytes
        real(self, parameter, plane, lo, hi, out)

    with running(decoder(wide=True), placed("cpu", "host"), own_folder(folder), parallel=parallel) as engine:
        engine.train_batch([{"input_ids": ids, "labels": ids} for ids in token_batches(1)])
        engine.save_checkpoint(folder / "saved")
        whole = sum(entry["exp_avg"].nbytes for _, entry in engine.named_full_states())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Source, "read", read)
            engine.load_checkpoint(folder / "saved")
    return found["exp_avg"], whole


@pytest.mark.parametrize("stage", [pytest.param(1, marks=ACCEPTANCE), 3])
def test_a_load_reads_a_ranks_own_states_only(stage: int, pool_of: PoolOf, tmp_path: Path) -> None:
    found = pool_of(3).run(read_in_a_load, tmp_path, stage)
    assert sum(own for own, _ in found) == found[0][1], found
