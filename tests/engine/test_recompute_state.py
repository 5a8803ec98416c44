"""A forward that is repeated for its activations sees the modules as the first one did, or the reason is named."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from offload.errors import OffloadError
from tests.engine.binding_models import NVME, WIDTH, Block, Pair, Stack, inputs, plainly
from tests.engine.test_activations import letting_go, recomputed

everywhere = pytest.mark.parametrize(
    ("activations", "case"),
    [("recompute", NVME[0]), ("host", NVME[1]), ("nvme", NVME[1])],
    ids=["recompute-cpu", "host-sim", "nvme-sim"],
)


class Tuned(nn.Module):
    """Adds what a buffer and an attribute say, in a way of which autograd saves something."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.scale = Block(), 1.0
        self.register_buffer("shift", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(nn.functional.gelu(x * self.scale + self.shift))  # type: ignore[no-any-return]


class Counting(Tuned):
    def forward(self, x: Tensor) -> Tensor:
        self.scale = self.scale + 0.25
        return super().forward(x)


class Recurrent(Tuned):
    """Carries a state on, in a tuple and with its graph cut."""

    carried: tuple[Tensor, int] | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.gelu(x if self.carried is None else x + self.carried[0])
        self.carried = y.detach(), 1
        return super().forward(y)


class Drawing(Tuned):
    """Draws from a generator of its own, made when it is first needed."""

    def forward(self, x: Tensor) -> Tensor:
        if "generator" not in self.__dict__:
            self.generator = torch.Generator().manual_seed(5)
        return super().forward(x + torch.rand(x.shape, generator=self.generator))


def between(pair: Pair, change: Callable[[Any], None]) -> None:
    """Three steps with `change` between forward and backward."""
    for seed in range(3):
        losses = []
        for model in (pair.offloaded, pair.plain):
            losses.append(model(inputs(seed=seed, grad=True)).square().sum())
            change(model)
        assert torch.equal(losses[0], losses[1])
        pair.engine.backward(losses[0])
        losses[1].backward()
        pair.step()


@everywhere
@pytest.mark.parametrize("kind", [Counting, Recurrent, Drawing], ids=lambda kind: kind.__name__)
def test_state_that_a_forward_leaves_behind(kind: Any, activations: str, case: Any, swap_folder: Path) -> None:
    with letting_go(Stack(block=kind), case, swap_folder, activations) as pair:
        between(pair, lambda model: None)
        assert recomputed(pair) > 0
        pair.both(lambda model: [block.scale for block in model.blocks])


def shift(block: Any) -> None:
    block.shift = block.shift + 0.5


def rescale(block: Any) -> None:
    block.scale = 0.5


def freeze(block: Any) -> None:
    block.block.up.weight.requires_grad_(not block.block.up.weight.requires_grad)


@everywhere
@pytest.mark.parametrize("change", [shift, rescale, freeze], ids=lambda change: change.__name__)
def test_what_is_replaced_between_forward_and_backward(
    change: Callable[[Any], None], activations: str, case: Any, swap_folder: Path
) -> None:
    with letting_go(Stack(block=Tuned), case, swap_folder, activations) as pair:
        between(pair, lambda model: change(model.blocks[1]))
        assert recomputed(pair) > 0


@everywhere
def test_a_buffer_written_to_in_between_is_named(activations: str, case: Any, swap_folder: Path) -> None:
    with letting_go(Stack(block=Tuned), case, swap_folder, activations) as pair:
        loss = pair.engine(inputs(grad=True)).square().sum()
        pair.offloaded.blocks[2].shift.add_(1.0)
        with pytest.raises(OffloadError, match=r"unit blocks\.2: .*shift was written to in between.*'keep'"):
            pair.engine.backward(loss)
        del loss
        pair.engine.zero_grad()
        pair.plain.blocks[2].shift.add_(1.0)
        between(pair, lambda model: None)


def test_an_input_written_to_in_between_is_named(swap_folder: Path) -> None:
    class Masked(Tuned):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(nn.functional.gelu(x + mask))

    def run(model: Stack, x: Tensor) -> Tensor:
        mask = torch.zeros(WIDTH)
        for block in model.blocks:
            x = block(x, mask)
            mask += 1
        return x

    with letting_go(Stack(run=run, block=Masked), NVME[0], swap_folder, "recompute") as pair:
        loss = pair.engine(inputs(grad=True)).square().sum()
        with pytest.raises(OffloadError, match=r"one of its inputs was written to in between.*'keep'"):
            pair.engine.backward(loss)
        del loss
        pair.engine.zero_grad()


@everywhere
@pytest.mark.parametrize("name", ["blocks.1.shift", "blocks.1.block.up.bias", "blocks.1.block.up.weight"])
def test_values_put_in_for_one_call(name: str, activations: str, case: Any, swap_folder: Path) -> None:
    """`functional_call` swaps them out again before the backward."""
    shape = dict(Stack(block=Tuned).state_dict())[name].shape

    def run(model: Any) -> Tensor:
        value = torch.full(shape, 0.5, requires_grad=True)
        loss = functional_call(model, {name: value}, (inputs(grad=True),)).square().sum()
        return loss + value.sum()  # type: ignore[no-any-return]

    with letting_go(Stack(block=Tuned), case, swap_folder, activations) as pair:
        pair.train(run)


@everywhere
def test_hooks_for_all_modules_run_once(activations: str, case: Any, swap_folder: Path) -> None:
    def before(module: nn.Module, args: Any) -> Any:
        return (args[0] * 1.5, *args[1:]) if isinstance(module, Block) else None

    def after(module: nn.Module, args: Any, output: Tensor) -> Any:
        return output * 0.5 if isinstance(module, Block) else None

    handles = [register_module_forward_pre_hook(before), register_module_forward_hook(after)]
    try:
        with letting_go(Stack(), case, swap_folder, activations) as pair:
            pair.train(lambda model: model(inputs(grad=True)).square().sum())
    finally:
        for handle in handles:
            handle.remove()


class Remembering(Block):
    """Keeps its last output, graph and all, and says so to nobody."""

    def forward(self, x: Tensor) -> Tensor:
        self.last = (super().forward(x).square().mean(), None)
        return super().forward(x)


def test_what_modules_remember_does_not_chain_up(swap_folder: Path) -> None:
    """An output that never meets a backward is gone once it is replaced."""
    seen: list[weakref.ref[Tensor]] = []

    def run(model: Stack, x: Tensor) -> Tensor:
        x = plainly(model, x)
        seen.extend(weakref.ref(block.last[0]) for block in model.blocks)  # type: ignore[union-attr, index]
        return x

    model = Stack(run=run, block=Remembering)
    with letting_go(copy.deepcopy(model), NVME[0], swap_folder, "recompute") as pair:
        for _ in range(4):
            pair.engine.backward(pair.engine(inputs(grad=True)).square().sum())
            pair.engine.step()
        gc.collect()
        alive = sum(ref() is not None for ref in seen)
        assert alive <= 2 * len(model.blocks)  # of ours and, never called, of the twin
        for block in pair.offloaded.blocks:
            del block.last
