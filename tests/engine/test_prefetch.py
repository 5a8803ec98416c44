"""What is loaded ahead follows from the order of the last pass and from measured times, and changes no bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from offload.prefetch import MOST, VisitOrder
from offload.residency import Unit
from tests.engine.common import assert_states_equal, decoder, placed, running, states_of
from tests.engine.test_layer_major import labelled


class Clock:
    """Seconds that a test moves on."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def units(*load_seconds: float) -> list[Unit]:
    return [Unit(index=i, name=str(i), flats=[], load_seconds=s) for i, s in enumerate(load_seconds)]


def walk(order: VisitOrder, clock: Clock, path: list[Unit], seconds: list[float]) -> list[list[int]]:
    """One forward in which each unit takes its time; what was expected at each visit. A backward visit ends it."""
    found = []
    for unit, duration in zip(path, seconds, strict=True):
        found.append([expected.index for expected in order.visit(unit, backward=False)])
        clock.now += duration
    order.visit(path[-1], backward=True)
    return found


def test_a_fixed_depth_is_what_it_says() -> None:
    clock, path = Clock(), units(*[0.0] * 5)
    for depth in (0, 1, 3):
        order = VisitOrder(depth, clock)
        assert walk(order, clock, path, [1.0] * 5) == [[]] * 5
        assert walk(order, clock, path, [1.0] * 5) == [list(range(i + 1, 5))[:depth] for i in range(5)]


def test_loads_that_keep_up_are_begun_one_ahead() -> None:
    clock, path = Clock(), units(*[0.5] * 5)
    order = VisitOrder(None, clock)
    walk(order, clock, path, [1.0] * 5)
    assert walk(order, clock, path, [1.0] * 5) == [[1], [2], [3], [4], []]


def test_a_long_load_behind_a_short_unit_begins_earlier() -> None:
    """As a head behind a norm: it would have only the norm's time."""
    clock, path = Clock(), units(0.5, 0.5, 0.01, 2.0)
    order, seconds = VisitOrder(None, clock), [1.0, 1.0, 0.1, 1.0]
    walk(order, clock, path, seconds)
    # Unit 3 takes 2 s to load: begun at unit 1, it has 1.1 s; at unit 0, 2.1 s. Unit 2 on the way is needed first.
    assert walk(order, clock, path, seconds) == [[1], [2, 3], [3], []]
    path[2].load_seconds = 1.5
    assert walk(order, clock, path, seconds) == [[1, 2, 3], [2, 3], [3], []]


def test_slow_loads_are_begun_many_ahead_but_not_all() -> None:
    clock, path = Clock(), units(*[100.0] * 9)
    order = VisitOrder(None, clock)
    walk(order, clock, path, [1.0] * 9)
    assert walk(order, clock, path, [1.0] * 9)[0] == list(range(1, 1 + MOST))


def test_micro_batches_at_one_unit_count_together() -> None:
    clock, path = Clock(), units(0.0, 0.0, 2.5, 2.5)
    order = VisitOrder(None, clock)
    for _ in range(2):
        for unit in path:
            for _ in range(3):
                expected = [following.index for following in order.visit(unit, backward=False)]
                clock.now += 1.0
            if unit is path[0]:
                at_first = expected
        order.visit(path[-1], backward=True)
    assert at_first == [1]


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_depths_change_no_bit(device: str, swap_folder: Path) -> None:
    found = []
    for depth in ("auto", 0, 2, 5):
        with running(decoder(), placed(device, "nvme", prefetch=depth, delay=1e-3), swap_folder) as engine:
            losses = [engine.train_batch(labelled(2, step)).loss for step in range(3)]
            assert all(unit.load_seconds > 0 for unit in engine._residency.units if unit.load_bytes)
            found.append((losses, states_of(engine)))
    for losses, states in found[1:]:
        assert losses == found[0][0]
        assert_states_equal(states, found[0][1])
