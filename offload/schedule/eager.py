"""Updates during backward, within `train_batch`: a unit is updated as soon as its gradients are final.

A gradient is final when every micro-batch has contributed to it. Autograd accumulates a parameter's gradient once per
backward, except where reentrant checkpointing runs backwards of its own: their number is not known before, so a unit
that gets gradients from those is updated after the last backward, as is one of which a parameter gets none. A unit is
also left alone while somebody holds its weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from offload.errors import GradientError
from offload.parameters import ParameterRecord
from offload.residency import Phase, Unit


class EagerStep:
    """One step of `count` micro-batches. `update(unit)` decides on a unit's update, or says that it cannot yet."""

    def __init__(
        self,
        units: Mapping[int, Unit],
        expected: Iterable[ParameterRecord],
        count: int,
        update: Callable[[Unit], bool],
    ) -> None:
        """`expected`: the parameters that may get a gradient."""
        self._units, self._count, self._update = units, count, update
        self._left = Counter(record.unit for record in expected)
        """Parameters of each unit whose gradient is not final."""
        self._arrived: Counter[str] = Counter()
        self._unclear: set[int] = set()
        self.updated: set[int] = set()

    def check(self, record: ParameterRecord) -> None:
        """Before a gradient is added.

        Raises:
            GradientError: the parameter has been updated with what seemed to be all of its gradient.
        """
        if record.unit in self.updated:
            raise GradientError(
                f"{record.name}: a gradient arrived after its unit was updated during backward, because it is used "
                "both within and outside of reentrant checkpointing; set schedule.optimizer_step = 'deferred', or use "
                "checkpoint(use_reentrant=False)"
            )

    def arrived(self, record: ParameterRecord, *, nested: bool) -> None:
        """A gradient has been added; `nested`: by a backward that runs within another one."""
        if nested:
            self._unclear.add(record.unit)
        self._arrived[record.name] += 1
        if self._arrived[record.name] == self._count:
            self._left[record.unit] -= 1
        self.try_update(self._units[record.unit])

    def try_update(self, unit: Unit) -> None:
        """Updates the unit if its gradients are final and nobody uses its weights."""
        final = unit.index in self._left and self._left[unit.index] == 0
        if not final or unit.index in self._unclear or unit.index in self.updated or unit.phase is not Phase.RESTING:
            return
        if self._update(unit):
            self.updated.add(unit.index)
