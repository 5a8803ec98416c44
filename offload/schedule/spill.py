"""Tensors put away on the host or in swap files until their backward comes.

On a device with memory of its own a tensor is copied out while computation goes on; at most `_UNDER_WAY` of them are
held on the device for that. To and from swap files everything goes through staging slots, on one worker thread, in
order: a read follows the write of the same tensor, and an extent is free after both. A tensor that several units are
given is put away once, and brought back once.

What comes back has the strides that it had, and the alignment: both may decide the bits of a matrix product.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from offload.binding_recompute import Stored
from offload.errors import OffloadError
from offload.tiers import Tier, TierMemory
from offload.worker import Worker
from swap.budget import Reservation
from swap.devices import DeviceOutOfMemory, Event
from swap.engines.protocol import Priority
from swap.errors import BudgetError, SwapError
from swap.extents import Extent
from swap.geometry import PAGE

KIND = "activations"
_ALIGNMENT = 64
_SMALLEST = PAGE
"""Tensors of fewer bytes stay where they are."""
_UNDER_WAY = 2


class _Form(NamedTuple):
    """How a tensor lies in a buffer: `lead` elements, then a range of `extent` elements that holds it."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    lead: int
    extent: int

    @classmethod
    def of(cls, tensor: Tensor) -> _Form | None:
        """None for what is too small to be worth it, or lies in a range of which it is the smaller part."""
        numel, itemsize = tensor.numel(), tensor.element_size()
        if numel == 0 or tensor.is_conj() or tensor.is_neg():
            return None
        stride = tuple(tensor.stride())
        extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, stride, strict=True))
        if extent > 2 * numel or extent * itemsize < _SMALLEST:
            return None
        lead = tensor.data_ptr() % _ALIGNMENT
        return cls(tensor.shape, stride, tensor.dtype, lead // itemsize if lead % itemsize == 0 else 0, extent)

    @property
    def nbytes(self) -> int:
        return self.extent * self.dtype.itemsize

    def range_of(self, tensor: Tensor) -> Tensor:
        """The bytes of the range, as they lie."""
        value = tensor.detach()
        return value.as_strided((self.extent,), (1,), value.storage_offset()).view(torch.uint8)

    def room(self, memory: TierMemory) -> Tensor:
        """A device buffer for the range: uint8, `nbytes` after the lead. Raises as `TierMemory.on_device`."""
        lead = self.lead * self.dtype.itemsize
        return memory.on_device(lead + self.nbytes, torch.uint8, KIND, "inputs of a unit")[lead:]

    def view(self, filled: Tensor) -> Tensor:
        """The tensor in a filled buffer."""
        return filled.view(self.dtype).as_strided(self.shape, self.stride, self.lead)


class _Charged:
    """On a device that is host memory a tensor stays where it is, and counts as host memory."""

    def __init__(self, kept: Stored, reservation: Reservation) -> None:
        self._kept = kept
        weakref.finalize(self, reservation.release).atexit = False

    def prefetch(self) -> None:
        return None

    def bring(self) -> Tensor:
        return self._kept.bring()


class _Away:
    """One tensor on another tier. `shared`: several units are given it, so it stays when it has come back."""

    def __init__(self, spill: Spill, form: _Form) -> None:
        self.shared = False
        self._spill, self._form = spill, form
        self._filled: Tensor | None = None

    def prefetch(self) -> None:
        if self._filled is None and self._spill.has_room(self._form.nbytes):
            with contextlib.suppress(BudgetError, DeviceOutOfMemory):
                self._begin()

    def bring(self) -> Tensor:
        while self._filled is None:
            try:
                self._begin()
            except (BudgetError, DeviceOutOfMemory) as error:
                if not self._spill.make_room():
                    raise OffloadError(
                        f"no room on the device to bring {self._form.nbytes:,} bytes of activations back ({error}); "
                        "raise memory.device, or use smaller micro-batches"
                    ) from error
        self._settle()
        found = self._form.view(self._filled)
        if not self.shared:
            self._filled = None
        return found.detach()

    def _begin(self) -> None:
        """Allocates `_filled` and begins to fill it."""
        raise NotImplementedError

    def _settle(self) -> None:
        """Makes compute see what was filled."""
        raise NotImplementedError


class _OnHost(_Away):
    """In host memory, beside a device with memory of its own."""

    def __init__(self, spill: Spill, form: _Form, tensor: Tensor) -> None:
        super().__init__(spill, form)
        memory = spill.memory
        self._source: Tensor | None = form.range_of(tensor)
        self._host = memory.host(form.nbytes, torch.uint8, KIND, "inputs of a unit")
        self._out = memory.copy_out(self._host, self._source)
        self._in: Event | None = None

    def sent(self, *, wait: bool) -> bool:
        """Whether the device's copy can be let go, and does so."""
        if wait:
            self._out.wait()
        if self._out.done():
            self._source = None
        return self._source is None

    def _begin(self) -> None:
        filled = self._form.room(self._spill.memory)
        self._in = self._spill.memory.copy_in(filled, self._host, after=(self._out,))
        self._filled = filled

    def _settle(self) -> None:
        if self._in is not None:
            self._spill.memory.device.compute_wait(self._in)
            self._in.wait()
            self._in = None
            self._source = None


class _InSwap(_Away):
    """In an extent of the swap store."""

    def __init__(self, spill: Spill, form: _Form, tensor: Tensor) -> None:
        super().__init__(spill, form)
        store = spill.memory.store
        if store is None:
            raise OffloadError("placement.activations = 'nvme', but the engine has no swap store")
        self._extent = store.allocate(form.nbytes, "inputs of a unit", kind=KIND)
        weakref.finalize(self, spill.free, self._extent).atexit = False
        # The worker must not copy before what computes the tensor has run.
        task = partial(_write, spill.memory, self._extent, form.range_of(tensor), spill.memory.device.record())
        self._written = spill.submit(task)
        self._read: Future[None] | None = None

    def sent(self, *, wait: bool) -> bool:
        if wait:
            self._written.result()
        return self._written.done()

    def _begin(self) -> None:
        filled = self._form.room(self._spill.memory)
        allocated = self._spill.memory.device.record()
        self._read = self._spill.submit(partial(_read, self._spill.memory, self._extent, filled, allocated))
        self._filled = filled

    def _settle(self) -> None:
        if self._read is not None:
            read, self._read = self._read, None
            try:
                self._written.result()
                read.result()
            except BaseException:
                self._filled = None
                raise


class Spill:
    """Puts tensors away on `tier`, host or nvme. `planned`: device bytes that weights may need.

    `make_room` lets go of something on the device that is only there for speed; False if there is nothing.
    """

    def __init__(
        self,
        memory: TierMemory,
        tier: Tier,
        *,
        planned: int,
        make_room: Callable[[], bool],
        keep: Callable[[Tensor], Stored],
    ) -> None:
        self.memory, self.make_room = memory, make_room
        self._tier, self._planned, self._keep = tier, planned, keep
        self._known: dict[int, tuple[weakref.ref[Tensor], int, weakref.ref[_Away]]] = {}
        self._charged: dict[int, tuple[weakref.ref[Tensor], int, weakref.ref[_Charged]]] = {}
        self._sending: deque[weakref.ref[_OnHost | _InSwap]] = deque()
        self._worker = Worker("offload-spill")
        self._closed = False
        self._lock = threading.Lock()
        self.puts = 0
        """Tensors put away so far."""

    def put(self, tensor: Tensor) -> Stored:
        """Puts a tensor away; it may be dropped at once.

        Raises:
            BudgetError: memory.host or memory.nvme has no room for it.
        """
        form = _Form.of(tensor)
        if form is None:
            return self._keep(tensor)
        if self._tier is Tier.HOST and self.memory.device.aliases_host:
            return self._charge(tensor, form)
        with self._lock:
            known = self._known.get(id(tensor))
            if known is not None:
                reference, version, stored = known
                found = stored()
                if reference() is tensor and version == tensor._version and found is not None:
                    found.shared = True
                    return found
            self._drain(_UNDER_WAY - 1)
            away: _OnHost | _InSwap = (_OnHost if self._tier is Tier.HOST else _InSwap)(self, form, tensor)
            self.puts += 1
            self._sending.append(weakref.ref(away))
            key = id(tensor)
            self._known[key] = (weakref.ref(tensor), tensor._version, weakref.ref(away))
            weakref.finalize(away, self._known.pop, key, None).atexit = False
            return away

    def _charge(self, tensor: Tensor, form: _Form) -> Stored:
        with self._lock:
            known = self._charged.get(id(tensor))
            if known is not None:
                reference, version, stored = known
                found = stored()
                if reference() is tensor and version == tensor._version and found is not None:
                    return found
            reservation = self.memory.budget.reserve("host", KIND, form.nbytes, what="inputs of a unit")
            charged = _Charged(self._keep(tensor), reservation)
            self.puts += 1
            self._charged[id(tensor)] = (weakref.ref(tensor), tensor._version, weakref.ref(charged))
            weakref.finalize(charged, self._charged.pop, id(tensor), None).atexit = False
            return charged

    def _drain(self, most: int) -> None:
        """Waits until at most `most` tensors are on their way out."""
        still: deque[weakref.ref[_OnHost | _InSwap]] = deque()
        for reference in self._sending:
            sending = reference()
            if sending is not None and not sending.sent(wait=False):
                still.append(reference)
        while len(still) > most:
            oldest = still.popleft()()
            if oldest is not None:
                oldest.sent(wait=True)
        self._sending = still

    def has_room(self, nbytes: int) -> bool:
        """Whether the device could take `nbytes` ahead of need without touching what weights may need."""
        limit = self.memory.budget.limit("device")
        return limit is None or self.memory.budget.used_by_kind("device").get(KIND, 0) + nbytes <= limit - self._planned

    # The worker

    def submit(self, task: Callable[[], None]) -> Future[None]:
        """Runs `task` on the worker, after everything submitted before."""
        if self._closed:
            raise OffloadError("the engine is closed: activations that it had put away are gone")
        return self._worker.submit(task)

    def free(self, extent: Extent) -> None:
        """Gives an extent back once its transfers have ended. For finalizers too."""
        self._worker.post(partial(_free, self.memory, extent))

    def settle(self) -> None:
        """Waits until everything that was asked for is done."""
        if self._worker.started:
            self.submit(lambda: None).result()

    def close(self) -> None:
        """Joins the worker; what it had not begun fails. Idempotent."""
        self._closed = True
        self._worker.close()


def _pieces(memory: TierMemory, nbytes: int) -> range:
    assert memory.staging is not None
    return range(0, nbytes, max(PAGE, memory.staging.slot_bytes // PAGE * PAGE))


def _write(memory: TierMemory, extent: Extent, source: Tensor, computed: Event) -> None:
    assert memory.store is not None
    tickets = []
    pieces = _pieces(memory, source.numel())
    for lo in pieces:
        part = source[lo : lo + pieces.step]
        slot = memory.slot()
        try:
            staged = slot.tensor[: part.numel()]
            if memory.device.aliases_host:
                staged.copy_(part)
            else:
                memory.copy_out(staged, part, after=(computed,)).wait()
            ticket = memory.store.write(extent, staged, offset=lo, priority=Priority.SPILL)
        except BaseException:
            slot.release()
            raise
        ticket.add_done_callback(lambda _ticket, slot=slot: slot.release())  # type: ignore[misc]
        tickets.append(ticket)
    for ticket in tickets:
        ticket.wait()


def _read(memory: TierMemory, extent: Extent, filled: Tensor, allocated: Event) -> None:
    assert memory.store is not None
    if memory.device.aliases_host:
        memory.store.read(extent, filled, priority=Priority.WEIGHT_READ).wait()
        return
    pieces = _pieces(memory, filled.numel())
    for lo in pieces:
        part = filled[lo : lo + pieces.step]
        with memory.slot() as slot:
            staged = slot.tensor[: part.numel()]
            memory.store.read(extent, staged, offset=lo, priority=Priority.WEIGHT_READ).wait()
            memory.copy_in(part, staged, after=(allocated,)).wait()


def _free(memory: TierMemory, extent: Extent) -> None:
    if memory.store is not None and not memory.store.closed:
        with contextlib.suppress(SwapError):
            memory.store.free(extent)
