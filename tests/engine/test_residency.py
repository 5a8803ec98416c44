"""Leases on units: transitions, holders, pressure, prefetch, and what happens when a load fails."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from offload.binding_saved import WeightHandle, pop_hooks
from offload.errors import OffloadError
from offload.parameters import OffloadedParameter
from offload.prefetch import VisitOrder
from offload.residency import Phase, Residency, Unit
from swap.errors import SwapIOError
from swap.faults import FaultPlan
from tests.engine.binding_models import NVME, Pair, Stack, inputs, paired, square
from tests.engine.common import Case, placed, running

swapped = pytest.mark.parametrize("case", NVME, ids=str)


@pytest.fixture(params=NVME, ids=str)
def pair(request: pytest.FixtureRequest, swap_folder: Path) -> Iterator[Pair]:
    with paired(Stack(4), request.param, swap_folder) as made:
        yield made


def parts(pair: Pair) -> tuple[Residency, list[Unit]]:
    return pair.engine._residency, pair.engine._residency.units


def test_impossible_transitions_name_both_states(pair: Pair) -> None:
    _, units = parts(pair)
    with pytest.raises(OffloadError, match=r"unit blocks\.0: no transition from resting to resident"):
        units[0].change(Phase.RESIDENT)


def test_a_unit_rests_after_its_last_holder(pair: Pair) -> None:
    residency, units = parts(pair)
    unit, one, two = units[1], object(), object()
    weight = pair.offloaded.blocks[1].up.weight
    residency.acquire(unit, one)
    assert type(weight) is OffloadedParameter and unit.phase is Phase.RESIDENT
    residency.acquire(unit, two, opened=True)
    assert type(weight) is nn.Parameter
    residency.acquire(unit, two)  # once more changes nothing
    assert unit.leases == 2 and unit.open
    residency.release(unit, two)
    assert type(weight) is OffloadedParameter and unit.phase is Phase.RESIDENT
    residency.release(unit, two)
    residency.release(unit, object())
    assert unit.phase is Phase.RESIDENT
    residency.release(unit, one)
    assert unit.phase is Phase.RESTING
    pair.nothing_resident()


def packing(pair: Pair) -> Callable[[torch.Tensor], WeightHandle | None]:
    """What stands for a tensor in what autograd saves, if it is a view of a unit."""
    hooks = pair.engine._binding._saved.enter()
    pop_hooks(hooks)

    def handle_of(tensor: torch.Tensor) -> WeightHandle | None:
        packed = hooks.pack_hook(tensor)
        return packed if isinstance(packed, WeightHandle) else None

    return handle_of


def test_data_is_a_view_of_one_buffer_while_leased(pair: Pair) -> None:
    residency, units = parts(pair)
    residency.acquire(units[0], "me", opened=True)
    up, down = pair.offloaded.blocks[0].up, pair.offloaded.blocks[0].down
    assert up.weight.untyped_storage()._cdata == down.weight.untyped_storage()._cdata
    assert torch.equal(up.weight, pair.plain.blocks[0].up.weight)
    handle_of = packing(pair)
    part = handle_of(up.weight[1:])
    assert part is not None and part.unit is units[0] and part.record.parameter is up.weight
    assert part.offset == up.weight.shape[1] and part.shape == up.weight[1:].shape
    assert handle_of(torch.zeros(3)) is None
    assert handle_of(torch.zeros(3, 3).to_sparse()) is None
    residency.release(units[0], "me")
    pair.nothing_resident()


def test_a_parameter_is_known_by_its_last_handle_while_it_is_as_it_was(pair: Pair) -> None:
    residency, units = parts(pair)
    residency.acquire(units[0], "me", opened=True)
    weight, handle_of = pair.offloaded.blocks[0].up.weight, packing(pair)
    first = handle_of(weight)
    assert first is not None and handle_of(weight) is first and handle_of(weight.detach()) == first
    with torch.no_grad():
        weight.mul_(1.0)
    written = handle_of(weight)
    assert written is not None and written.version == first.version + 1 and handle_of(weight) is written
    view = weight.data
    weight.data = view.t()  # the same memory and the same version, another tensor
    turned = handle_of(weight)
    assert turned is not None and turned.shape == view.t().shape and turned.stride == view.t().stride()
    weight.data = view[1:]
    moved = handle_of(weight)
    assert moved is not None and moved.offset == view.shape[1]
    weight.data = view
    assert handle_of(weight) == written
    residency.release(units[0], "me")


def test_prefetch_is_only_a_hint(pair: Pair) -> None:
    residency, units = parts(pair)
    assert residency.prefetch(units[2])
    assert not residency.prefetch(units[2])
    assert residency.resident_units() == ["blocks.2"] and residency.busy_units() == []
    residency.acquire(units[2], "me")
    assert units[2].loads == 1
    residency.release(units[2], "me")
    residency.prefetch(units[1])
    assert residency.drop_prefetched() == 1
    pair.nothing_resident()


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_no_room_names_the_holders_and_the_key(swap_folder: Path, device: str) -> None:
    case = placed(device, "nvme")
    with paired(Stack(6), case, swap_folder) as made:
        planned = sum(made.engine.memory().planned["device"].values())
    with paired(Stack(6), case, swap_folder, memory={"device": planned}) as made:
        residency, units = parts(made)
        taken = []
        with pytest.raises(OffloadError, match=r"blocks\.0 \(1 leases.*raise memory\.device") as caught:
            for unit in units:
                residency.acquire(unit, "me")
                taken.append(unit)
        assert caught.value.__cause__ is not None and len(taken) >= 2
        for unit in taken:
            residency.release(unit, "me")
        made.nothing_resident()
        del caught
        made.train(square(inputs()), steps=1)


def test_prefetched_units_give_way(swap_folder: Path) -> None:
    case = placed("cpu", "nvme")
    with paired(Stack(6), case, swap_folder) as made:
        planned = sum(made.engine.memory().planned["device"].values())
    with paired(Stack(6), case, swap_folder, memory={"device": planned}) as made:
        residency, units = parts(made)
        for unit in units[:6]:
            residency.prefetch(unit)
        for unit in units[::-1]:
            residency.acquire(unit, "me")
            residency.release(unit, "me")
        residency.drop_prefetched()
        made.nothing_resident()


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_a_load_that_fails_leaves_everything_at_rest(swap_folder: Path, device: str, backward: bool) -> None:
    plan = FaultPlan()
    with running(Stack(4), placed(device, "nvme"), swap_folder, faults=plan) as engine:
        loss = engine(inputs()).square().sum()
        plan.fail("read", errno=errno.EIO, nth=plan.calls["read"] + 2, times=1)
        with pytest.raises(SwapIOError, match="swap read of"):
            engine.backward(loss) if backward else engine(inputs())
        engine._binding.end_step()
        assert engine.resident_units() == [] and engine._residency.busy_units() == []
        with pytest.raises(SwapIOError, match="swap read of"):  # a store that failed once stays failed
            engine(inputs())
        assert engine.resident_units() == [] and engine._residency.busy_units() == []


@swapped
def test_refresh_shows_new_values_to_whoever_holds_the_unit(case: Case, swap_folder: Path) -> None:
    with paired(Stack(2), case, swap_folder) as made:
        weight = made.offloaded.blocks[0].up.weight
        residency, units = parts(made)
        residency.prefetch(units[0])
        made.engine.set_full("blocks.0.up.weight", "parameter", torch.full(weight.shape, 2.0))
        assert float(weight.sum()) == 2.0 * weight.numel()
        with made.engine.gathered():
            made.engine.set_full("blocks.0.up.weight", "parameter", torch.full(weight.shape, 3.0))
            assert torch.equal(weight, torch.full(weight.shape, 3.0))
        assert float(weight.detach().sum()) == 3.0 * weight.numel()
        made.nothing_resident()


def units(count: int) -> list[Unit]:
    return [Unit(index=i, name=str(i), flats=[]) for i in range(count)]


def test_order_predicts_what_followed_last_time() -> None:
    a, b, c = units(3)
    order = VisitOrder(2)
    assert [order.visit(u, backward=False) for u in (a, b, c)] == [[], [], []]
    assert [order.visit(u, backward=True) for u in (c, b, a)] == [[], [], []]
    assert [order.visit(u, backward=False) for u in (a, b, c)] == [[b, c], [c], []]
    assert [order.visit(u, backward=True) for u in (c, b, a)] == [[b, a], [a], []]


def test_order_predicts_nothing_beyond_a_pass() -> None:
    a, b = units(2)
    order = VisitOrder(3)
    for _ in range(3):
        order.visit(a, backward=False)
        assert order.visit(b, backward=False) == []


def test_order_forgets_a_path_not_taken_again() -> None:
    a, b, c = units(3)
    order = VisitOrder(1)
    order.visit(a, backward=False)
    order.visit(b, backward=False)
    order.visit(a, backward=False)
    order.visit(c, backward=False)
    assert order.visit(a, backward=False) == [c]


def test_no_prefetch_with_depth_zero() -> None:
    a, b = units(2)
    order = VisitOrder(0)
    for _ in range(2):
        assert order.visit(a, backward=False) == [] and order.visit(b, backward=False) == []
