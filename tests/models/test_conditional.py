"""Parts of a model that a step does not use: experts, branches, dropped layers.

Compared with `torch.equal`. A parameter without a gradient behaves as one whose `.grad` is None in torch: no update, no
decay, no ageing of its moments.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine.binding_models import WIDTH, Block, Stack, inputs, square
from tests.engine.common import Case
from tests.models.common import PLACES, cover, duo

IDS = torch.tensor([[1, 5, 2, 9], [0, 3, 3, 8]])


class Experts(nn.Module):
    """Eight experts in a list, of which the router's choice runs; `only` forces the choice."""

    def __init__(self, only: int | None = None) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 8)
        self.experts = nn.ModuleList(Block() for _ in range(8))
        self.only = only

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        chosen = weights.argmax(-1) if self.only is None else torch.full((x.shape[0],), self.only)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero()[:, 0]
            if rows.numel():
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, index, None])
        return out


class Skipping(nn.Module):
    """Blocks skipped at random (stochastic depth), by a generator of the model's own."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.rate, self.random = rate, random.Random(4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.random.random() >= self.rate:
                x = block(x)
        return x * 1.5


class Integers(nn.Module):
    """A first layer that takes integers, a second input that is not used, and a parameter that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.unused = nn.Parameter(torch.ones(5))
        self.pooler = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.emb(ids)
        for block in self.blocks:
            x = block(x)
        self.pooled = self.pooler(x.detach())  # computed, but not part of the loss
        return x


class Bare(nn.Module):
    """Blocks whose inputs need no gradient, all frozen but the last."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.blocks[0].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        with torch.no_grad():
            x = self.blocks[1](x)
        return self.blocks[2](x)


SCENARIOS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Tensor]]] = {
    "seven experts untouched": (lambda: Experts(only=3), square(inputs())),
    "experts by a router": (Experts, square(inputs(6, WIDTH))),
    "branch skipped at random": (lambda: Skipping(0.3), square(inputs(grad=True))),
    "layer drop": (lambda: Skipping(0.7), square(inputs(grad=True))),
    "integers, unused parts": (Integers, lambda m: m(IDS).square().sum()),
    "no gradient into a part": (Bare, square(inputs())),
}


@pytest.mark.parametrize(("scenario", "case"), cover(list(SCENARIOS), share=3))
def test_unused_parts(scenario: str, case: Case, swap_folder: Path) -> None:
    build, loss = SCENARIOS[scenario]
    torch.manual_seed(1)
    with duo(build(), case, swap_folder, max_grad_norm=0.5) as pair:
        for _ in range(4):
            pair.backward(loss)
            pair.step()


@pytest.mark.parametrize(("only", "case"), cover([3, 0]))
def test_an_expert_without_tokens_is_not_updated(only: int, case: Case, swap_folder: Path) -> None:
    torch.manual_seed(1)
    with duo(Experts(only=only), case, swap_folder) as pair:
        before = dict(pair.engine.named_full_parameters())
        pair.train(square(inputs()), steps=3)
        states = dict(pair.engine.named_full_states())
        for name, entry in states.items():
            used = "router" in name or f"experts.{only}." in name
            assert entry["step"] == (3 if used else 0)
            assert bool(entry["exp_avg"].any()) == used
            assert torch.equal(entry["parameter"], before[name]) != used
        # As torch's: a parameter that was never updated has no state.
        shadow = pair.reference.shadow.optimizer
        assert pair.engine.optimizer.state_dict()["state"].keys() == shadow.state_dict()["state"].keys()


@pytest.mark.parametrize(("kind", "case"), cover(["switched off later", "switched on later"]))
def test_parts_that_come_and_go(kind: str, case: Case, swap_folder: Path) -> None:
    """A part's moments wait while it is not used."""

    def loss(model: Any, whole: bool) -> Tensor:
        x = inputs()
        for index, block in enumerate(model.blocks):
            if whole or index != 1:
                x = block(x)
        return model.head(x).square().sum()

    with duo(Stack(3), case, swap_folder) as pair:
        for step in range(6):
            whole = (step < 3) == (kind == "switched off later")
            pair.backward(lambda model, whole=whole: loss(model, whole))
            pair.step()
        assert dict(pair.engine.named_full_states())["blocks.1.up.weight"]["step"] == 3


class Turns(nn.Module):
    """Small parameters side by side, and two large ones; a call names those that it uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.small = nn.ParameterList([nn.Parameter(torch.randn(WIDTH)) for _ in range(5)])
        self.large = nn.ParameterList([nn.Parameter(torch.randn(96, 128) * 0.1) for _ in range(2)])

    def forward(self, small: str, large: str = "") -> Tensor:
        total = sum((self.small[int(i)] * (1 + int(i))).square().sum() for i in small)
        return total + sum((self.large[int(i)] @ self.large[int(i)].t()).square().sum() for i in large)


def in_turns(blocks: Any, *uses: str) -> Tensor:
    return sum(block(*uses) for block in blocks)  # type: ignore[return-value]


@pytest.mark.parametrize(("kind", "case"), cover(["one after another", "around"], share=3))
def test_neighbours_get_their_gradients_in_other_backwards(kind: str, case: Case, swap_folder: Path) -> None:
    """Gradients that come later are not moved over those between them."""
    turns = {"one after another": ("13", "024"), "around": ("2", "13", "04", "01234")}[kind]
    with duo(nn.Sequential(Turns(), Turns()), case, swap_folder, max_grad_norm=0.5) as pair:
        for _ in range(2):
            for small in turns:
                pair.backward(lambda model, small=small: in_turns(model, small))
            pair.step()


@pytest.mark.parametrize("case", [PLACES[2], PLACES[4], PLACES[5]], ids=str)
def test_large_neighbours_are_updated_in_turns(case: Case, swap_folder: Path) -> None:
    """A unit of several chunks, of which a step updates some: all of them are there in the next forward."""
    chunks = dataclasses.replace(case, chunk=4096)
    with duo(nn.Sequential(Turns(), Turns()), chunks, swap_folder, schedule={"optimizer_step": "deferred"}) as pair:
        for small, large in (("0", "0"), ("1", "01"), ("", "1"), ("2", "01"), ("234", ""), ("0", "01")):
            for model in (pair.offloaded, pair.plain):
                in_turns(model, small, large).backward()
            pair.engine.step()
            pair.reference.collect()
            pair.reference.step()
            with torch.no_grad():
                pair.both(lambda model: in_turns(model, "01234", "01"))
        pair.states_equal()


@pytest.mark.parametrize(("value", "case"), cover([0.0]))
def test_a_gradient_of_zero_is_not_a_missing_one(value: float, case: Case, swap_folder: Path) -> None:
    """Zero gradients decay weights and moments; missing ones do not."""
    with duo(Stack(2), case, swap_folder) as pair:
        pair.train(square(inputs()), steps=1)
        pair.backward(lambda m: m(inputs()).sum() * value)
        pair.step()
        assert dict(pair.engine.named_full_states())["blocks.0.up.weight"]["step"] == 2
        assert pair.engine.step().stepped  # nothing at all
        assert dict(pair.engine.named_full_states())["blocks.0.up.weight"]["step"] == 2
        pair.states_equal()
