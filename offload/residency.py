"""Which units are resident on the device, who holds a lease on them, and how their parameters see it.

A unit is RESTING (its parameters are stubs), LOADING (a buffer is being filled) or RESIDENT (its parameters are views
of the buffer). A lease is a right to the RESIDENT state, held under the name of a holder (any object); when the last
one is given up the unit is RESTING again. Holders note a unit before they ask for it and may give it up twice, so an
interrupt at any point leaves nothing that cannot be cleared up. A buffer is dropped, never freed: its bytes come back
when the last view of it dies, because users and autograd may keep views; one that nobody keeps a view of may serve the
next load (`buffers`). Flats whose weight plane can be computed on where it rests (on the device, or on the host where
the device is the CPU) are never loaded.

Parameters are plain only while a holder has the unit open; for the other leases (those of a backward) they are as at
rest, so that whatever uses them outside a forward goes through `OffloadedParameter`.
"""

from __future__ import annotations

import contextlib
import enum
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from offload.adoption import orphan
from offload.buffers import Buffers, Layout, Loaded
from offload.errors import OffloadError
from offload.layout import Flat, contiguous_strides
from offload.parameters import OffloadedParameter, ParameterRecord
from offload.planes import Completion, Loader, Plane
from offload.schedule.arrival import begin_loads, ready_to_load, under_way
from offload.schedule.updates import Updates
from offload.state import FlatState
from offload.telemetry.trace import WAIT
from offload.tiers import Tier, TierMemory
from swap.devices import DeviceOutOfMemory
from swap.errors import BudgetError
from swap.tickets import Ticket

if TYPE_CHECKING:
    from offload.parallel.gather import Gathering
    from offload.parallel.kept import KeptShard

_KEPT = "what is kept for a backward"
"""The holder of a lease that only saves another load or gather."""
_NO_CONTEXT = contextlib.nullcontext()
_NOTHING = 1e-4  # seconds that a wait for what is there already may take


class Phase(enum.Enum):
    """Life cycle of a unit's weights."""

    RESTING = "resting"
    LOADING = "loading"
    RESIDENT = "resident"


_TRANSITIONS = {
    (Phase.RESTING, Phase.LOADING),
    (Phase.LOADING, Phase.RESIDENT),
    (Phase.LOADING, Phase.RESTING),
    (Phase.RESIDENT, Phase.RESTING),
}


@dataclass(slots=True, eq=False)
class ResidentFlat:
    """The weights of one flat: where they rest, and the buffer that holds them while the unit is resident."""

    flat: Flat
    plane: Plane
    records: list[ParameterRecord]
    state: FlatState | None = None
    loaded: Loaded | None = None
    completion: Completion | None = None
    kept: KeptShard | None = None
    """What stays of gathered weights between a forward and its backward."""
    _laid_out: tuple[Flat, list[ParameterRecord], Layout] | None = None

    @property
    def buffer(self) -> Tensor | None:
        """The buffer that holds the weights of a unit that is loaded."""
        return None if self.loaded is None else self.loaded.tensor

    def layout(self, buffers: Buffers) -> Layout:
        """Where the parameters lie, which is noted in their records."""
        known = self._laid_out
        if known is None or known[0] is not self.flat or known[1] is not self.records:
            for position, record in enumerate(self.records):
                record.position = position
            layout = buffers.layout(self.flat.padded, self.flat.dtype, [record.slot for record in self.records])
            known = self._laid_out = self.flat, self.records, layout
        return known[2]

    @property
    def writing(self) -> bool:
        """Whether an update of the resting plane may still be on its way to the disk."""
        return self.state is not None and self.state.writing

    @property
    def replicating(self) -> Completion | None:
        """Other ranks' parts of the resting plane are on their way; None if they are there."""
        if self.state is None or self.state.replicating is None:
            return None
        if self.state.replicating.done():
            self.state.wait_replicated()  # its error, if there was one
        return self.state.replicating

    def wait_written(self) -> None:
        if self.state is not None:
            self.state.wait_written()

    @property
    def divided(self) -> bool:
        """Whether other ranks hold parts of the weights."""
        return self.state is not None and self.state.division.divides_weights(self.flat)

    @property
    def fixed(self) -> bool:
        """Whether compute uses the resting plane itself."""
        if not self.records:
            return True  # all of its parameters have moved elsewhere
        near = self.plane.tier is Tier.DEVICE or (
            self.plane.tier is Tier.HOST and self.plane.memory.device.aliases_host
        )
        return near and not self.divided


@dataclass(slots=True, eq=False)
class Unit:
    """One unit's weights."""

    index: int
    name: str
    flats: list[ResidentFlat]
    phase: Phase = Phase.RESTING
    holders: dict[object, bool] = field(default_factory=dict)
    """Who holds a lease, and whether the parameters are open, which means plain, for that holder."""
    bound: bool = False
    """Whether the parameters are views of the buffers."""
    loads: int = 0
    load_seconds: float = 0.0
    """What loading it took the last time, as far as is known: an upper bound where nobody had to wait for it."""
    _started: float = 0.0
    expected: int = 0
    """Forwards that have used what is kept for their backwards: weights of other ranks, or of a unit that stays."""
    views: dict[int, int] = field(default_factory=dict)
    """Address of a live Storage -> index of the flat it holds."""

    def change(self, phase: Phase) -> None:
        if (self.phase, phase) not in _TRANSITIONS:
            raise OffloadError(f"unit {self.name}: no transition from {self.phase.value} to {phase.value}")
        self.phase = phase

    @property
    def leases(self) -> int:
        return len(self.holders)

    @property
    def divided(self) -> bool:
        """Whether other ranks hold parts of the weights."""
        return any(flat.divided for flat in self.flats)

    @property
    def open(self) -> bool:
        """Whether somebody may compute with the parameters directly, and write to them."""
        return True in self.holders.values()

    @property
    def records(self) -> list[ParameterRecord]:
        return [record for flat in self.flats for record in flat.records]

    @property
    def load_bytes(self) -> int:
        """Device bytes that loading the unit takes."""
        return sum(flat.flat.nbytes for flat in self.flats if not flat.fixed)


class Residency:
    """Leases on units. All methods are thread-safe; waits release the GIL and can be interrupted."""

    def __init__(self, memory: TierMemory, units: Sequence[Unit], loader: Loader, prefetch_limit: int) -> None:
        self.memory, self.units, self.loader = memory, list(units), loader
        self.prefetch_limit = prefetch_limit
        """Device bytes beyond which nothing is loaded ahead of need."""
        self.lock = threading.RLock()
        self.storages: dict[int, tuple[Unit, int]] = {}
        self._abandoned: list[Completion] = []
        self.buffers = Buffers(memory)
        spare = weakref.WeakMethod(self._spare)
        memory.spare = lambda: (found := spare()) is not None and found()
        self._loading: set[int] = set()
        self.closed = self.away = False
        self.updates: Updates | None = None
        """Updates of resting weights that are pending: a unit's is carried out before the unit is used."""
        self.on_rest: Callable[[Unit], None] | None = None
        """Called when a unit has come to rest, under the lock."""
        self.persist: Callable[[Unit, list[ParameterRecord]], None] | None = None
        """Called before a unit is closed, with the parameters that were written in place while it was open."""
        self.waiting: set[int] = set()
        """Units, by index, of which parts are to be laid out anew before they are used again."""
        self.lay_out: Callable[[Unit], None] | None = None
        """Does so."""
        self.reclaim: Callable[[Unit | None], bool] | None = None
        """Gives up a lease that somebody only has for speed, for the sake of this unit; False if there is none."""
        self.gather: Gathering | None = None
        """Fills other ranks' parts of a flat's buffer, once the flat's own load is done. What is loaded ahead or gives
        way must then not depend on this rank's timing: every rank has to gather the same units in one order.
        """

    # Leases

    def acquire(self, unit: Unit, holder: object, *, opened: bool = False) -> None:
        """Takes a lease for `holder`: on return the unit's data is readable on the device, and with `opened` its
        parameters are plain ones. A holder that has a lease keeps it.

        Raises:
            OffloadError: the engine is closed, or the device budget has no room although nothing idle is resident.
            SwapIOError: a read failed.
        """
        with self.lock:
            if self.closed:
                raise OffloadError(f"unit {unit.name}: the engine is closed")
            self._prepare(unit)
            if unit.phase is Phase.RESTING:
                self._start(unit)
            if unit.phase is Phase.LOADING:
                self.memory.spans.begin(WAIT, f"wait for the weights of {unit.name}", unit)
                try:
                    self._finish(unit)
                finally:
                    self.memory.spans.end(unit)
            if opened and not unit.bound:
                self._bind(unit)
            if opened and not unit.open:
                unit.holders[holder] = True
                _set_class(unit, nn.Parameter)
            else:
                unit.holders[holder] = opened or unit.holders.get(holder, False)

    def begin(self, unit: Unit) -> None:
        """Starts to load a unit that is about to be acquired. Raises as `acquire` does."""
        with self.lock:
            if not self.closed:
                self._prepare(unit)
                if unit.phase is Phase.RESTING and unit.load_bytes:
                    self._start(unit)

    def _prepare(self, unit: Unit) -> None:
        if self.away:
            raise OffloadError(f"unit {unit.name} is used between offload_states() and reload_states()")
        if self.waiting and unit.index in self.waiting:
            self._let_go(unit)
        if self.waiting and unit.index in self.waiting and not unit.holders and self.lay_out is not None:
            if unit.phase is Phase.LOADING:
                self._abandon(unit)
            self.lay_out(unit)

    def release(self, unit: Unit, holder: object, *, again: bool = False) -> None:
        """Gives up the lease of `holder`, if it has one; after the last one the unit rests. `again`: a backward will
        use the unit once more; it stays until `used_again`, or of a gathered one what `gather` keeps for that.

        Raises:
            SwapIOError: parameters were written in place and could not be stored; the lease is given up even so.
        """
        with self.lock:
            opened = unit.holders.get(holder)
            if opened is None:
                return
            try:
                if opened and list(unit.holders.values()).count(True) == 1:
                    self.keep_writes(unit)
            finally:
                if again:
                    self._expect(unit)
                del unit.holders[holder]
                if opened and not unit.open:
                    _set_class(unit, OffloadedParameter)
                if not unit.holders:
                    self._rest(unit)

    def _expect(self, unit: Unit) -> None:
        if self.gather is not None and (self.gather.kept is True or not unit.divided):
            return
        unit.expected += 1
        if self.gather is None or self.gather.keeps_whole:
            unit.holders[_KEPT] = False

    def used_again(self, unit: Unit, times: int = 1) -> None:
        """Backwards have used the unit: after the last that is expected, nothing is kept for them."""
        with self.lock:
            if unit.expected:
                unit.expected = max(0, unit.expected - times)
                if not unit.expected:
                    self._let_go(unit)

    def let_go(self, units: Sequence[Unit] | None = None) -> bool:
        """No backward of `units` (all by default) is to come: nothing is kept for one. Returns whether one rests now
        that did not before.
        """
        with self.lock:
            kept = [u for u in (self.units if units is None else units) if u.expected or _KEPT in u.holders]
            for unit in kept:
                self._let_go(unit)
            return any(unit.phase is Phase.RESTING for unit in kept)

    def _let_go(self, unit: Unit) -> None:
        unit.expected = 0
        self._forget_shards(unit)
        self.release(unit, _KEPT)

    def _forget_shards(self, unit: Unit) -> None:
        for flat in unit.flats:
            flat.kept = None

    def prefetch(self, unit: Unit) -> bool:
        """Starts loading a resting unit if the device budget has room for it now; never blocks, never fails."""
        with self.lock:
            if self.closed or self.away or unit.phase is not Phase.RESTING or unit.index in self.waiting:
                return False
            nbytes = unit.load_bytes
            if nbytes == 0 or self._in_use() - self.buffers.idle_bytes + nbytes > self.prefetch_limit:
                return False
            ready = ready_to_load(self.updates, unit) if self.gather is None else self.gather.fits(unit)
            if not ready:
                return False
            try:
                self._load(unit)
            except (BudgetError, DeviceOutOfMemory):
                return False
            return True

    def drop_prefetched(self) -> int:
        """Lets go of loaded or loading units that nobody leases; returns how many."""
        with self.lock:
            idle = [unit for unit in self.units if unit.phase is Phase.LOADING]
            for unit in idle:
                self._abandon(unit)
            self.buffers.drop()
            return len(idle)

    def busy_units(self) -> list[str]:
        """Names of units that somebody holds a lease on."""
        with self.lock:
            return [unit.name for unit in self.units if set(unit.holders) - {_KEPT}]

    def resident_units(self) -> list[str]:
        """Names of units that take device memory beyond what their placement says."""
        with self.lock:
            return [unit.name for unit in self.units if unit.phase is not Phase.RESTING and unit.load_bytes]

    # Loading

    def _start(self, unit: Unit) -> None:
        # Beyond what was planned, leases that are held for speed only give way; at the budget's end they must.
        nbytes = unit.load_bytes
        while nbytes and self._in_use() - self.buffers.idle_bytes + nbytes > self.prefetch_limit:
            if not self._make_room(unit):
                break
        while True:
            try:
                self._load(unit)
                return
            except (BudgetError, DeviceOutOfMemory) as error:
                if not self._make_room(unit):
                    raise OffloadError(self._no_room(unit)) from error

    def _in_use(self) -> int:
        """What counts against `prefetch_limit`; buffers of units only where all ranks have to come to the same."""
        if self.gather is None:
            return self.memory.budget.used("device")
        return sum(unit.load_bytes for unit in self.units if unit.phase is not Phase.RESTING)

    def make_room(self) -> bool:
        """Lets go of something on the device that is there for speed only; False if there is nothing."""
        with self.lock:
            return self._make_room(None)

    def _spare(self) -> bool:
        # Gradients and the like need room while buffers wait. Who asks may be waited for by who has the lock.
        if not self.lock.acquire(blocking=False):
            return False
        try:
            return self.buffers.drop()
        finally:
            self.lock.release()

    def _make_room(self, unit: Unit | None) -> bool:
        dropped = self.buffers.drop() + self.drop_prefetched()
        return self._end_abandoned() or dropped > 0 or (self.reclaim is not None and self.reclaim(unit))

    def settle(self) -> None:
        """Waits for loads that were given up: afterwards no transfer holds a buffer that nobody leases."""
        with self.lock:
            self._end_abandoned()

    def _end_abandoned(self) -> bool:
        """Waits for loads that were given up, whose buffers live until then; False if there are none."""
        pending, self._abandoned = self._abandoned, []
        for completion in pending:
            with contextlib.suppress(Exception):
                completion.wait()
        return bool(pending)

    def _load(self, unit: Unit) -> None:
        if self.gather is not None and self.gather.keeps_shards:
            self._check_shards(unit)
        try:
            with _normally():  # other threads write to the buffers too
                for flat in unit.flats:
                    if not flat.fixed:
                        flat.loaded = self.buffers.take(flat.layout(self.buffers), unit.name)
                begin_loads(self.updates, unit, self.loader)
                for flat in unit.flats:
                    if flat.divided and self.gather is not None:
                        flat.completion = self.gather.for_use(unit, flat)
        except BaseException:
            self._drop_buffers(unit)
            raise
        self._loading.add(unit.index)
        unit.change(Phase.LOADING)
        unit._started = time.monotonic()
        unit.loads += any(flat.loaded is not None for flat in unit.flats)

    def _check_shards(self, unit: Unit) -> None:
        """Shards that were kept before the weights changed are no use."""
        if any(flat.kept is not None and flat.kept.version != _version_of(flat) for flat in unit.flats):
            self._forget_shards(unit)

    def _keep_shards(self, unit: Unit) -> None:
        assert self.gather is not None
        for flat in unit.flats:
            if flat.divided and flat.kept is None and flat.buffer is not None:
                flat.kept = self.gather.keep_shard(flat, _version_of(flat))
                if flat.kept.copying is not None:
                    self._abandoned.append(flat.kept.copying)

    def _finish(self, unit: Unit) -> None:
        asked = time.monotonic()
        try:
            for flat in unit.flats:
                if flat.completion is not None:
                    self.loader.settle(flat.completion)
                    flat.completion = None
            self._check_untouched(unit)
        except BaseException:
            self._abandon(unit)
            raise
        unit.change(Phase.RESIDENT)
        self._loading.discard(unit.index)
        now = time.monotonic()
        waited = now - asked > _NOTHING
        if unit.load_bytes and (waited or unit.load_seconds == 0.0 or now - unit._started < unit.load_seconds):
            unit.load_seconds = now - unit._started
        for index, flat in enumerate(unit.flats):
            if not flat.records:
                continue
            tensor = flat.plane.tensor if flat.fixed else flat.buffer
            assert tensor is not None
            key = tensor.untyped_storage()._cdata
            self.storages[key] = (unit, index)
            unit.views[key] = index

    def _abandon(self, unit: Unit) -> None:
        # Nobody will look at the result, nor at the error. A read keeps its buffer alive until it ends; a copy engine
        # works on raw memory, so wait for it before the memory may be used for something else.
        self._abandoned = [c for c in self._abandoned if not (isinstance(c, Ticket) and c.done())]
        for flat in unit.flats:
            if flat.completion is not None:
                self._abandoned.extend(under_way(flat.completion))
        if self.memory.device.kind != "cpu":
            self._end_abandoned()
        self._drop_buffers(unit)
        unit.change(Phase.RESTING)
        self._loading.discard(unit.index)
        if not self._loading:
            self.buffers.drop()

    @staticmethod
    def _drop_buffers(unit: Unit) -> None:
        for flat in unit.flats:
            flat.loaded, flat.completion = None, None

    def _rest(self, unit: Unit) -> None:
        for key in unit.views:
            self.storages.pop(key, None)
        unit.views.clear()
        if unit.bound:
            _show_stubs(unit)
            unit.bound = False
        if unit.expected and self.gather is not None and self.gather.keeps_shards:
            self._keep_shards(unit)
        loaded = [flat.loaded for flat in unit.flats if flat.loaded is not None]
        unit.change(Phase.RESTING)
        self._drop_buffers(unit)
        # Only now, or an interrupt could leave a buffer to two units.
        if self._loading and self.gather is None:  # more units are to come
            for buffer in loaded:
                self.buffers.give_back(buffer)
        else:
            self.buffers.drop()
        if self.on_rest is not None:
            self.on_rest(unit)

    def refresh(self, unit: Unit) -> None:
        """After the resting weights changed: no copy on the device keeps the old values."""
        with self.lock:
            self._forget_shards(unit)
            if unit.phase is Phase.LOADING:
                self._abandon(unit)
            elif unit.phase is Phase.RESIDENT:
                for flat in unit.flats:
                    if flat.buffer is not None:
                        flat.completion = self.loader.load(flat.plane, flat.buffer)
                        if flat.divided and self.gather is not None:
                            flat.completion = self.gather.for_use(unit, flat)
                        self.loader.settle(flat.completion)
                        flat.completion = None

    # Parameters

    @staticmethod
    def _check_untouched(unit: Unit) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            written = _written(unit)
            for record in written:
                record.version = record.parameter._version
        if written:
            raise OffloadError(
                f"{written[0].name}: written to by a call that goes past the engine (such as set_, or through a view); "
                "the write is lost. Use gathered(modify=True) or an operation in place on the parameter itself"
            )

    @staticmethod
    def _bind(unit: Unit) -> None:
        with torch._C.DisableTorchFunctionSubclass(), _normally():
            for flat in unit.flats:
                if flat.loaded is not None:
                    for record, view in zip(flat.records, flat.loaded.show(), strict=True):
                        record.parameter.data = view
        unit.bound = True

    def see_writes(self, units: Iterable[Unit]) -> None:
        """Before resting weights are read or updated: what was written in place to open parameters is carried over.

        Raises:
            OffloadError: a resting parameter was written to past the engine, for example through an old view of it.
        """
        with self.lock:
            for unit in units:
                if unit.open:
                    self.keep_writes(unit)
                else:
                    self._check_untouched(unit)

    def keep_writes(self, unit: Unit) -> None:
        """Carries writes to a resident unit's open parameters over to the resting planes.

        Writes in place show in the autograd versions of the parameters. One whose `.data` was replaced is elsewhere in
        memory, and is brought back.

        Raises:
            OffloadError: `.data` was replaced by a tensor of another shape, dtype or device; the old value is in force.
        """
        with self.lock, torch._C.DisableTorchFunctionSubclass():
            written = _written(unit)
            replaced = [r for flat in unit.flats for r in _replaced(flat)]
            if not (written or replaced) or self.persist is None:
                return
            for record in replaced:
                self._check_replaced(unit.flats[record.flat], record)
            self.persist(unit, [*written, *(r for r in replaced if r not in written)])
            for record in replaced:
                _bring_back(unit.flats[record.flat], record, record.parameter.data)
            for record in written:
                record.version = record.parameter._version

    @staticmethod
    def _check_replaced(flat: ResidentFlat, record: ParameterRecord) -> None:
        new, old = record.parameter.data, _place(flat, record)
        if (new.shape, new.dtype, new.device) != (old.shape, old.dtype, old.device):
            _bring_back(flat, record, None)
            raise OffloadError(
                f"{record.name}: its .data was replaced by a tensor of {tuple(new.shape)}, {new.dtype}, {new.device}; "
                f"it is {tuple(old.shape)}, {old.dtype}, {old.device} and keeps its value"
            )

    def close(self) -> None:
        """Makes every parameter a stub that says that its engine is closed. Idempotent."""
        with self.lock:
            if self.closed:
                return
            self.closed = True
            self.storages.clear()
            self.buffers.drop()
            for unit in self.units:
                self._drop_buffers(unit)
                self._forget_shards(unit)
                unit.views.clear()
                unit.holders.clear()
            orphan(self.units, self.memory.device.torch_device)

    def _no_room(self, unit: Unit) -> str:
        budget = self.memory.budget
        leased = [
            f"{u.name} ({u.leases} leases, {u.load_bytes:,} bytes)" for u in self.units if u.leases and u.load_bytes
        ]
        return (
            f"unit {unit.name} needs {unit.load_bytes:,} bytes on the device, of which {budget.used('device'):,} of "
            f"{budget.limit('device') or 0:,} are in use by {', '.join(leased) or 'views that outlive their lease'}; "
            "raise memory.device or split the model into smaller units (units.wrap)"
        )


def _normally() -> contextlib.AbstractContextManager[Any]:
    """Out of inference mode, whose tensors would poison training. To enter it where that changes nothing takes long."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else _NO_CONTEXT


def _written(unit: Unit) -> list[ParameterRecord]:
    """Parameters that were written to in place."""
    return [r for flat in unit.flats for r in flat.records if r.parameter._version != r.version]


def _replaced(flat: ResidentFlat) -> list[ParameterRecord]:
    """Parameters of an open unit whose data is not where the engine put it."""
    loaded = flat.loaded
    if loaded is not None and [r.parameter.data_ptr() for r in flat.records] == loaded.addresses:
        return []
    base = flat.plane.tensor if flat.fixed else flat.buffer
    if base is None:
        return []
    start, size = base.data_ptr(), base.itemsize
    return [r for r in flat.records if r.parameter.data_ptr() != start + r.slot.offset * size and r.slot.numel]


def _place(flat: ResidentFlat, record: ParameterRecord) -> Tensor:
    """Where an open parameter's data belongs."""
    base = flat.plane.tensor if flat.fixed else flat.buffer
    assert base is not None
    slot = record.slot
    return base.as_strided(slot.shape, contiguous_strides(slot.shape), base.storage_offset() + slot.offset)


def _bring_back(flat: ResidentFlat, record: ParameterRecord, value: Tensor | None) -> None:
    """Makes an open parameter a view of its unit's memory again, with `value` if that is not there yet."""
    with torch.inference_mode(False), torch.no_grad():
        place = _place(flat, record)
        if value is not None:
            place.copy_(value)
            # Not a write as autograd counts them: what a graph has saved of the new tensor is good.
            record.replaced += 1
        record.parameter.data = place
        record.version = record.parameter._version


def _version_of(flat: ResidentFlat) -> int:
    """Grows with every change of the weights."""
    with torch._C.DisableTorchFunctionSubclass():
        return sum(record.parameter._version + record.replaced for record in flat.records)


def _show_stubs(unit: Unit) -> None:
    with torch._C.DisableTorchFunctionSubclass(), _normally():
        for flat in unit.flats:
            if not flat.fixed:
                for record in flat.records:
                    record.parameter.data = record.stub


def _set_class(unit: Unit, kind: type[nn.Parameter]) -> None:
    for flat in unit.flats:
        for record in flat.records:
            record.parameter.__class__ = kind
