"""Outputs and inputs of any kind, several losses, gradients of and through everything.

Compared with `torch.equal`; hooks, graphs and containers are torch's own on both sides.
"""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine.binding_models import WIDTH, Block, Stack, inputs, square
from tests.engine.common import Case
from tests.models.common import Duo, cover, duo

Point = namedtuple("Point", ["x", "y"])


@dataclass
class Result:
    """Tensors and others in fields, one of them None."""

    hidden: Tensor
    extra: dict[str, Any]
    nothing: None = None


class Wrapping(nn.Module):
    """A block that returns its result in some container, and takes the container of the one before it."""

    def __init__(self, wrap: Callable[[Tensor], Any], unwrap: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.block, self.wrap, self.unwrap = Block(), wrap, unwrap

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        value = kwargs["value"] if "value" in kwargs else args[0]
        return self.wrap(self.block(value if isinstance(value, Tensor) else self.unwrap(value)))


CONTAINERS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tensor": (lambda t: t, lambda v: v),
    "dict": (lambda t: {"hidden": t, "step": 3}, lambda v: v["hidden"]),
    "ordered": (lambda t: OrderedDict(a=None, b=t), lambda v: v["b"]),
    "dataclass": (lambda t: Result(t, {"twice": t * 2}), lambda v: v.hidden + v.extra["twice"]),
    "tuple": (lambda t: (t, None, t.detach()), lambda v: v[0] - v[2] * 0.5),
    "named tuple": (lambda t: Point(t, "text"), lambda v: v.x),
    "nested": (lambda t: [{"a": (None, [t, {"b": t * 0.5}])}], lambda v: v[0]["a"][1][0] + v[0]["a"][1][1]["b"]),
    "chunks of one tensor": (lambda t: t.chunk(2, -1), lambda v: torch.cat(list(v), -1)),
    "no gradient needed": (lambda t: (t, t.argmax(-1), t.detach() > 0), lambda v: v[0] * v[2] + v[1][:, None]),
}


class Chain(nn.Module):
    def __init__(self, container: str, keywords: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Wrapping(*CONTAINERS[container]) for _ in range(3))
        self.unwrap, self.keywords = CONTAINERS[container][1], keywords

    def forward(self, value: Any) -> Any:
        for block in self.blocks:
            value = block(value=value) if self.keywords else block(value)
        return value


@pytest.mark.parametrize(("container", "case"), cover(list(CONTAINERS), share=2))
def test_containers(container: str, case: Case, swap_folder: Path) -> None:
    unwrap = CONTAINERS[container][1]
    keywords = len(container) % 2 == 0
    with duo(Chain(container, keywords), case, swap_folder) as pair:

        def loss(model: Any) -> Tensor:
            value = model(inputs())
            return (value if isinstance(value, Tensor) else unwrap(value)).square().sum()

        pair.train(loss)
        pair.both(lambda model: model(inputs()))
        pair.nothing_resident()


def several_losses(pair: Duo) -> None:
    """Three losses of one forward, each with a backward of its own."""
    for model, backward in ((pair.offloaded, pair.engine.backward), (pair.plain, Tensor.backward)):
        y = model(inputs())
        backward(y[0].square().sum(), retain_graph=True)
        backward(y[1].abs().sum(), retain_graph=True)
        backward(y[2:].sum())
        if model is pair.plain:
            pair.reference.collect()


def gradient_argument(pair: Duo) -> None:
    weights = torch.arange(12.0).view(4, 3)
    pair.engine.backward(pair.offloaded(inputs()), weights)
    pair.plain(inputs()).backward(weights)


def autograd_backward(pair: Duo) -> None:
    for model in (pair.offloaded, pair.plain):
        y = model(inputs())
        torch.autograd.backward([y[0], y[1].sum()], [torch.ones(3), torch.tensor(2.0)])


def retained(pair: Duo) -> None:
    """The same graph three times."""
    losses = [square(inputs())(model) for model in (pair.offloaded, pair.plain)]
    for last in (False, False, True):
        for loss, model in zip(losses, (pair.offloaded, pair.plain), strict=True):
            loss.backward(retain_graph=not last)
            if model is pair.plain:
                pair.reference.collect()


def edited_by_hooks(pair: Duo) -> None:
    """Hooks on parameters, activations and modules change gradients before they are collected."""
    for model in (pair.offloaded, pair.plain):
        handles = [
            model.blocks[0].up.weight.register_hook(lambda g: g * 0.5),
            model.blocks[1].register_full_backward_hook(lambda _m, gi, _go: (gi[0] * 3,)),
            model.blocks[2].register_full_backward_pre_hook(lambda _m, go: (go[0] * 2,)),
        ]
        h = model.blocks[0](inputs())
        h.register_hook(lambda g: g.clamp(-1, 1))
        for block in list(model.blocks)[1:]:
            h = block(h)
        model.head(h).square().sum().backward()
        for handle in handles:
            handle.remove()


def hooks_after_accumulation(pair: Duo) -> None:
    """A user's own hook sees the gradient that the engine collects."""
    seen: list[Tensor] = []
    name = "blocks.1.down.bias"
    for model in (pair.offloaded, pair.plain):
        handle = model.get_parameter(name).register_hook(lambda g: seen.append(g.clone()))
        square(inputs())(model).backward()
        handle.remove()
    assert torch.equal(seen[0].cpu(), seen[1])


def several_inputs_of_the_loss(pair: Duo) -> None:
    """Two forwards meet in one loss."""
    pair.backward(lambda m: (m(inputs(seed=1)) * m(inputs(seed=2))).sum())
    pair.step()
    for model in (pair.offloaded, pair.plain):
        (model(inputs(seed=1)).sum() - model.blocks[1](inputs(seed=3)).sum()).backward()


FLOWS = {
    f.__name__: f
    for f in (
        several_losses,
        gradient_argument,
        autograd_backward,
        retained,
        hooks_after_accumulation,
        several_inputs_of_the_loss,
        edited_by_hooks,
    )
}


@pytest.mark.parametrize(("flow", "case"), cover(list(FLOWS), share=2))
def test_ways_to_a_gradient(flow: str, case: Case, swap_folder: Path) -> None:
    with duo(Stack(3), case, swap_folder) as pair:
        for _ in range(2):
            FLOWS[flow](pair)
            pair.step()


@pytest.mark.parametrize(("grad_mode", "case"), cover(["eval", "train"]))
def test_gradient_of_the_inputs(grad_mode: str, case: Case, swap_folder: Path) -> None:
    with duo(Stack(3), case, swap_folder) as pair:

        def saliency(model: Any) -> Tensor:
            x = inputs(grad=True)
            model(x).square().sum().backward(inputs=[x])
            return x.grad

        def by_grad(model: Any) -> Tensor:
            x = inputs(grad=True)
            return torch.autograd.grad(model(x).square().sum(), x)[0]

        pair.train(square(inputs()), steps=1)
        if grad_mode == "eval":
            pair.engine.eval()
            pair.plain.eval()
        pair.both(saliency)
        pair.both(by_grad)
        pair.nothing_resident()
        pair.engine.train()
        pair.plain.train()
        pair.train(square(inputs()), steps=1)


@pytest.mark.parametrize(("width", "case"), cover([WIDTH]))
def test_outputs_that_are_parameters_or_inputs(width: int, case: Case, swap_folder: Path) -> None:
    class Giver(nn.Module):
        """Hands its input and one of its parameters through."""

        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(width))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, self.w * 1.0

    with duo(nn.Sequential(Block(), Giver()), case, swap_folder) as pair:
        pair.train(lambda m: sum(t.square().sum() for t in m(inputs())))
