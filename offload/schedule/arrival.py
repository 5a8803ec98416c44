"""How the weights of a unit whose update is pending come to the device, see [Note: delivery] in updates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from offload.planes import Completion, Loader
from offload.schedule.updates import Stage, UnitUpdate, Updates, uncovered

if TYPE_CHECKING:
    from offload.residency import ResidentFlat, Unit


class Delivery:
    """The update brings the weights that it writes; `loads` bring the others."""

    def __init__(self, updates: Updates, update: UnitUpdate, loader: Loader, loads: Sequence[Completion]) -> None:
        self._updates, self._update, self._loader, self._loads = updates, update, loader, loads

    def wait(self, timeout: float | None = None) -> None:
        self._update.wait(timeout)
        for load in self._loads:
            self._loader.settle(load)

    def withdraw(self) -> list[Completion]:
        """Nobody wants the weights any more; returns what still has to end before their buffer may be reused."""
        under_way = list(self._loads)
        if not self._updates.withdraw(self._update):
            under_way.append(self._update)
        return under_way


class Later:
    """A load that can only begin when the plane is at rest again; whoever waits for it begins it."""

    def __init__(self, loader: Loader, flat: ResidentFlat, buffer: Tensor, update: Completion | None) -> None:
        self._loader, self._flat, self._buffer, self._update = loader, flat, buffer, update

    def wait(self, timeout: float | None = None) -> None:
        if self._update is not None:
            self._update.wait(timeout)
        self._flat.wait_written()
        self._loader.settle(self._loader.load(self._flat.plane, self._buffer))

    def withdraw(self) -> list[Completion]:
        return []


def under_way(completion: Completion) -> list[Completion]:
    """What has to end before the buffer of an abandoned load may be reused."""
    if isinstance(completion, UnitUpdate):  # of a plane that compute uses where it rests
        return []
    return completion.withdraw() if isinstance(completion, (Delivery, Later)) else [completion]


def ready_to_load(updates: Updates | None, unit: Unit) -> bool:
    """Whether loading the unit could begin now, without waiting for an update or for its writes."""
    update = None if updates is None else updates.pending(unit.index)
    if update is not None:
        return update.stage is Stage.WAITING
    return not any(flat.writing or flat.replicating is not None for flat in unit.flats)


def begin_loads(updates: Updates | None, unit: Unit, loader: Loader) -> None:
    """Begins to fill the buffers of the unit's flats; sets their completions."""
    update = None if updates is None else updates.pending(unit.index)
    delivered = False
    if updates is not None and update is not None:
        device = loader.device
        targets = {
            index: (flat.buffer, None if device.aliases_host else device.record())
            for index, flat in enumerate(unit.flats)
            if flat.buffer is not None and index in update.ranges and flat.replicating is None
        }
        delivered = bool(targets) and updates.deliver(update, targets)
    for index, flat in enumerate(unit.flats):
        if flat.kept is not None and flat.buffer is not None:  # the gather brings this rank's part too
            flat.completion = None
            continue
        concerned = update if update is not None and index in update.ranges else None
        if flat.replicating is not None:  # comes after the update
            exchanged = flat.replicating
            flat.completion = exchanged if flat.buffer is None else Later(loader, flat, flat.buffer, exchanged)
        elif flat.buffer is None:
            flat.completion = concerned
        elif concerned is None:
            flat.completion = (
                Later(loader, flat, flat.buffer, None) if flat.writing else loader.load(flat.plane, flat.buffer)
            )
        elif not delivered or updates is None:
            flat.completion = Later(loader, flat, flat.buffer, concerned)
        else:
            others = uncovered(concerned.ranges[index], flat.plane.base, flat.plane.end)
            loads = [loader.load(flat.plane, flat.buffer, lo, hi) for lo, hi in others]
            flat.completion = Delivery(updates, concerned, loader, loads)
