"""Where a pass turns round, nothing is loaded anew: units whose backward follows their forward stay on the device.

The unit that a forward ends with (a language model's head, as a rule among the largest) is the first of the backward.
Without this it would be given up in between and, where it rests in a swap file, waited for. Which unit that is, the
order of the last passes says; a wrong guess costs room until something else is visited, or needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from offload.prefetch import VisitOrder
    from offload.residency import Residency, Unit


class Turning:
    """The units that stay after their forward. All methods are called by who computes."""

    def __init__(self, residency: Residency, order: VisitOrder) -> None:
        self._residency, self._order = residency, order
        self._staying: list[Unit] = []

    def leave(self, units: Sequence[Unit]) -> bool:
        """Whether `units`, whose forward is about to end, are to stay (be released `again`) for their backward."""
        if torch._C._current_graph_task_id() != -1 or not self._order.leave(units[0]):
            return False
        self._staying = [unit for unit in units if unit.load_bytes]
        return bool(self._staying)

    def visit(self, unit: Unit) -> None:
        """`unit` is about to be computed: what was to be next and is not has stayed in vain."""
        if self._staying and all(unit is not other for other in self._staying):
            self._residency.let_go(self._staying)
            self._staying = []

    def give_way(self, unit: Unit | None) -> bool:
        """Gives up a unit, other than `unit`, that nobody uses yet; False if there is none."""
        return any(other is not unit and self._residency.let_go([other]) for other in self._staying)
