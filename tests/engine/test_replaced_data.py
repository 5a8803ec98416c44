"""`.data` of an open parameter replaced by another tensor: the value arrives, and later steps are seen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload.errors import OffloadError, StaleWeightsError
from tests.engine.binding_models import WIDTH, Stack, inputs, paired, square
from tests.engine.common import Case, placed, running

PLACES = [placed("cpu", "nvme"), placed("cpu", "host"), placed("sim", "device"), placed("sim", "host")]


def data(weight: nn.Parameter, value: Tensor) -> None:
    weight.data = value


def set_(weight: nn.Parameter, value: Tensor) -> None:
    with torch.no_grad():
        weight.set_(value)


@pytest.mark.parametrize("replace", [data, set_])
@pytest.mark.parametrize("case", PLACES, ids=str)
def test_in_gathered(case: Case, replace: Callable[[nn.Parameter, Tensor], None], swap_folder: Path) -> None:
    with paired(Stack(2), case, swap_folder) as pair:
        pair.train(square(inputs()), steps=1)
        with pair.engine.gathered(modify=True):
            replace(pair.offloaded.head.weight, torch.full((3, WIDTH), 0.25))
            assert float(pair.engine.get_full("head.weight").sum()) == 3 * WIDTH * 0.25
            pair.offloaded.head.weight.data.mul_(2.0)
        with torch.no_grad():
            pair.plain.head.weight.fill_(0.5)
        pair.weights_equal()
        pair.train(square(inputs()))


class Halving(nn.Module):
    """Halves its weight in every forward: by replacing `.data`, or in place."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.replaces, self.uses_before = nn.Linear(WIDTH, WIDTH), True, False

    def forward(self, x: Tensor) -> Tensor:
        weight = self.lin.weight
        if self.uses_before:
            x = torch.tanh(self.lin(x))
        if self.replaces:
            weight.data = weight.data * 0.5
        else:
            with torch.no_grad():
                weight.mul_(0.5)
        return self.lin(x)


@pytest.mark.parametrize("case", PLACES, ids=str)
def test_in_a_forward(case: Case, swap_folder: Path) -> None:
    with paired(Stack(2, block=Halving), case, swap_folder) as pair:
        for block in pair.plain.blocks:
            block.replaces = False  # the twin's optimizer would not follow
        pair.train(square(inputs()), steps=3)


@pytest.mark.parametrize("case", PLACES[:3], ids=str)
def test_what_the_graph_took_before_is_stale(case: Case, swap_folder: Path) -> None:
    """torch keeps the old tensor for the backward; here it is gone, and that is said."""
    model = Stack(2, block=Halving)
    for block in model.blocks:
        block.uses_before = True
    with running(model, case, swap_folder) as engine:
        loss = engine(inputs(grad=True)).square().sum()
        with pytest.raises(StaleWeightsError, match=r"blocks\.1\.lin\.weight"):
            engine.backward(loss)


OTHERS: dict[str, Tensor] = {"shape": torch.zeros(4, WIDTH), "dtype": torch.zeros(3, WIDTH, dtype=torch.float64)}


@pytest.mark.parametrize("what", OTHERS)
@pytest.mark.parametrize("case", PLACES[:3], ids=str)
def test_what_does_not_fit_is_refused_and_changes_nothing(case: Case, what: str, swap_folder: Path) -> None:
    with paired(Stack(2), case, swap_folder) as pair:

        def attempt() -> Any:
            with pair.engine.gathered(modify=True):
                pair.offloaded.head.weight.data = OTHERS[what]

        with pytest.raises(OffloadError, match=r"head\.weight: its \.data was replaced by a tensor of .* keeps"):
            attempt()
        pair.nothing_resident()
        pair.train(square(inputs()))
