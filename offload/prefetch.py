"""The order in which units were visited, a hint for what to load next. A wrong hint costs time, never correctness."""

from __future__ import annotations

from offload.residency import Unit


class VisitOrder:
    """Remembers, for forward and backward apart, which unit followed which the last time; predicts the next `depth`.

    A pass ends where the direction changes or a unit comes again. Nothing is predicted beyond the end of a pass: what
    comes then, and when, is unknown, and the unit would be in memory meanwhile.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._next: tuple[dict[int, Unit], dict[int, Unit]] = ({}, {})
        self._last: Unit | None = None
        self._last_backward = False
        self._seen: set[int] = set()

    def visit(self, unit: Unit, *, backward: bool) -> list[Unit]:
        """Records a visit and returns the units expected next, nearest first."""
        last = self._last
        if backward != self._last_backward or (unit.index in self._seen and unit is not last):
            self._seen.clear()
        elif last is not None and last is not unit:
            self._next[backward][last.index] = unit
        self._seen.add(unit.index)
        self._last, self._last_backward = unit, backward
        expected: list[Unit] = []
        current = unit
        while len(expected) < self.depth:
            following = self._next[backward].get(current.index)
            if following is None or following is unit or following in expected:
                break
            expected.append(following)
            current = following
        return expected
