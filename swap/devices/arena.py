"""Exact, page-aligned buffers in host memory, one Storage each, recycled through free lists of equal size.

A buffer is an anonymous private mapping. It comes back when its Storage dies, which may be long after its owner let go
of it (a view in a saved graph) and may happen in any thread at any point where Python collects garbage: also inside
this file, with the lock held. So the finalizer takes no lock; it poisons, appends to a deque and is done, and the next
call sorts the returned buffers in.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .protocol import DeviceOutOfMemory, check_size

POISON = 0xFF  # every float format reads a run of 0xFF bytes as NaN, every signed integer as -1


class _Block(NamedTuple):
    mapping: mmap.mmap
    address: int
    size: int  # bytes, whole pages


def _round_up(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


class HostArena:
    """Buffers within ``capacity`` bytes, the recycled ones included; without a capacity, within the peak of live bytes.

    With ``poison`` a buffer holds 0xFF bytes when it is handed out and again from the moment it dies. ``can_unmap``
    says whether raw addresses of dead buffers may still be in use; while it returns False they stay mapped.
    """

    def __init__(
        self, kind: str, capacity: int | None, *, poison: bool = False, can_unmap: Callable[[], bool] | None = None
    ) -> None:
        if capacity is not None and capacity < 0:
            raise ValueError(f"the capacity of the {kind} device must not be negative, got {capacity} bytes")
        self._kind = kind
        self._capacity = capacity
        self._poison = poison
        self._can_unmap = can_unmap
        self._lock = threading.Lock()
        self._returned: deque[_Block] = deque()
        self._cached: dict[int, list[_Block]] = {}
        self._retired: list[_Block] = []
        self._live: dict[int, int] = {}  # address -> size
        self._live_bytes = 0
        self._cached_bytes = 0
        self._peak = 0
        self._closed = False

    def empty(self, nbytes: int, what: str) -> Tensor:
        """A uint8 tensor of shape (nbytes,) at a page boundary; ``DeviceOutOfMemory`` if it does not fit."""
        check_size(nbytes, what)
        if nbytes == 0:
            with torch.inference_mode(False):
                return torch.empty(0, dtype=torch.uint8, device="cpu")
        block = self._take(_round_up(nbytes), nbytes, what)
        if self._poison:
            ctypes.memset(block.address, POISON, block.size)
        array = np.frombuffer(block.mapping, dtype=np.uint8, count=nbytes)
        # The Storage owns the array; the finalizer owns the block, so that the mapping outlives the array.
        finalizer = weakref.finalize(array, _give_back, self._returned, block, self._poison)
        finalizer.atexit = False
        with torch.inference_mode(False):
            return torch.frombuffer(array, dtype=torch.uint8)

    def owns(self, tensor: Tensor) -> bool:
        """Whether the Storage of this (live) tensor is a buffer of this arena."""
        address = tensor.untyped_storage().data_ptr()
        with self._lock:
            return address in self._live

    @property
    def used(self) -> int:
        with self._lock:
            self._sort_in()
            return self._live_bytes

    @property
    def peak(self) -> int:
        with self._lock:
            return self._peak

    @property
    def cached(self) -> int:
        """Bytes of dead buffers kept for the next request of their size."""
        with self._lock:
            self._sort_in()
            return self._cached_bytes

    def close(self) -> None:
        """Give up recycled buffers; live ones are unmapped as their Storages die."""
        with self._lock:
            self._closed = True
            self._sort_in()
            self._cached.clear()
            self._retired.clear()
            self._cached_bytes = 0

    def _take(self, size: int, requested: int, what: str) -> _Block:
        with self._lock:
            if self._closed:
                raise RuntimeError(f"the {self._kind} device is closed; {what or 'a buffer'} cannot be allocated")
            self._sort_in()
            if self._capacity is not None and self._live_bytes + size > self._capacity:
                raise DeviceOutOfMemory(self._kind, what, requested, self._live_bytes, self._capacity)
            same_size = self._cached.get(size)
            if same_size:
                block = same_size.pop()
                self._cached_bytes -= size
            else:
                limit = self._capacity if self._capacity is not None else max(self._peak, self._live_bytes + size)
                self._evict(self._live_bytes + self._cached_bytes + size - limit)
                block = self._map(size, requested, what)
            self._live[block.address] = size
            self._live_bytes += size
            self._peak = max(self._peak, self._live_bytes)
            return block

    def _map(self, size: int, requested: int, what: str) -> _Block:
        try:
            mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise DeviceOutOfMemory(
                self._kind, what, requested, self._live_bytes, self._capacity, f"the system refused to map it ({error})"
            ) from error
        return _Block(mapping, ctypes.addressof(ctypes.c_char.from_buffer(mapping)), size)

    def _evict(self, excess: int) -> None:
        for size in list(self._cached):
            blocks = self._cached[size]
            while excess > 0 and blocks:
                self._retired.append(blocks.pop())
                self._cached_bytes -= size
                excess -= size
            if not blocks:
                del self._cached[size]
        if self._retired and (self._can_unmap is None or self._can_unmap()):
            self._retired.clear()

    def _sort_in(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            del self._live[block.address]
            self._live_bytes -= block.size
            if not self._closed:
                self._cached.setdefault(block.size, []).append(block)
                self._cached_bytes += block.size


def _give_back(returned: deque[_Block], block: _Block, poison: bool) -> None:
    if poison:
        ctypes.memset(block.address, POISON, block.size)
    returned.append(block)
