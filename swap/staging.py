"""A fixed ring of equal staging slots with first-come-first-served back-pressure.

Everything that moves between tiers passes through these slots, so their number bounds the memory in flight. When all
are taken, ``acquire`` waits; it never fails for want of a slot.
"""

from __future__ import annotations

from collections import deque
from queue import Empty, SimpleQueue
from types import TracebackType

import torch

from swap.budget import Budget
from swap.deferred import DeferredLock
from swap.errors import SwapError
from swap.geometry import PAGE, align_up, format_bytes
from swap.pieces import Region
from swap.slabs import HostPool, Registrar

_POISON = 0xFF
_PARTS = 64
"""Most parts of a slot that are kept for whoever has it next."""

Parts = dict[tuple[int, int, torch.dtype], Region]


class Slot:
    """A counted right to use one staging slot until ``release`` (idempotent; also on leaving ``with`` or when lost)."""

    __slots__ = ("_live", "_parts", "_pool", "_tensor", "index")

    def __init__(self, pool: StagingPool, index: int, tensor: torch.Tensor, parts: Parts) -> None:
        """``parts``: what earlier users of the same memory made of it; not for a slot that outlives its pool."""
        self._pool = pool
        self._parts = parts
        self._tensor: torch.Tensor | None = tensor
        self._live = [True]
        self.index = index

    @property
    def tensor(self) -> torch.Tensor:
        """uint8 tensor of shape ``(slot_bytes,)`` on a page boundary; SwapError after ``release``."""
        tensor = self._tensor
        if tensor is None:
            raise SwapError(f"staging slot {self.index} was read after its release")
        return tensor

    def part(self, start: int, nbytes: int, dtype: torch.dtype) -> Region:
        """The slot's bytes ``[start, start + nbytes)`` as a 1-D tensor of ``dtype``; SwapError after ``release``."""
        key = start, nbytes, dtype
        region = self._parts.get(key)
        if region is None or self._tensor is None:
            region = Region(self.tensor[start : start + nbytes].view(dtype))
            if len(self._parts) >= _PARTS:
                self._parts.clear()
            self._parts[key] = region
        return region

    def release(self) -> None:
        try:
            self._live.pop()
        except IndexError:
            return
        self._tensor = None
        self._parts = {}
        self._pool._give_back(self.index)

    def __enter__(self) -> Slot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __del__(self) -> None:
        self.release()


class StagingPool:
    """``total_bytes // slot_bytes`` slots of host memory, charged once to ``budget`` (tier "host", kind "staging").

    ValueError, naming the smallest legal ``swap.staging``, if not even one slot fits; BudgetError if the budget
    cannot hold them. Slots start on page boundaries. With ``poison`` a slot is 0xFF (NaN) when taken and returned.
    """

    def __init__(
        self,
        budget: Budget,
        total_bytes: int,
        slot_bytes: int,
        *,
        poison: bool = False,
        register: Registrar | None = None,
        unregister: Registrar | None = None,
    ) -> None:
        if slot_bytes <= 0:
            raise ValueError(f"swap.staging: a slot must have at least one byte, got {slot_bytes}")
        stride = align_up(slot_bytes, PAGE)
        count = total_bytes // stride
        if count < 1:
            raise ValueError(
                f"swap.staging is {total_bytes} bytes, less than one slot; it must be at least {stride} bytes "
                f"({format_bytes(stride)})"
            )
        self.slot_bytes = slot_bytes
        self._count = count
        self._stride = stride
        self._poison = poison
        self._memory = HostPool(budget, "host", "staging", register=register, unregister=unregister, poison=poison)
        self._region: torch.Tensor | None = self._memory.take(
            count * stride, what="swap.staging", populate=True
        )
        region = self.memory
        self._slots: list[tuple[torch.Tensor, Parts]] = [
            (region[start : start + slot_bytes], {}) for start in range(0, count * stride, stride)
        ]
        self._free: deque[int] = deque(range(count))
        self._waiters: deque[SimpleQueue[int | None]] = deque()
        self._in_use = 0
        self._in_use_peak = 0
        self._closed = False
        self._lock: DeferredLock[int] = DeferredLock(self._recycle)

    @property
    def count(self) -> int:
        """Number of slots."""
        return self._count

    @property
    def memory(self) -> torch.Tensor:
        """All slots as one uint8 tensor, for registration with whatever moves bytes. SwapError after ``close``."""
        if self._region is None:
            raise SwapError("the staging pool is closed")
        return self._region

    @property
    def in_use(self) -> int:
        """Slots held now."""
        with self._lock:
            return self._in_use

    @property
    def in_use_peak(self) -> int:
        """Largest number of slots ever held at once."""
        with self._lock:
            return self._in_use_peak

    @property
    def waiting(self) -> int:
        """Callers blocked in ``acquire`` now."""
        with self._lock:
            return len(self._waiters)

    def acquire(self, timeout: float | None = None) -> Slot:
        """The next free slot, in order of arrival. TimeoutError after ``timeout`` seconds, SwapError on ``close``."""
        with self._lock:
            self._check_open()
            if self._free and not self._waiters:
                return self._hand_out(self._free.popleft())
            # A slot is handed to a waiter directly, never put back for whoever comes by: that is the fairness.
            waiter: SimpleQueue[int | None] = SimpleQueue()
            self._waiters.append(waiter)
        try:
            index = waiter.get(timeout=timeout)
        except Empty:
            self._abandon(waiter)
            raise TimeoutError(
                f"no staging slot became free in {timeout} s ({self._count} slots of {self.slot_bytes} bytes, all in "
                "use); raise swap.staging"
            ) from None
        except BaseException:
            self._abandon(waiter)
            raise
        with self._lock:
            if index is None or self._closed:
                self._in_use -= index is not None
                raise SwapError("the staging pool was closed while waiting for a slot")
            return self._slot(index)

    def try_acquire(self) -> Slot | None:
        """A free slot, or None when all are held or promised to earlier callers. SwapError after ``close``."""
        with self._lock:
            self._check_open()
            if self._free and not self._waiters:
                return self._hand_out(self._free.popleft())
            return None

    def close(self) -> None:
        """Wake all waiters with SwapError and give the memory back once the last slot's tensor is gone. Idempotent."""
        with self._lock:
            self._closed = True
            self._free.clear()
            while self._waiters:
                self._waiters.popleft().put(None)
            self._region = None
            self._slots = []
        self._memory.close()

    def __enter__(self) -> StagingPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise SwapError("the staging pool is closed")

    def _hand_out(self, index: int) -> Slot:
        self._count_up()
        return self._slot(index)

    def _count_up(self) -> None:
        self._in_use += 1
        self._in_use_peak = max(self._in_use_peak, self._in_use)

    def _slot(self, index: int) -> Slot:
        if not self._slots:
            raise SwapError("the staging pool is closed")
        tensor, parts = self._slots[index]
        if self._poison:
            tensor.fill_(_POISON)
        return Slot(self, index, tensor, parts)

    def _give_back(self, index: int) -> None:
        region = self._region
        if self._poison and region is not None:
            region[index * self._stride : (index + 1) * self._stride].fill_(_POISON)
        self._lock.post(index)

    def _recycle(self, index: int) -> None:
        self._in_use -= 1
        if self._closed:
            return
        if self._waiters:
            self._count_up()
            self._waiters.popleft().put(index)
        else:
            self._free.append(index)

    def _abandon(self, waiter: SimpleQueue[int | None]) -> None:
        """Leave the queue; a slot that was granted meanwhile goes to the next in line."""
        with self._lock:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
                return
        try:
            index = waiter.get_nowait()
        except Empty:
            return
        if index is not None:
            self._lock.post(index)
