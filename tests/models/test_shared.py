"""Shared and recurrent modules, and parameters that are read outside the forward of the module that owns them.

Compared with `torch.equal`: the same operations in the same order, and autograd sums the uses of a parameter itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from tests.engine.binding_models import WIDTH, Block, Stack, inputs, square
from tests.engine.common import Case
from tests.models.common import cover, duo

IDS = torch.tensor([[1, 5, 2, 9], [0, 3, 3, 8]])


class Loop(nn.Module):
    """One linear layer called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.cell(x))
        return self.head(x)


class Universal(nn.Module):
    """A block applied several times, with activation checkpointing of every application."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
        return x


class Tied(nn.Module):
    """An embedding that is the head too, and is read once more in its parent's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x) + 0.1 * self.emb.weight.sum(0).mean()


class TableUser(nn.Module):
    """A block that reads a table which another block owns."""

    def __init__(self, table: nn.Parameter | None = None) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(WIDTH)) if table is None else table
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) + self.table


def table_shared() -> nn.Module:
    first = TableUser()
    return nn.Sequential(first, *(TableUser(first.table) for _ in range(2)))


class Borrower(nn.Module):
    """Reads a sibling's parameter without owning it, and without calling the sibling."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        return x @ self.blocks[1].up.weight.t() @ self.blocks[1].up.weight


def normed() -> nn.Module:
    model = Stack(3)
    parametrizations.weight_norm(model.blocks[0].up)
    parametrizations.orthogonal(model.blocks[1].down)
    nn.utils.spectral_norm(model.blocks[2].up)
    return model


class Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).t()


def parametrized() -> nn.Module:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    for layer in model:
        parametrize.register_parametrization(layer, "weight", Symmetric())
    return model


class Lists(nn.Module):
    """Parameters in lists and dictionaries, and a recurrent layer that keeps references to its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(WIDTH) * i) for i in (1, 2)])
        self.shifts = nn.ParameterDict({"a": nn.Parameter(torch.zeros(WIDTH))})
        self.rnn = nn.GRU(WIDTH, WIDTH, num_layers=2)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.rnn(x[:, None] * self.scales[0] + self.shifts["a"])
        return y[:, 0] * self.scales[1]


def penalised(model: Any) -> Tensor:
    """The penalty reads parameters outside any forward."""
    return square(inputs())(model) + 1e-2 * sum(w.pow(2).sum() for w in model.parameters())


def penalty_alone(model: Any) -> Tensor:
    return model.blocks[1].up.weight.pow(2).sum() + model.head.bias.abs().sum()


def tied_loss(model: Any) -> Tensor:
    return nn.functional.cross_entropy(model(IDS).flatten(0, 1), IDS.flatten())


SCENARIOS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Tensor]]] = {
    "linear three times": (Loop, square(inputs())),
    "blocks twice, checkpointed": (Universal, square(inputs())),
    "tied and read by the parent": (Tied, tied_loss),
    "table of one block used by all": (table_shared, square(inputs())),
    "weight of a sibling": (Borrower, square(inputs())),
    "penalty on all weights": (lambda: Stack(3), penalised),
    "penalty without a forward": (lambda: Stack(3), penalty_alone),
    "weight, spectral norm and orthogonal": (normed, square(inputs())),
    "parametrizations": (parametrized, square(inputs())),
    "lists, dictionaries, GRU": (Lists, square(inputs())),
}


@pytest.mark.parametrize(("scenario", "case"), cover(list(SCENARIOS), share=2))
def test_sums_of_uses(scenario: str, case: Case, swap_folder: Path) -> None:
    build, loss = SCENARIOS[scenario]
    torch.manual_seed(2)
    with duo(build(), case, swap_folder) as pair:
        pair.train(loss, steps=3)
        pair.both(lambda model: [b.detach().clone() for b in model.buffers()])


@pytest.mark.parametrize(("read", "case"), cover(["item", "compare", "argmax", "numpy", "copy", "state_dict"]))
def test_the_value_of_a_stub_reaches_no_result(read: str, case: Case, swap_folder: Path) -> None:
    reads: dict[str, Callable[[Any], Any]] = {
        "item": lambda m: m.blocks[1].up.bias[3].item(),
        "compare": lambda m: bool((m.blocks[1].up.weight > -100).all()),
        "argmax": lambda m: m.blocks[2].down.weight.argmax(),
        "numpy": lambda m: m.head.weight.detach().numpy().sum().item(),
        "copy": lambda m: copy.deepcopy(m.blocks[0]).up.weight.detach(),
        "state_dict": lambda m: m.state_dict()["blocks.1.up.weight"],
    }
    with duo(Stack(3), case, swap_folder) as pair:
        pair.both(reads[read])
        pair.backward(square(inputs()))
        pair.both(reads[read])
        pair.step()
        pair.both(reads[read])
        pair.nothing_resident()
