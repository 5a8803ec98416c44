"""The three tiers, and memory on them: every buffer the engine makes comes from here and is charged to one budget."""

from __future__ import annotations

import enum
import threading
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from offload.errors import OffloadError
from offload.telemetry.trace import FROM_DEVICE, TO_DEVICE, WAIT, Spans
from swap.budget import Budget, Reservation
from swap.devices import Device, DeviceOutOfMemory, Event
from swap.errors import BudgetError
from swap.slabs import HostPool
from swap.staging import Slot, StagingPool
from swap.store import SwapStore

_PATIENCE = 5.0  # seconds between looks at whether a slot can still come
_IDLE_WAITS = 4


class Tier(str, enum.Enum):
    """Where a plane rests."""

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"

    def __str__(self) -> str:
        return self.value


class TierMemory:
    """Buffers on device and host, the staging pool and the swap store of one engine.

    A buffer's bytes are charged from its creation to the death of its Storage, which may come long after the engine let
    go of it, because users keep views. `close` gives up everything that nobody holds any more.
    """

    def __init__(self, *, device: Device, budget: Budget, poison: bool = False) -> None:
        self.device, self.budget = device, budget
        self.staging: StagingPool | None = None
        self.store: SwapStore | None = None
        self.spare: Callable[[], bool] | None = None
        """Lets go of device memory that waits for its next use; False if there is none. For any thread; never waits."""
        self.h2d_bytes = self.d2h_bytes = 0
        self.spans = Spans()
        self._pools: dict[str, HostPool] = {}
        self._poison = poison
        self._lock = threading.Lock()

    def _registration(self) -> dict[str, Callable[..., None] | None]:
        if self.device.kind != "cuda":
            return {}
        return {
            "register": self.device.host_register,
            "unregister": lambda ptr, _nbytes=0: self.device.host_unregister(ptr),
        }

    def open_staging(self, total_bytes: int, slot_bytes: int) -> None:
        """Makes the staging pool: `total_bytes // slot_bytes` slots, one chunk of all planes each."""
        self.staging = StagingPool(self.budget, total_bytes, slot_bytes, poison=self._poison, **self._registration())
        if self.store is not None:
            self.store.register_memory(self.staging.memory)

    def slot(self) -> Slot:
        """A free staging slot; blocks until there is one.

        Raises:
            OffloadError: none is coming, because nothing is under way that could free one.
        """
        if self.staging is None:
            raise OffloadError("the engine has no staging pool")
        idle = 0
        while True:
            self.spans.begin(WAIT, "wait for a staging slot", self)
            try:
                return self.staging.acquire(timeout=_PATIENCE)
            except TimeoutError:
                idle = idle + 1 if self.store is None or self.store.stats.in_flight == 0 else 0
            finally:
                self.spans.end(self)
            if idle == _IDLE_WAITS:
                raise OffloadError(
                    f"all {self.staging.count} staging slots are in use, but for {_PATIENCE * _IDLE_WAITS:.0f} seconds "
                    "no transfer has been under way that could free one: an interrupt lost a slot; close this engine"
                )

    def host(self, numel: int, dtype: torch.dtype, kind: str, what: str = "") -> Tensor:
        """An uninitialised 1-D host tensor of `numel` elements.

        Raises:
            BudgetError: memory.host has no room for it.
        """
        with self._lock:
            if kind not in self._pools:
                self._pools[kind] = HostPool(self.budget, "host", kind, poison=self._poison, **self._registration())
            pool = self._pools[kind]
        buffer = pool.take(numel * dtype.itemsize, what=what)
        return buffer.view(dtype)

    def on_device(self, numel: int, dtype: torch.dtype, kind: str, what: str = "") -> Tensor:
        """An uninitialised 1-D device tensor of `numel` elements.

        Raises:
            BudgetError, DeviceOutOfMemory: memory.device has no room for it.
        """
        nbytes = numel * dtype.itemsize
        try:
            buffer, reservation = self._device_bytes(nbytes, kind, what)
        except (BudgetError, DeviceOutOfMemory):
            if self.spare is None or not self.spare():
                raise
            buffer, reservation = self._device_bytes(nbytes, kind, what)
        # A Storage's Python object lives as long as the Storage itself, so this runs when the last view of it dies.
        weakref.finalize(buffer.untyped_storage(), _release, reservation)
        return buffer.view(dtype)

    def _device_bytes(self, nbytes: int, kind: str, what: str) -> tuple[Tensor, Reservation]:
        reservation = self.budget.reserve("device", kind, nbytes, what=what)
        try:
            return self.device.empty(nbytes, what=what), reservation
        except BaseException:
            reservation.release()
            raise

    def copy_in(self, dst: Tensor, src: Tensor, *, after: Sequence[Event] = ()) -> Event:
        """The device's `copy_in`, counted. The caller keeps both tensors until the event is done."""
        event = self.device.copy_in(dst, src, after=after)
        if not self.device.aliases_host:
            self.h2d_bytes += src.nbytes
            self.spans.copying(TO_DEVICE, src.nbytes, event)
        return event

    def copy_out(self, dst: Tensor, src: Tensor, *, after: Sequence[Event] = ()) -> Event:
        """The device's `copy_out`, counted. The caller keeps both tensors until the event is done."""
        event = self.device.copy_out(dst, src, after=after)
        if not self.device.aliases_host:
            self.d2h_bytes += src.nbytes
            self.spans.copying(FROM_DEVICE, src.nbytes, event)
        return event

    def trim(self) -> None:
        """Unmaps recycled host buffers that nothing uses."""
        for pool in self._pools.values():
            pool.trim()

    def close(self) -> None:
        """Stops all I/O and copies, then releases memory. Idempotent; one part's error leaves no other part open."""
        parts: list[Callable[[], None]] = []
        if self.store is not None:
            parts.append(self.store.close)
        parts.append(self.device.close)
        if self.staging is not None:
            parts.append(self.staging.close)
        parts.extend(pool.close for pool in self._pools.values())
        first: BaseException | None = None
        for part in parts:
            try:
                part()
            except BaseException as error:
                first = first or error
        if first is not None:
            raise first


def _release(reservation: Reservation) -> None:
    reservation.release()
