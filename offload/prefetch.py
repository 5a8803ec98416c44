"""The order in which units were visited, a hint for what to load next. A wrong hint costs time, never correctness."""

from __future__ import annotations

from offload.residency import Unit


class VisitOrder:
    """Remembers, for forward and backward apart, which unit followed which the last time; predicts the next `depth`
    units.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._next: tuple[dict[int, Unit], dict[int, Unit]] = ({}, {})
        self._last: Unit | None = None
        self._last_backward = False

    def visit(self, unit: Unit, *, backward: bool) -> list[Unit]:
        """Records a visit and returns the units expected next, nearest first."""
        last = self._last
        if last is not None and last is not unit and self._last_backward == backward:
            self._next[backward][last.index] = unit
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
