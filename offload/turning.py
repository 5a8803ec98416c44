"""Where a pass turns round, nothing is loaded anew: units whose backward follows their forward stay on the device.

The unit that a forward ends with (a language model's head, as a rule among the largest) is the first of the backward.
Without this it would be given up in between and, where it rests in a swap file, waited for. Which unit that is, the
order of the last passes says; a wrong guess costs room until something else is visited or needs it, the step ends, or
the graph is gone.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from offload.binding_uses import Use
    from offload.prefetch import VisitOrder
    from offload.residency import Residency, Unit


class Turning:
    """The units that stay after their forward. All methods are called by who computes."""

    def __init__(self, residency: Residency, order: VisitOrder) -> None:
        self._residency, self._order = residency, order
        self._staying: list[Unit] = []
        self._graph: weakref.ref[Use] | None = None
        this = weakref.ref(self)

        def gone(graph: weakref.ref[Use]) -> None:
            turning = this()
            if turning is not None and turning._graph is graph:
                turning._forget()

        self._gone = gone

    def leave(self, use: Use) -> bool:
        """Whether the units of `use`, whose forward is about to end, are to stay for their backward: be released
        `again`.
        """
        if torch._C._current_graph_task_id() != -1 or not self._order.leave(use.units[0]):
            return False
        if not any(unit.load_bytes for unit in use.units):
            return False
        self._staying, self._graph = list(use.units), weakref.ref(use, self._gone)
        return True

    def visit(self, unit: Unit) -> None:
        """`unit` is about to be computed: what was to be next and is not has stayed in vain."""
        if self._staying and all(unit is not other for other in self._staying):
            self._residency.let_go(self._staying)
            self._staying, self._graph = [], None

    def give_way(self, unit: Unit | None) -> bool:
        """Gives up a unit, other than `unit`, that nobody uses yet; False if there is none."""
        idle = [other for other in self._staying if other is not unit and other.load_bytes]
        return any(self._residency.let_go([other]) for other in idle)

    def _forget(self) -> None:
        """The graph is gone, at any point of any thread: who has the lock may wait for this one, or be this one in the
        middle of something. The units then go at the next occasion.
        """
        lock = self._residency.lock
        if not lock._is_owned() and lock.acquire(blocking=False):  # type: ignore[attr-defined]
            try:
                self._residency.let_go(self._staying)
                self._staying, self._graph = [], None
            finally:
                lock.release()
