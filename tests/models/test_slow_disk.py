"""Writes that take long, and reads that overtake them: nothing is read before it is written.

Compared with `torch.equal`: the times that transfers take change no number.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from swap import FaultPlan
from tests.engine.binding_models import Block, Stack, inputs
from tests.engine.common import Case, placed
from tests.models.common import Duo, duo

WIDE = 96
PLACES = {
    "cpu": placed("cpu", "nvme"),
    "sim": placed("sim", "nvme"),
    "gradients on the host": Case(gradients="host", engine="aiofiles", chunk=4096),
}
ORDINARY = [("cpu", "deferred"), ("sim", "deferred")]
RUNS = [
    pytest.param(place, schedule, marks=() if (place, schedule) in ORDINARY else pytest.mark.acceptance)
    for place in PLACES
    for schedule in ("deferred", "barrier")
]


def wide() -> Stack:
    """Matrices of several layout blocks beside small parameters."""
    model = Stack(3, block=lambda: Block(WIDE))
    model.head = nn.Linear(WIDE, 3)
    return model


def loss(seed: int) -> Callable[[Any], Tensor]:
    x = inputs(4, WIDE, seed=seed)
    return lambda model: model(x).square().sum()


def sums(pair: Duo) -> None:
    """Contributions follow one another before the first is on the disk."""
    for seed in range(3):
        for model in (pair.offloaded, pair.plain):
            loss(seed)(model).backward()
        pair.reference.collect()


def read_at_once(pair: Duo) -> None:
    pair.backward(loss(0))  # compares the gradients
    pair.backward(loss(1))


def forgotten(pair: Duo) -> None:
    """What was dropped must not be written over what came after it."""
    pair.offloaded(inputs(4, WIDE)).sum().backward()
    pair.engine.zero_grad()
    for model in (pair.offloaded, pair.plain):
        loss(2)(model).backward()


def edited(pair: Duo) -> None:
    pair.backward(loss(3))
    name = "blocks.1.up.weight"
    for factor in (0.5, 3.0):
        pair.offloaded.get_parameter(name).grad.mul_(factor)
        held, count = pair.reference.gradients[name]
        pair.reference.gradients[name] = held * factor, count
    for model in (pair.offloaded, pair.plain):
        loss(4)(model).backward()


def written(pair: Duo) -> None:
    """Weights edited right after a step, and read right after that."""
    pair.train(loss(5), steps=1)
    with torch.no_grad():
        for model in (pair.offloaded, pair.plain):
            model.blocks[2].down.weight.mul_(0.5)
    pair.reference.shadow.masters["blocks.2.down.weight"].data.mul_(0.5)
    pair.both(lambda model: model(inputs(4, WIDE)).detach())
    pair.backward(loss(6))


def steps_in_a_row(pair: Duo) -> None:
    """The second step reads the states that the first is writing."""
    pair.backward(loss(7))
    pair.engine.step()
    pair.reference.step()
    for model in (pair.offloaded, pair.plain):
        for name, parameter in reversed(list(model.named_parameters())):  # what is used next is written last
            if model is pair.offloaded:
                parameter.grad = torch.ones(parameter.shape)
            else:
                pair.reference.gradients[name] = torch.ones(parameter.numel()), 1


def used_at_once(pair: Duo) -> None:
    """A unit is used twice while its update is being written: the second time it comes from the disk."""
    steps_in_a_row(pair)
    pair.engine.step()
    pair.reference.step()
    for _ in range(3):
        pair.both(lambda model: model(inputs(4, WIDE)).detach())
    pair.backward(loss(8))


FLOWS = {flow.__name__: flow for flow in (sums, read_at_once, forgotten, edited, written, steps_in_a_row, used_at_once)}


@pytest.mark.parametrize(("place", "schedule"), RUNS)
def test_nothing_is_read_before_it_is_written(place: str, schedule: str, swap_folder: Path) -> None:
    case = PLACES[place]
    faults = FaultPlan(seed=1).delay(1e-2, operation="write")
    sections: dict[str, Any] = {"schedule": {"optimizer_step": schedule}, "max_grad_norm": 0.5}
    with duo(wide(), case, swap_folder, faults=faults, **sections) as pair:
        for flow in FLOWS.values():
            flow(pair)
            pair.step()
        assert faults.injected["delay"] > 20


def test_a_step_right_after_another_reads_what_that_wrote(swap_folder: Path) -> None:
    """The states of a unit are on their way to the disk when its next update begins."""
    faults = FaultPlan(seed=2).delay(3e-2, operation="write")
    name = "blocks.0.up.weight"
    case, sections = Case(gradients="host"), {"schedule": {"optimizer_step": "deferred"}}
    with duo(Stack(1), case, swap_folder, faults=faults, **sections) as pair:
        shape = pair.plain.get_parameter(name).shape
        for number in range(4):
            pair.offloaded.get_parameter(name).grad = torch.full(shape, 1.0 + number)
            pair.reference.gradients[name] = torch.full((shape.numel(),), 1.0 + number), 1
            pair.engine.step()
            pair.reference.step()
        pair.states_equal()
