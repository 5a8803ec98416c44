"""Planes at rest: one component of a flat (weight, master, exp_avg, ...) on one tier, and operands: chunks of it where
a kernel runs.

A plane is addressed in elements of its flat. `PlaneSpec.group` maps them to entries, so planes whose entries serve a
group of elements need no special case. Bounds of chunks are multiples of `granule(...)`, so that in a swap file they
fall on 4 KiB pages.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from offload.errors import OffloadError
from offload.layout import BLOCK
from offload.telemetry.trace import WAIT
from offload.tiers import Tier, TierMemory
from offload.worker import Worker
from optimizer_cpu.formats import PlaneSpec
from swap.devices import Device, Event
from swap.engines.protocol import Priority
from swap.extents import Extent
from swap.geometry import PAGE
from swap.pieces import Region
from swap.staging import Slot
from swap.store import SwapStore
from swap.tickets import Ticket


class Completion(Protocol):
    """Something asynchronous: a ticket of the store, a copy's event or a future."""

    def wait(self, timeout: float | None = None) -> None: ...


class FutureCompletion:
    """A future seen as a completion."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self, timeout: float | None = None) -> None:
        self._future.result(timeout)


def granule(specs: Sequence[PlaneSpec]) -> int:
    """The smallest number of elements, a multiple of a block, at whose multiples every plane starts on a page of a swap
    file.
    """
    size = BLOCK
    for spec in specs:
        while spec.nbytes(size) % PAGE:
            size *= 2
    return size


class Plane:
    """One plane of one flat for the elements `[base, end)` (whole blocks, or to the end), at rest on `tier`.

    Device and host planes are one tensor (`tensor`); an nvme plane is an extent of the swap store.
    """

    def __init__(
        self,
        memory: TierMemory,
        spec: PlaneSpec,
        end: int,
        tier: Tier,
        *,
        kind: str,
        what: str,
        zero: bool = True,
        base: int = 0,
    ) -> None:
        self.memory, self.spec, self.base, self.end = memory, spec, base, end
        self.kind, self.what = kind, what
        self._lock = threading.Lock()
        self._begun = 0
        self._under_way: list[Ticket] = []
        self.tensor: Tensor | None = None
        self.extent: Extent | None = None
        entries = self.entries(base, end)
        if tier is Tier.NVME and not entries:
            tier = Tier.HOST  # a rank whose shares are all empty has no swap file
        self.tier = tier
        if tier is Tier.NVME:
            self.extent = self.store.allocate(entries * spec.dtype.itemsize, what, kind=kind)
        elif tier is Tier.HOST:
            self.tensor = memory.host(entries, spec.dtype, kind, what)
            if zero:
                self.tensor.zero_()
        else:
            self.tensor = memory.on_device(entries, spec.dtype, kind, what)
            if zero:
                self.tensor.zero_()

    @property
    def store(self) -> SwapStore:
        if self.memory.store is None:
            raise OffloadError(f"{self.what}: placed on nvme, but the engine has no swap store")
        return self.memory.store

    @property
    def on_host(self) -> bool:
        """Whether the CPU can address the plane where it rests."""
        return self.tensor is not None and (self.tier is Tier.HOST or self.memory.device.aliases_host)

    @property
    def staged(self) -> bool:
        """Whether a kernel on the host works on a copy of it in a staging slot."""
        return self.tier is Tier.NVME or (self.tier is Tier.DEVICE and not self.memory.device.aliases_host)

    def entries(self, lo: int, hi: int) -> int:
        """Entries that serve the elements `[lo, hi)`."""
        part = self._slice(lo, hi)
        return int(part.stop - part.start)

    def _slice(self, lo: int, hi: int) -> slice:
        return self.spec.slice_of(lo - self.base, hi - self.base)

    def nbytes(self, lo: int, hi: int) -> int:
        """Bytes of the elements `[lo, hi)`."""
        return self.entries(lo, hi) * self.spec.dtype.itemsize

    def view(self, lo: int, hi: int) -> Tensor:
        """The elements `[lo, hi)` of a device or host plane, in place."""
        assert self.tensor is not None
        return self.tensor[self._slice(lo, hi)]

    def submit_read(self, lo: int, hi: int, out: Tensor | Region) -> Ticket:
        """Starts reading `[lo, hi)` of an nvme plane into host memory; bounds are multiples of the granule (or the
        end).
        """
        assert self.extent is not None
        offset = self._slice(lo, hi).start * self.spec.dtype.itemsize
        priority = Priority.WEIGHT_READ if self.spec.name == "weight" else Priority.STATE_READ
        return self.store.read(self.extent, out, offset=offset, priority=priority)

    def submit_write(self, lo: int, hi: int, source: Tensor | Region) -> Ticket:
        """Starts writing host memory to `[lo, hi)` of an nvme plane."""
        assert self.extent is not None
        offset = self._slice(lo, hi).start * self.spec.dtype.itemsize
        with self._lock:
            self._begun += 1
            ticket = self.store.write(self.extent, source, offset=offset, priority=Priority.STATE_WRITE)
            self._under_way = [*(t for t in self._under_way if not t.done()), ticket]
        return ticket

    def mark(self) -> int | None:
        """What changes with every write to the plane's swap file, and when it is given back; None while a write is
        under way.
        """
        with self._lock:
            return self._begun if all(ticket.done() for ticket in self._under_way) else None

    def read(self, lo: int, hi: int, out: Tensor) -> None:
        """Copies `[lo, hi)` to host memory `out` and waits for it."""
        if self.tier is Tier.NVME:
            self.submit_read(lo, hi, out).wait()
        elif self.on_host:
            out.copy_(self.view(lo, hi))
        else:
            self.memory.copy_out(out, self.view(lo, hi)).wait()

    def write(self, lo: int, hi: int, source: Tensor) -> None:
        """Copies host memory `source` to `[lo, hi)` and waits for it."""
        if self.tier is Tier.NVME:
            self.submit_write(lo, hi, source).wait()
        elif self.on_host:
            self.view(lo, hi).copy_(source)
        else:
            event = self.memory.copy_in(self.view(lo, hi), source)
            event.wait()
            self.memory.device.compute_wait(event)

    def free(self) -> None:
        """Gives the memory or the extent back. Idempotent."""
        with self._lock:
            self._begun += 1
        self.tensor = None
        if self.extent is not None:
            extent, self.extent = self.extent, None
            if not self.store.closed:
                self.store.free(extent)


class Carver:
    """Hands out consecutive page-aligned pieces of one staging slot."""

    def __init__(self, slot: Slot) -> None:
        self.slot, self._next = slot, 0

    def take(self, entries: int, dtype: torch.dtype) -> Tensor:
        """A 1-D tensor of so many `entries`."""
        return self.take_region(entries, dtype).tensor

    def take_region(self, entries: int, dtype: torch.dtype) -> Region:
        """The same as the store likes it best."""
        nbytes = entries * dtype.itemsize
        start, self._next = self._next, self._next + -(-nbytes // PAGE) * PAGE
        return self.slot.part(start, nbytes, dtype)


class Operand:
    """The elements `[lo, hi)` of a plane in memory that the kernel can address: on the host, or on the device if
    `on_device`.

    Where the plane rests in that memory already, the operand is a view and nothing moves. `fetch` starts the transfer,
    `ready` waits for it, `put_back` starts the way back and returns what to wait for before the staging slot and the
    tensors may be reused.
    """

    def __init__(self, plane: Plane, lo: int, hi: int, carver: Carver, *, on_device: bool) -> None:
        self.plane, self.lo, self.hi = plane, lo, hi
        device = plane.memory.device
        self._memory = plane.memory
        self._pending: Completion | None = None
        self._staged: Tensor | None = None
        self._region: Region | None = None
        self._crosses = False  # between staging on the host and the kernel's memory on the device
        entries, dtype = plane.entries(lo, hi), plane.spec.dtype
        at_home = plane.tier is Tier.DEVICE if on_device else plane.on_host
        if at_home or (device.aliases_host and plane.tier is not Tier.NVME):
            self.tensor = plane.view(lo, hi)
            return
        if plane.tier is Tier.HOST:
            self._staged = plane.view(lo, hi)
        else:
            self._region = carver.take_region(entries, dtype)
            self._staged = self._region.tensor
        self._crosses = on_device and not device.aliases_host
        if self._crosses:
            self.tensor = plane.memory.on_device(entries, dtype, "step", f"{plane.what} in the optimizer step")
        else:
            self.tensor = self._staged

    @property
    def in_place(self) -> bool:
        """Whether the operand is the resting plane itself."""
        return self._staged is None

    @property
    def on_host(self) -> Tensor:
        """The operand in host memory: what the kernel works on or, for one on the device, its copy after `put_back`."""
        return self._staged if self._crosses and self._staged is not None else self.tensor

    def forget(self) -> None:
        """Waits for a fetch under way and ignores how it ended."""
        if self._pending is not None:
            with contextlib.suppress(Exception):
                self._pending.wait()
            self._pending = None

    def fetch(self) -> None:
        if self._staged is None:
            return
        if self.plane.tier is Tier.NVME:
            self._pending = self.plane.submit_read(self.lo, self.hi, self._region or self._staged)
        elif self.plane.tier is Tier.DEVICE:
            self._pending = self._memory.copy_out(self._staged, self.plane.view(self.lo, self.hi))

    def ready(self) -> None:
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        if self._crosses:
            assert self._staged is not None
            event = self._memory.copy_in(self.tensor, self._staged)
            event.wait()
            self._memory.device.compute_wait(event)

    def put_back(self) -> Completion | None:
        if self._staged is None:
            return None
        if self._crosses:
            self._memory.copy_out(self._staged, self.tensor).wait()
        if self.plane.tier is Tier.NVME:
            return self.plane.submit_write(self.lo, self.hi, self._region or self._staged)
        if self.plane.tier is Tier.DEVICE:
            return self._memory.copy_in(self.plane.view(self.lo, self.hi), self._staged)
        return None


class SlotQueue:
    """Staging slots for one user.

    A slot is free again as soon as its writes are done; their errors surface at the next call.
    """

    def __init__(self, memory: TierMemory) -> None:
        self._memory = memory
        self._writes: deque[Ticket] = deque()

    def acquire(self) -> Slot:
        """A free slot; blocks until there is one. Raises the error of an earlier write, if one failed."""
        self._forget_done()
        return self._memory.slot()

    def try_acquire(self) -> Slot | None:
        """A free slot if there is one now."""
        self._forget_done()
        return None if self._memory.staging is None else self._memory.staging.try_acquire()

    def give_back(self, slot: Slot, after: Sequence[Completion]) -> None:
        """Releases `slot` once everything in `after` is done. Copies to the device are waited for; writes go on."""
        tickets = [c for c in after if isinstance(c, Ticket)]
        try:
            for completion in after:
                if not isinstance(completion, Ticket):
                    completion.wait()
        finally:
            if tickets:
                together = Ticket.gather(tickets)
                self._writes.append(together)
                together.add_done_callback(lambda _ticket: slot.release())
            else:
                slot.release()

    def add_writes(self, tickets: Sequence[Ticket]) -> None:
        """Writes whose memory is not a slot's, to be waited for like the others."""
        if tickets:
            self._writes.append(Ticket.gather(tickets))

    def wait_for_other_writes(self, most: int) -> None:
        """Waits until at most `most` of the groups of writes are under way, the oldest first."""
        while len(self._writes) > most:
            self._writes[0].wait()
            self._writes.popleft()

    def _forget_done(self) -> None:
        while self._writes and self._writes[0].done():
            self._writes.popleft().wait()

    def drain(self) -> None:
        """Waits for every write; then raises the first error, if there was one."""
        first: BaseException | None = None
        if self._writes:
            self._memory.spans.begin(WAIT, "wait for writes", self)
        try:
            while self._writes:
                try:
                    self._writes[0].wait()
                except Exception as error:
                    first = first or error
                self._writes.popleft()
        finally:
            self._memory.spans.end(self)
        if first is not None:
            raise first


class Loader:
    """Moves whole weight planes to the device: directly where it can, through staging where memory is separate.

    Staged loads run on one worker thread, piece by piece, so that a plane of any size needs only one slot.
    """

    def __init__(self, memory: TierMemory) -> None:
        self._memory = memory
        self._worker = Worker("offload-loader")

    @property
    def device(self) -> Device:
        return self._memory.device

    def load(self, plane: Plane, out: Tensor, lo: int | None = None, hi: int | None = None) -> Completion:
        """Starts filling `[lo, hi)` of device tensor `out` with the same elements of `plane`, by default all it has;
        compute must `settle` the result before it reads `out`. Bounds are multiples of a block, or the end.
        """
        device = self._memory.device
        lo, hi = plane.base if lo is None else lo, plane.end if hi is None else hi
        if plane.tier is Tier.HOST:
            return self._memory.copy_in(out[lo:hi], plane.view(lo, hi))
        if plane.tier is Tier.DEVICE:  # a part of a buffer that other ranks complete
            out[lo:hi].copy_(plane.view(lo, hi))
            return device.record()
        if device.aliases_host:
            return plane.submit_read(lo, hi, out if hi - lo == out.numel() else out[lo:hi])
        # The copies run on their own stream and from another thread: they must not overtake work that still uses the
        # memory of `out`.
        allocated = device.record()
        future = self._worker.submit(partial(self._staged, plane, out, lo, hi, allocated))
        return FutureCompletion(future)

    def settle(self, completion: Completion) -> None:
        """Makes later compute see the loaded bytes."""
        if isinstance(completion, Event):
            self._memory.device.compute_wait(completion)
        else:
            completion.wait()

    def _staged(self, plane: Plane, out: Tensor, start: int, stop: int, allocated: Event) -> None:
        staging = self._memory.staging
        assert staging is not None
        size = staging.slot_bytes // (BLOCK * plane.spec.dtype.itemsize) * BLOCK
        for lo in range(start, stop, size):
            hi = min(lo + size, stop)
            with staging.acquire() as slot:
                piece = Carver(slot).take(hi - lo, plane.spec.dtype)
                plane.submit_read(lo, hi, piece).wait()
                target = out[lo:hi]
                self._memory.copy_in(target, piece, after=(allocated,)).wait()

    def close(self) -> None:
        """Joins the thread; what it had not begun fails, since staging and store are closed by now. Idempotent."""
        self._worker.close()
