"""The unit with which a forward ends and its backward begins stays on the device in between, and gives way."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload.prefetch import VisitOrder
from offload.residency import Unit
from tests.engine.binding_models import WIDTH, Pair, Stack, inputs, paired, square
from tests.engine.common import placed

DEVICES = pytest.mark.parametrize("device", ["cpu", "sim"])


class Enclosed(nn.Module):
    """The root has parameters of its own, which it uses first and last, around its blocks: as with a tied table."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Stack(3)
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.5))
        self.blocks = self.inner.blocks
        del self.inner

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = block(x)
        return x * self.scale


def loads(pair: Pair) -> dict[str, int]:
    return {unit.name: unit.loads for unit in pair.engine._residency.units}


def new_loads(pair: Pair, before: dict[str, int]) -> dict[str, int]:
    return {name: count - before[name] for name, count in loads(pair).items()}


@contextlib.contextmanager
def staying(device: str, folder: Path) -> Iterator[tuple[Pair, list[Tensor]]]:
    """A pair between a forward and its backward, with the losses of both models: the head has stayed."""
    with paired(Stack(3), placed(device, "nvme"), folder) as pair:
        run = square(inputs(grad=True))
        pair.train(run, steps=2)
        losses = forwards(pair, run)
        assert pair.engine.resident_units() == ["head"] and pair.engine._residency.busy_units() == []
        yield pair, losses
        for loss in losses:
            loss.backward()
        pair.step()
        pair.nothing_resident()


def forwards(pair: Pair, run: Callable[[Any], Tensor]) -> list[Tensor]:
    """The losses of both models, whose graphs they hold, after a forward and before its backward."""
    losses: list[Tensor] = []
    pair.both(lambda model: losses.append(run(model)) or losses[-1].detach())
    return losses


def test_order_knows_where_passes_turn() -> None:
    a, b, root = (Unit(index=i, name=str(i), flats=[]) for i in range(3))
    order = VisitOrder(1)

    def forward() -> list[bool]:
        found = []
        for unit in (a, b):
            order.visit(unit, backward=False)
            found.append(order.leave(unit))
        return found

    assert forward() == [False, False]
    order.visit(b, backward=True)
    order.visit(a, backward=True)
    assert forward() == [False, True]
    order.visit(a, backward=False)  # no backward: as an evaluation
    assert order.leave(b) is False
    order.visit(root, backward=False)
    assert forward() == [False, False]
    assert order.leave(root) is False  # it encloses the others
    order.visit(root, backward=True)
    order.visit(root, backward=False)
    assert forward() == [False, False] and order.leave(root) is True


@DEVICES
def test_the_last_unit_is_loaded_once_for_both_passes(device: str, swap_folder: Path) -> None:
    with paired(Stack(4), placed(device, "nvme"), swap_folder) as pair:
        pair.train(square(inputs(grad=True)), steps=2)
        before = loads(pair)
        pair.train(square(inputs(grad=True)), steps=3)
        assert new_loads(pair, before) == {**{f"blocks.{i}": 6 for i in range(4)}, "head": 3}
        pair.nothing_resident()


def test_a_root_that_is_left_last_stays(swap_folder: Path) -> None:
    with paired(Enclosed(), placed("cpu", "nvme"), swap_folder) as pair:
        pair.train(square(inputs(grad=True)), steps=2)
        before = loads(pair)
        pair.train(square(inputs(grad=True)), steps=2)
        found = new_loads(pair, before)
        root = next(name for name in found if not name.startswith("blocks"))
        assert found == {**{f"blocks.{i}": 4 for i in range(3)}, root: 2}
        pair.nothing_resident()


@DEVICES
def test_what_stayed_in_vain_goes(device: str, swap_folder: Path) -> None:
    with staying(device, swap_folder) as (pair, _):
        with torch.no_grad():
            pair.both(lambda model: model.blocks[0](inputs()))
        assert "head" not in pair.engine.resident_units()  # the backward then loads it


def test_it_outlives_neither_its_graph_nor_the_step(swap_folder: Path) -> None:
    with paired(Stack(3), placed("cpu", "nvme"), swap_folder) as pair:
        run = square(inputs(grad=True))
        pair.train(run, steps=2)
        losses = forwards(pair, run)
        assert pair.engine.resident_units() == ["head"]
        losses.clear()
        assert pair.engine.resident_units() == []
        pair.train(run)
        losses = forwards(pair, run)
        assert pair.engine.resident_units() == ["head"]
        pair.engine.zero_grad()
        assert pair.engine.resident_units() == []


def test_backwards_of_several_forwards(swap_folder: Path) -> None:
    with paired(Stack(3), placed("cpu", "nvme"), swap_folder) as pair:
        run = square(inputs(grad=True))
        pair.train(run, steps=2)

        def both_orders(model: Any) -> None:
            first, second = run(model), run(model)
            second.backward()
            first.backward()
            third, fourth = run(model), run(model)
            third.backward()
            fourth.backward()

        for model in (pair.plain, pair.offloaded):
            both_orders(model)
        pair.step()
        pair.nothing_resident()


@DEVICES
def test_it_gives_way_to_what_needs_the_room(device: str, swap_folder: Path) -> None:
    with staying(device, swap_folder) as (pair, _):
        residency = pair.engine._residency
        head = next(unit for unit in residency.units if unit.name == "head")
        loads = head.loads
        while residency.make_room():
            pass
        assert residency.resident_units() == []
    assert head.loads == loads + 1


@DEVICES
def test_nothing_stays_while_the_states_are_away(device: str, swap_folder: Path) -> None:
    with staying(device, swap_folder) as (pair, _):
        pair.engine.offload_states()
        assert pair.engine.resident_units() == []
        pair.engine.reload_states()
