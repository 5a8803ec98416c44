"""Handing the device to something else for a while, such as a rollout engine, and taking it back.

Every plane that rests on the device goes to the host, or to nvme where the host's budget has no room, and its
parameters become stubs. Room for all of them is taken before anything moves, so that a refusal changes nothing. Until
they are back, whatever needs the weights or the states is refused.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from offload.build import move_buffers
from offload.gradients import FlatGradients
from offload.held import make_stub
from offload.inspection import StateAccess
from offload.planes import Carver, Plane
from offload.residency import ResidentFlat, Unit
from offload.results import HandoverReport
from offload.state import FlatState
from offload.tiers import Tier, TierMemory
from swap.errors import BudgetError
from swap.geometry import PAGE, align_up


@dataclass(slots=True, kw_only=True, eq=False)
class _Parked:
    """A plane of the device and the one that stands in for it elsewhere."""

    plane: Plane
    refuge: Plane
    chunk: int
    resident: ResidentFlat | None

    @property
    def nbytes(self) -> int:
        return self.plane.nbytes(self.plane.base, self.plane.end)


class Handover:
    """What an engine has taken off the device. The caller makes sure that nobody uses any unit."""

    def __init__(self, memory: TierMemory) -> None:
        self.memory = memory
        self._parked: list[_Parked] = []

    def leave(self, units: list[Unit], states: dict[tuple[int, int], FlatState]) -> HandoverReport:
        """Takes everything off the device.

        Raises:
            BudgetError: neither host nor nvme has room; nothing has changed then.
        """
        before = self.memory.budget.used("device")
        parked: list[_Parked] = []
        try:
            for plane, chunk, resident in _device_planes(units, states):
                parked.append(_Parked(plane=plane, refuge=self._refuge(plane), chunk=chunk, resident=resident))
        except BaseException:
            for item in parked:
                item.refuge.free()
            raise
        for item in parked:
            self._move(item.plane, item.refuge, item.chunk)
        self._parked = parked
        for item in parked:
            if item.resident is not None:
                _show_stubs(item.resident, self.memory.device.torch_device)
            item.plane.tensor = None
        self._return_memory()
        return self._report(parked, before - self.memory.budget.used("device"))

    def come_back(self) -> HandoverReport:
        """Brings everything back. After an error it can be tried again.

        Raises:
            BudgetError, DeviceOutOfMemory: the device has no room (any more).
        """
        done: list[_Parked] = []
        before = self.memory.budget.used("device")
        while self._parked:
            item = self._parked[0]
            plane = item.plane
            tensor = self.memory.on_device(
                plane.entries(plane.base, plane.end), plane.spec.dtype, plane.kind, plane.what
            )
            plane.tensor = tensor
            try:
                self._move(item.refuge, plane, item.chunk)
            except BaseException:
                plane.tensor = None
                raise
            if item.resident is not None:
                _show_weights(item.resident)
            done.append(self._parked.pop(0))
            item.refuge.free()
        self.memory.trim()
        return self._report(done, self.memory.budget.used("device") - before)

    def _refuge(self, plane: Plane) -> Plane:
        def at(tier: Tier) -> Plane:
            what = f"{plane.what}, off the device"
            return Plane(
                self.memory, plane.spec, plane.end, tier, kind=plane.kind, what=what, zero=False, base=plane.base
            )

        try:
            return at(Tier.HOST)
        except BudgetError:
            store = self.memory.store
            if store is None:
                raise
            room = align_up(plane.nbytes(plane.base, plane.end), PAGE)
            try:
                return at(Tier.NVME)
            except BudgetError:  # what the files were promised is taken
                store.grow(room)
                return at(Tier.NVME)

    def _move(self, source: Plane, target: Plane, chunk: int) -> None:
        """Copies a plane between the device and elsewhere, chunk by chunk where that is nvme."""
        if target.tier is Tier.HOST:
            source.read(source.base, source.end, target.view(target.base, target.end))
            return
        if source.tier is Tier.HOST:
            target.write(target.base, target.end, source.view(source.base, source.end))
            return
        for lo in range(source.base, source.end, chunk):
            hi = min(lo + chunk, source.end)
            slot = self.memory.slot()
            try:
                piece = Carver(slot).take(source.entries(lo, hi), source.spec.dtype)
                source.read(lo, hi, piece)
                target.write(lo, hi, piece)
            finally:
                slot.release()

    def _return_memory(self) -> None:
        if self.memory.device.kind == "cuda":
            torch.cuda.empty_cache()

    @staticmethod
    def _report(parked: list[_Parked], device: int) -> HandoverReport:
        elsewhere = {tier: sum(p.nbytes for p in parked if p.refuge.tier is tier) for tier in (Tier.HOST, Tier.NVME)}
        return HandoverReport(device=device, host=elsewhere[Tier.HOST], nvme=elsewhere[Tier.NVME])


class HandingOver(StateAccess):
    """The part of an engine that hands the device over."""

    module: nn.Module
    _handover: Handover

    @property
    @abstractmethod
    def _away(self) -> bool:
        """Whether the device is handed over."""

    @abstractmethod
    def _set_away(self, away: bool) -> None:
        """Makes `_away` so."""

    @abstractmethod
    def _require_rest(self, action: str) -> None:
        """Raises if a unit is in use."""

    @abstractmethod
    def synchronize(self) -> None:
        """Carries out pending updates."""

    def offload_states(self) -> HandoverReport:
        """Takes everything of the engine off the device (weights, states, gradients, buffers), to the host or, where
        that has no room, to nvme: something else can have the device. Until `reload_states` every use is an error.

        Raises:
            OffloadError: a forward, a backward or gathered() is under way.
            BudgetError: there is no room elsewhere; nothing has changed then.
        """
        if self._away:
            return HandoverReport(device=0, host=0, nvme=0)
        self._check("offload_states was called")
        self._refuse_on_ranks("offload_states")
        self._require_rest("offload_states")
        self.synchronize()
        with self._lock, self._residency.lock:
            self._gradient_queue.drain()
            self._residency.drop_prefetched()
            self._residency.settle()
            report = self._handover.leave(self._residency.units, self._states)
            self._residency.away = True
            move_buffers(self.module, torch.device("cpu"))
            self._set_away(True)
        return report

    def reload_states(self) -> HandoverReport:
        """Brings back what `offload_states` took off the device. After an error it can be called again.

        Raises:
            BudgetError, DeviceOutOfMemory: the device has no room.
        """
        if not self._away:
            self._check("reload_states was called")
            return HandoverReport(device=0, host=0, nvme=0)
        with self._lock, self._residency.lock:
            report = self._handover.come_back()
            move_buffers(self.module, self._memory.device.torch_device)
            self._residency.away = False
            self._set_away(False)
        return report


def _device_planes(
    units: list[Unit], states: dict[tuple[int, int], FlatState]
) -> Iterator[tuple[Plane, int, ResidentFlat | None]]:
    """The planes on the device, the elements to move at a time, and for weights the flat that shows them."""
    for (unit, index), state in states.items():
        resident = units[unit].flats[index]
        planes: list[tuple[Plane, ResidentFlat | None]] = [(state.weight, resident)]
        planes += [(plane, None) for plane in state.planes.values()]
        if state.gradients is not None:
            planes += [(plane, None) for plane in _gradient_planes(state.gradients)]
        for plane, shown in planes:
            if plane.tier is Tier.DEVICE and plane.tensor is not None:
                yield plane, state.chunk, shown


def _gradient_planes(gradients: FlatGradients) -> list[Plane]:
    gradients.settle_all()
    return gradients.planes()


def _show_stubs(flat: ResidentFlat, device: torch.device) -> None:
    _each(flat, lambda shape, _lo, _hi: make_stub(shape, flat.flat.dtype, device))


def _show_weights(flat: ResidentFlat) -> None:
    tensor = flat.plane.tensor
    assert tensor is not None
    _each(flat, lambda shape, lo, hi: tensor[lo:hi].view(shape))


def _each(flat: ResidentFlat, data: Callable[[tuple[int, ...], int, int], torch.Tensor]) -> None:
    with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(False), torch.no_grad():
        for record in flat.records:
            record.parameter.data = data(record.slot.shape, record.slot.offset, record.slot.end)
