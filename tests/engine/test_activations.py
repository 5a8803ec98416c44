"""What becomes of activations changes no bit: kept, recomputed from a unit's inputs, or those put on another tier."""

from __future__ import annotations

import contextlib
import gc
import logging
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import offload
from offload.errors import OffloadError, PlanError, StaleWeightsError
from swap.errors import BudgetError
from tests.engine.binding_models import (
    NVME,
    WIDTH,
    Block,
    Pair,
    Stack,
    checkpointed,
    inputs,
    nested,
    paired,
    square,
)
from tests.engine.common import CLIP, Case, config_of, decoder, pairwise, placed, product, running
from tests.engine.resources import nothing_left_of
from tests.engine.test_layer_major import NAMES, hugging_face, labelled, square_loss, twin

LET_GO = ["recompute", "host", "nvme"]
CHOICES = ["keep", *LET_GO, "auto"]

swapped = pytest.mark.parametrize("case", NVME[1:], ids=str)
let_go = pytest.mark.parametrize("activations", LET_GO)


@contextmanager
def letting_go(model: nn.Module, case: Case, folder: Path, activations: str, **sections: Any) -> Iterator[Pair]:
    with paired(model, case, folder, placement={"activations": activations}, **sections) as pair:
        yield pair
        pair.nothing_resident()
        gc.collect()
        pair.engine._memory.trim()
        assert pair.engine.memory().current["nvme"].get("activations", 0) == 0
        assert pair.engine.memory().current["host"].get("activations", 0) == 0
        assert pair.engine.memory().current["device"].get("activations", 0) == 0


def recomputed(pair: Pair) -> int:
    activations = pair.engine._binding.activations
    assert activations is not None
    return activations.recomputed


FACTORS: dict[str, Sequence[Any]] = {
    "activations": CHOICES,
    "device": ["cpu", "sim"],
    "parameters": ["device", "host", "nvme"],
    "dtype": ["fp32", "bf16"],
    "delay": [0.0, 2e-3],
    "count": [1, 4],
    "dropout": [0.0, 0.2],
    "order": ["batch_major", "layer_major"],
}


def train_any(row: dict[str, Any], folder: Path) -> None:
    activations, order, count = row.pop("activations"), row.pop("order"), row.pop("count")
    model, case = decoder(dropout=row.pop("dropout")), Case(**row)
    sections = {"placement": {"activations": activations}, "schedule": {"micro_batch_order": order}}
    with twin(model, case, folder, max_grad_norm=CLIP, **sections) as pair:
        for step in range(2):
            pair.step(labelled(count, step))
        found = pair.engine._binding.activations
        assert found is not None and (found.recomputed > 0) == (activations in LET_GO)


@pytest.mark.parametrize("row", pairwise(FACTORS), ids=lambda row: "-".join(map(str, row.values())))
def test_bits_equal_kept_activations(row: dict[str, Any], swap_folder: Path) -> None:
    train_any(dict(row), swap_folder)


@pytest.mark.acceptance
def test_bits_equal_kept_activations_everywhere(swap_folder: Path) -> None:
    for row in product({**FACTORS, "delay": [2e-3]}):
        train_any(row, swap_folder)


ALTERNATING = [
    pytest.param(name, activations, marks=() if (row + column) % 2 == 0 else (pytest.mark.acceptance,))
    for row, name in enumerate(NAMES)
    for column, activations in enumerate(LET_GO)
]


@pytest.mark.parametrize(("name", "activations"), ALTERNATING)
def test_models_of_transformers(name: str, activations: str, swap_folder: Path) -> None:
    """Without touching `use_cache`: no key-value cache is built while activations are let go."""
    torch.manual_seed(0)
    model = dict(hugging_face())[name]().train()
    with twin(model, placed("sim", "nvme"), swap_folder, placement={"activations": activations}) as pair:
        for step in range(2):
            pair.step(labelled(2, step, time=10))
        assert pair.engine._binding.activations.recomputed >= 2 * 2 * 3  # type: ignore[union-attr]
        assert pair.engine.module.config.use_cache is True  # type: ignore[union-attr]


@swapped
@let_go
def test_plain_calls(case: Case, activations: str, swap_folder: Path) -> None:
    with letting_go(Stack(), case, swap_folder, activations) as pair:
        pair.train(square(inputs(grad=True)))
        assert recomputed(pair) > 0


@swapped
@let_go
@pytest.mark.parametrize(
    "run",
    [checkpointed(False, 1), checkpointed(True, 1), checkpointed(False, 2), checkpointed(True, 2), nested(False)],
    ids=["hooks", "reentrant", "hooks over two", "reentrant over two", "nested"],
)
def test_the_models_own_checkpointing_is_honoured(case: Case, activations: str, run: Any, swap_folder: Path) -> None:
    with letting_go(Stack(run=run), case, swap_folder, activations) as pair:
        pair.train(square(inputs(grad=True)))


class Inner(nn.Module):
    """A block that checkpoints a part of itself, with dropout."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.mlp, self.norm, self.reentrant = Block(), nn.LayerNorm(WIDTH), reentrant
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.norm(checkpoint(self.mlp, self.dropout(x), use_reentrant=self.reentrant)))


@swapped
@let_go
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_within_a_unit(case: Case, activations: str, reentrant: bool, swap_folder: Path) -> None:
    def run(model: nn.Module) -> Tensor:
        torch.manual_seed(3)
        return model(inputs(grad=True)).square().sum()  # type: ignore[no-any-return]

    with letting_go(Stack(block=lambda: Inner(reentrant)), case, swap_folder, activations) as pair:
        pair.train(run)


@swapped
@let_go
def test_two_backwards_through_one_graph(case: Case, activations: str, swap_folder: Path) -> None:
    with letting_go(Stack(), case, swap_folder, activations) as pair:
        ours, theirs = (model(inputs()).square().sum() for model in (pair.offloaded, pair.plain))
        for last in (False, False, True):
            pair.engine.backward(ours, retain_graph=not last)
            theirs.backward(retain_graph=not last)
            pair.gradients_equal()
        pair.step()


@let_go
def test_hooks_of_the_user_are_honoured(activations: str, swap_folder: Path) -> None:
    def run(model: nn.Module) -> Tensor:
        with save_on_cpu():
            return model(inputs(grad=True)).square().sum()  # type: ignore[no-any-return]

    with letting_go(Stack(), placed("cpu", "nvme"), swap_folder, activations) as pair:
        pair.train(run)
        assert recomputed(pair) == 0


@let_go
def test_gradient_penalty(activations: str, swap_folder: Path) -> None:
    def run(model: nn.Module) -> Tensor:
        x = inputs(grad=True)
        out = model(x).square().sum()
        (gradient,) = torch.autograd.grad(out, x, create_graph=True)
        return out + (gradient.norm(dim=1) - 1).square().mean()  # type: ignore[no-any-return]

    case = placed("cpu", "nvme")
    with (
        letting_go(Stack(), case, swap_folder, activations) as pair,
        pytest.warns(UserWarning, match="create_graph"),
    ):
        pair.train(run)


class Parts(NamedTuple):
    left: Tensor
    right: Tensor | None


class Elaborate(nn.Module):
    """A unit with all kinds of arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, rest: dict[str, Any], *, scale: float = 1.0, mask: Tensor | None = None) -> Any:
        parts: Parts = rest["parts"]
        hidden = torch.tanh(self.a(x)) * scale + self.b(rest["list"][0])
        if parts.right is not None:
            hidden = hidden + parts.right
        if mask is not None:
            hidden = hidden.masked_fill(mask, 0.0)
        return {"x": torch.sigmoid(self.c(hidden * parts.left)), "rest": {**rest, "parts": Parts(hidden, None)}}


class Caller(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Elaborate() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.repeat(1, 2)
        mask = (torch.arange(WIDTH) % 5 == 0).expand(x.shape[0], WIDTH)
        # A transposed, a sliced and an expanded view; `mask` is shared by all units.
        rest: dict[str, Any] = {
            "parts": Parts(x.t().contiguous().t(), wide[:, WIDTH:]),
            "list": [x[:1].expand_as(x), None, 3],
        }
        for index, block in enumerate(self.blocks):
            out = block(x, rest, scale=1.0 + index, mask=mask)
            x, rest = out["x"], out["rest"]
        return x


@swapped
@let_go
def test_arguments_of_all_kinds(case: Case, activations: str, swap_folder: Path) -> None:
    with letting_go(Caller(), case, swap_folder, activations) as pair:
        pair.train(square(inputs(128, WIDTH, grad=True)))
        assert recomputed(pair) == 2 * 3


class Opaque:
    """Something that a forward may change."""

    calls = 0


class Careless(nn.Module):
    """Blocks that a second forward would see in another state."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.block, self.kind = Block(), kind
        self.register_buffer("count", torch.ones(()))

    def forward(self, x: Tensor, opaque: Opaque | None = None) -> Tensor:
        if self.kind == "buffer":
            self.count = self.count + 1
        if self.kind == "buffer in place":
            self.count += 1
        if self.kind == "input":
            x = x * 1.0
            y = self.block(x)
            x.mul_(2.0)
            return y
        if opaque is not None:
            opaque.calls += 1
            x = x * opaque.calls
        return self.block(x) * self.count  # type: ignore[no-any-return]


@let_go
@pytest.mark.parametrize("kind", ["buffer", "buffer in place", "opaque"])
def test_what_could_not_be_repeated_is_kept(
    kind: str, activations: str, swap_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def run(model: Stack, x: Tensor) -> Tensor:
        opaque = Opaque()
        for block in model.blocks:
            x = block(x, opaque if kind == "opaque" else None)
        return x

    caplog.set_level(logging.INFO, logger="offload")
    model = Stack(run=run, block=lambda: Careless(kind))
    with letting_go(model, placed("cpu", "nvme"), swap_folder, activations) as pair:
        pair.train(square(inputs(grad=True)))
        pair.both(lambda model: [block.count for block in model.blocks])
        assert recomputed(pair) == 0
    assert (kind == "opaque") != ("writes to its inputs, buffers or attributes" in caplog.text)


@let_go
def test_a_forward_that_writes_to_its_input(activations: str, swap_folder: Path) -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: Tensor) -> Tensor:
            x.add_(1.0)
            return self.block(x)  # type: ignore[no-any-return]

    with letting_go(Stack(block=InPlace), placed("cpu", "nvme"), swap_folder, activations) as pair:
        pair.train(lambda model: model(inputs() * 1.0).square().sum())
        assert recomputed(pair) == 0


MOOD = [0]


class Moody(nn.Module):
    """Its forward depends on something that nobody puts back."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x if MOOD[0] == 0 else x[:1])  # type: ignore[no-any-return]


@let_go
def test_a_forward_that_differs_the_second_time_is_named(activations: str, swap_folder: Path) -> None:
    model = Stack(block=Moody)
    with letting_go(model, placed("cpu", "nvme"), swap_folder, activations) as pair:
        loss = pair.engine(inputs(grad=True)).square().sum()
        MOOD[0] = 1
        with pytest.raises(OffloadError, match=r"unit blocks\.3: its forward is not the same the second time"):
            pair.engine.backward(loss)
        del loss
        pair.engine.zero_grad()
        MOOD[0] = 0
        pair.train(square(inputs(grad=True)))


@let_go
def test_modes_and_random_state_are_those_of_the_forward(activations: str, swap_folder: Path) -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.dropout = Block(), nn.Dropout(0.4)

        def forward(self, x: Tensor) -> Tensor:
            return self.dropout(self.block(self.dropout(x)))  # type: ignore[no-any-return]

    with letting_go(Stack(block=Noisy), placed("sim", "nvme"), swap_folder, activations) as pair:
        states = []
        for model in (pair.offloaded, pair.plain):
            model.train()
            torch.manual_seed(1)
            loss = model(inputs(grad=True)).square().sum()
            model.eval()
            torch.manual_seed(2)
            loss.backward()
            states.append(torch.rand(3))
            assert not model.blocks[0].dropout.training
        assert torch.equal(*states)
        pair.step()


@let_go
def test_a_step_between_forward_and_backward_is_an_error(activations: str, swap_folder: Path) -> None:
    with letting_go(Stack(), placed("cpu", "nvme"), swap_folder, activations) as pair:
        loss = pair.engine(inputs(grad=True)).square().sum()
        pair.train(square(inputs()), steps=1)
        with pytest.raises(StaleWeightsError):
            pair.engine.backward(loss)
        del loss
        pair.engine.zero_grad()


@let_go
def test_an_input_that_is_written_to_later_is_an_error(activations: str, swap_folder: Path) -> None:
    def run(model: Stack, x: Tensor) -> Tensor:
        for block in model.blocks:
            y = block(x)
            x.mul_(2.0)
            x = y
        return x

    with letting_go(Stack(run=run), placed("cpu", "nvme"), swap_folder, activations) as pair:
        loss = pair.engine(inputs()).square().sum()
        if activations == "recompute":
            with pytest.raises(RuntimeError, match="one of its inputs was written to in between"):
                pair.engine.backward(loss)
        del loss
        pair.engine.zero_grad()


class Probe(torch.autograd.Function):
    """Lets a test see whether what it saved lives."""

    saved: list[weakref.ref[Tensor]] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        inner = x * 2.0
        ctx.save_for_backward(inner)
        Probe.saved.append(weakref.ref(inner.untyped_storage()))  # type: ignore[arg-type]
        return inner.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (inner,) = ctx.saved_tensors
        return gradient * inner.cos() * 2.0


class Probed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(Probe.apply(x))  # type: ignore[no-any-return]


@let_go
@pytest.mark.parametrize("count", [1, 3])
def test_inner_activations_die_with_the_forward(activations: str, count: int, swap_folder: Path) -> None:
    """Counted: after the forward none is alive, in the backward those of one unit of one micro-batch at a time."""
    alive: list[int] = []

    def living() -> int:
        return sum(reference() is not None for reference in Probe.saved)

    model = Stack(block=Probed)
    sections = {"placement": {"activations": activations}, "schedule": {"micro_batch_order": "layer_major"}}
    with running(model, placed("cpu", "nvme"), swap_folder, **sections) as engine:

        def loss_fn(outputs: Tensor, _batch: Any) -> Tensor:
            alive.append(living())
            return outputs.square().mean()

        Probe.saved.clear()
        engine.train_batch([inputs(seed=k) for k in range(count)], loss_fn)
        assert alive == [0] * count and living() == 0
        assert len(Probe.saved) == 2 * count * len(model.blocks)


class Masked(nn.Module):
    """Blocks that are all given the same mask."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Elaborate() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        mask = (x > 0.5).t().contiguous().t()
        rest = {"parts": Parts(x, None), "list": [x]}
        for block in self.blocks:
            x = block(x, rest, mask=mask)["x"]
        return x


@swapped
@pytest.mark.parametrize("activations", ["host", "nvme"])
def test_what_units_share_is_put_away_once(case: Case, activations: str, swap_folder: Path) -> None:
    with letting_go(Masked(), case, swap_folder, activations) as pair:
        x = inputs(512, WIDTH, grad=True)
        x_bytes, mask_bytes = x.numel() * 4, x.numel()
        loss = pair.engine(x).square().sum()
        spill = pair.engine._binding.activations.spill  # type: ignore[union-attr]
        assert spill is not None and spill.puts == 4 + 1
        memory = pair.engine.memory()
        assert memory.current[activations]["activations"] == 4 * x_bytes + mask_bytes
        expected = pair.plain(x).square().sum()
        pair.engine.backward(loss)
        expected.backward()
        pair.step()
        del loss, expected
        assert spill.puts == 5


@pytest.mark.parametrize("activations", ["host", "nvme"])
def test_a_full_tier_is_named(activations: str, swap_folder: Path) -> None:
    case = placed("sim", "nvme")
    with letting_go(Stack(), case, swap_folder, activations) as pair:
        pair.train(square(inputs(grad=True)), steps=1)
        pair.engine._memory.trim()
        budget = pair.engine._memory.budget
        room = budget.available(activations)
        assert room is not None
        with budget.reserve(activations, "other", room), pytest.raises(BudgetError, match=f"memory.{activations}"):
            pair.engine(inputs(8192, WIDTH, grad=True))
        pair.engine.zero_grad()
        pair.train(square(inputs(grad=True)), steps=1)


def test_swap_files_for_activations_need_a_path() -> None:
    with pytest.raises(PlanError, match="nvme_paths"):
        offload.initialize(Stack(), {"device": "cpu", "placement": {"activations": "nvme"}})


@pytest.mark.parametrize("activations", ["host", "nvme"])
def test_nothing_is_left_of_an_engine_closed_in_between(activations: str, swap_folder: Path) -> None:
    with nothing_left_of(swap_folder):
        config = config_of(placed("sim", "nvme"), swap_folder, placement={"activations": activations})
        engine = offload.initialize(Stack(), config)
        loss = engine(inputs(256, WIDTH, grad=True)).square().sum()
        engine.close()
        with pytest.raises((OffloadError, RuntimeError)):
            loss.backward()
        del loss


def test_auto_keeps_what_fits(swap_folder: Path) -> None:
    results = []
    for room, some in ((1 << 40, False), (3000, True), (0, True)):
        model = Stack(block=Probed)
        with letting_go(model, placed("cpu", "nvme"), swap_folder, "auto") as pair:
            activations = pair.engine._binding.activations
            assert activations is not None
            activations.room = room
            pair.train(square(inputs(grad=True)))
            assert (activations.recomputed > 0) == some and activations.kept_bytes == 0
            results.append(activations.recomputed)
    assert results[0] < results[1] < results[2]


@pytest.mark.parametrize("activations", CHOICES)
def test_errors_in_forward_and_backward(activations: str, swap_folder: Path) -> None:
    class Failing(Exception):
        pass

    class Fuse(nn.Module):
        armed = 0

        def __init__(self) -> None:
            super().__init__()
            self.block, self.calls = Block(), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            x = torch.tanh(self.block(x))
            if self.calls == self.armed:
                raise Failing
            return x

    with letting_go(Stack(block=Fuse), placed("sim", "nvme"), swap_folder, activations) as pair:
        fuse = pair.offloaded.blocks[1]
        for armed in (1, 2):  # in the forward; in the recompute
            fuse.calls, fuse.armed = 0, armed
            # A recompute ends before the error, since everything has been saved by then.
            with pytest.raises(Failing) if armed == 1 else contextlib.nullcontext():
                pair.engine.backward(pair.engine(inputs(grad=True)).square().sum())
            fuse.armed = 0
            pair.engine.zero_grad()
            pair.nothing_resident()
        pair.train(square(inputs(grad=True)))


@let_go
def test_square_loss_of_many_shapes(activations: str, swap_folder: Path) -> None:
    sections = {"placement": {"activations": activations}}
    with twin(Stack(), placed("sim", "nvme"), swap_folder, **sections) as pair:
        for step in range(2):
            pair.step([inputs(2 + 3 * k, WIDTH, seed=step * 10 + k) for k in range(4)], square_loss)
