"""The order in which units were visited, a hint for what to load next. A wrong hint costs time, never correctness."""

from __future__ import annotations

import time
from collections.abc import Callable

from offload.residency import Unit

MOST = 4
"""Units that are loaded ahead at a time where the depth is automatic."""


class VisitOrder:
    """Remembers, for forward and backward apart, which unit followed which the last time; predicts the next ones.

    `depth`: how many, or None for as many as time asks for: the next one, and each further one whose load takes longer
    than the time that would be left for it if it began at the next visit. Times are those of the last passes; what is
    not known is not loaded ahead. `clock` gives seconds.

    A pass ends where the direction changes or a unit comes again. Nothing is predicted beyond the end of a pass: what
    comes then, and when, is unknown, and the unit would be in memory meanwhile.
    """

    def __init__(self, depth: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.depth = depth
        self._clock = clock
        self._next: tuple[dict[int, Unit], dict[int, Unit]] = ({}, {})
        self._seconds: tuple[dict[int, float], dict[int, float]] = ({}, {})
        self._last: Unit | None = None
        self._last_backward = False
        self._begun = 0.0
        self._seen: set[int] = set()
        self._left: Unit | None = None
        self._turns: set[int] = set()

    def visit(self, unit: Unit, *, backward: bool) -> list[Unit]:
        """Records a visit and returns the units expected next, nearest first."""
        last = self._last
        if self._left is not None:
            (self._turns.add if backward and self._left is unit else self._turns.discard)(self._left.index)
            self._left = None
        if last is not unit or backward != self._last_backward:
            now = self._clock()
            if last is not None and backward == self._last_backward:
                self._note(last, backward, now - self._begun)
            self._begun = now
        if backward != self._last_backward or (unit.index in self._seen and unit is not last):
            self._seen.clear()
        elif last is not None and last is not unit:
            self._next[backward][last.index] = unit
        self._seen.add(unit.index)
        self._last, self._last_backward = unit, backward
        return self._expected(unit, backward)

    def leave(self, unit: Unit) -> bool:
        """Records that a forward of `unit` ends, and returns whether its backward is expected next: the last time
        nothing was visited in between.
        """
        self._left = unit
        return unit.index in self._turns

    def _note(self, unit: Unit, backward: bool, seconds: float) -> None:
        before = self._seconds[backward].get(unit.index, seconds)
        self._seconds[backward][unit.index] = (before + seconds) / 2

    def _expected(self, unit: Unit, backward: bool) -> list[Unit]:
        expected: list[Unit] = []
        left: float | None = 0.0  # seconds between the next visit and the one to `following`
        current = unit
        while len(expected) < (MOST if self.depth is None else self.depth):
            following = self._next[backward].get(current.index)
            if following is None or following is unit or following in expected:
                break
            if self.depth is None and expected:
                seconds = self._seconds[backward].get(current.index)
                left = None if left is None or seconds is None else left + seconds
                if left is None or following.load_seconds <= left:
                    break
            expected.append(following)
            current = following
        return expected
