"""Exact, page-aligned host memory whose bytes come back when the last view of them dies.

torch's pinned allocator rounds every block up to a power of two, and its pageable one caches out of our sight. Here
one allocation is one anonymous mapping rounded up to a page, optionally registered with the accelerator driver.

[Note: storage life] A lease can end while user code still holds views of its tensor. Bytes therefore return to the
pool when the tensor's *Storage* dies, never earlier: ``torch.frombuffer`` keeps the ctypes array over the mapping
alive as long as the Storage lives, and a ``weakref.finalize`` on that array returns the block. Dropping our
reference to the mapping is what unmaps it: closing it explicitly would fail while the array is being torn down.

[Note: colours] AMD's Zen processors keep a hash of the linear address with each line of the first-level data cache: bit
12 + i xor bit 27 - i, for i from 0 to 7 (Lipp et al., "Take A Way", 2020). Of two lines in one set with the same hash
only one can be used at a time. An optimizer step walks through several planes at once; mappings of a power of two
bytes that lie one after the other collide at every element, and the step takes two to three times as long. So large
blocks begin a few pages into their mapping, such that bits 12 to 15 of the hash, the block's colour, go round in steps
of 5. With that step neighbours and their neighbours stay apart over their whole length. The pages before the block
are never touched and cost nothing.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import mmap
import os
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress

import torch

from swap.budget import Budget, Reservation
from swap.deferred import DeferredLock
from swap.errors import BudgetError, SwapError
from swap.geometry import PAGE, align_up

Registrar = Callable[[int, int], None]
"""Called with (address, bytes) of a mapping; may raise."""

_log = logging.getLogger(__name__)

_HUGE_FROM = 4 * 1024 * 1024
"""Mappings of this many bytes ask for huge pages: the first touch is several times faster (0.09 s for 0.4 s)."""

_MADV_POPULATE_WRITE = 23

_COLOURS = 16
_COLOUR_STEP = 5
_colours = itertools.count(0, _COLOUR_STEP)

_POISON = 0xFF  # NaN in every float format, -1 in every signed integer


def _pages_to_colour(address: int, colour: int) -> int:
    """How many pages after ``address`` bits 12 to 15 of the hash are ``colour`` modulo 16; see [Note: colours]."""
    high = int(f"{address >> 24 & 15:04b}"[::-1], 2)
    return ((colour ^ high) - (address >> 12)) % _COLOURS


class _Block:
    """``nbytes`` at ``address``, ``start`` bytes into a mapping, with their budget charge.

    Unmapped when the last reference to ``memory`` goes.
    """

    __slots__ = ("address", "memory", "nbytes", "reservation", "start")

    def __init__(self, memory: mmap.mmap, start: int, address: int, nbytes: int, reservation: Reservation) -> None:
        self.memory = memory
        self.start = start
        self.address = address
        self.nbytes = nbytes
        self.reservation = reservation


class HostPool:
    """Page-aligned host memory charged to ``budget`` under (``tier``, ``kind``): live and cached bytes alike.

    Freed blocks are kept for tensors of the same size (training asks for the same sizes again and again) and are
    unmapped when any other reservation on the tier needs the bytes. ``register``/``unregister`` (address, bytes) pin
    and unpin a mapping. With ``poison`` bytes are 0xFF when taken and when returned, so that stale or early reads
    show as NaN.

    A forked child, such as a data-loader worker, does not inherit these mappings: it pays nothing for them, and to read
    them there is a segmentation fault instead of stale numbers.
    """

    def __init__(
        self,
        budget: Budget,
        tier: str,
        kind: str,
        *,
        register: Registrar | None = None,
        unregister: Registrar | None = None,
        poison: bool = False,
    ) -> None:
        self._budget = budget
        self._tier = tier
        self._kind = kind
        self._register = register
        self._unregister = unregister
        self._poison = poison
        self._pid = os.getpid()
        self._free: dict[int, list[_Block]] = {}
        self._live_bytes = 0
        self._cached_bytes = 0
        self._closed = False
        self._lock: DeferredLock[_Block] = DeferredLock(self._take_back)
        budget.add_reclaimer(tier, self.trim)

    @property
    def live_bytes(self) -> int:
        """Page-rounded bytes of tensors whose storage is alive."""
        with self._lock:
            return self._live_bytes

    @property
    def cached_bytes(self) -> int:
        """Bytes mapped but unused, kept for the next tensor of the same size."""
        with self._lock:
            return self._cached_bytes

    def take(self, nbytes: int, *, block: bool = False, what: str = "", populate: bool = False) -> torch.Tensor:
        """A fresh uint8 tensor of shape ``(nbytes,)``, page-aligned, alone in its Storage; contents undefined.

        BudgetError if the budget cannot hold it even after unmapping what is cached; with ``block`` it waits for
        others to let go instead, unless it could never fit. With ``populate`` a new mapping has all its pages, near the
        processor of this thread, when this returns. SwapError after ``close``.
        """
        if nbytes < 0:
            raise ValueError(f"{what or self._kind}: cannot take {nbytes} bytes of host memory")
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        region = self._obtain(align_up(nbytes, PAGE), what, populate)
        if region is None and block:
            region = self._wait_for(align_up(nbytes, PAGE), what)
        if region is None:
            raise self._over_budget(align_up(nbytes, PAGE), what)
        return self._tensor(region, nbytes)

    def trim(self, nbytes: int | None = None) -> int:
        """Unmap cached blocks, largest first, until ``nbytes`` (default: all) are gone; returns the bytes unmapped."""
        with self._lock:
            return self._trim(nbytes)

    def close(self) -> None:
        """Unmap the cache. Memory of tensors still alive is unmapped when they die. Idempotent."""
        with self._lock:
            self._closed = True
            self._trim(None)

    def __enter__(self) -> HostPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _obtain(self, nbytes: int, what: str, populate: bool = False) -> _Block | None:
        """A block of ``nbytes`` (whole pages) from the cache or the system; None if the budget is full."""
        with self._lock:
            self._check_open(what)
            cached = self._free.get(nbytes)
            if cached:
                self._cached_bytes -= nbytes
                self._live_bytes += nbytes
                return cached.pop()
        # Not under our lock: the budget may ask any pool, this one too, to trim its cache.
        reservation = self._budget.try_reserve(self._tier, self._kind, nbytes, what=what)
        if reservation is None:
            return None
        block = self._map(nbytes, reservation, what, populate)
        with self._lock:
            if self._closed:
                self._unmap(block)
            self._check_open(what)
            self._live_bytes += nbytes
        return block

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise SwapError(f"{what or self._kind}: the host memory pool is closed")

    def _wait_for(self, nbytes: int, what: str) -> _Block | None:
        """Sleep until ``nbytes`` fit; None if they are more than the whole tier."""
        limit = self._budget.limit(self._tier)
        if limit is not None and nbytes > limit:
            return None
        released = self._budget.subscribe()
        try:
            while True:
                block = self._obtain(nbytes, what)
                if block is not None:
                    return block
                released.get()
        finally:
            self._budget.unsubscribe(released)

    def _map(self, nbytes: int, reservation: Reservation, what: str, populate: bool) -> _Block:
        try:
            # Private: anonymous *shared* mappings are shmem, which a cgroup counts and huge pages treat differently.
            large = nbytes >= _HUGE_FROM
            length = nbytes + (_COLOURS - 1) * PAGE if large else nbytes
            memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            start = _pages_to_colour(address, next(_colours)) * PAGE if large else 0
            address += start
            if large and hasattr(mmap, "MADV_HUGEPAGE"):
                with suppress(OSError):  # kernels without huge pages
                    memory.madvise(mmap.MADV_HUGEPAGE, start, nbytes)
            if hasattr(mmap, "MADV_DONTFORK"):
                with suppress(OSError):
                    memory.madvise(mmap.MADV_DONTFORK)
            if populate and sys.platform == "linux":
                with suppress(OSError):  # kernels before 5.14: the first touch does it
                    memory.madvise(_MADV_POPULATE_WRITE, start, nbytes)
            if self._register is not None:
                self._register(address, nbytes)
        except OSError as error:
            reservation.release()
            raise SwapError(
                f"{what or self._kind}: the system refused {nbytes} bytes of host memory ({error}); lower memory.host"
            ) from error
        except BaseException:
            reservation.release()
            raise
        return _Block(memory, start, address, nbytes, reservation)

    def _tensor(self, block: _Block, nbytes: int) -> torch.Tensor:
        try:
            array = (ctypes.c_uint8 * nbytes).from_buffer(block.memory, block.start)
            if self._poison:
                ctypes.memset(block.address, _POISON, block.nbytes)
            finalizer = weakref.finalize(array, self._returned, block)
            # At interpreter exit the mapping may still be in use by other threads; the kernel reclaims it.
            finalizer.atexit = False
        except BaseException:
            self._lock.post(block)
            raise
        return torch.frombuffer(array, dtype=torch.uint8)

    def _returned(self, block: _Block) -> None:
        """Runs when a storage dies: in any thread, at any bytecode. It only posts."""
        if os.getpid() != self._pid:
            return  # a forked child does not have the memory
        if self._poison:
            ctypes.memset(block.address, _POISON, block.nbytes)
        self._lock.post(block)
        # Cached bytes are available to a taker that trims: wake those that wait.
        self._budget.notify()

    def _take_back(self, block: _Block) -> None:
        self._live_bytes -= block.nbytes
        if self._closed:
            self._unmap(block)
        else:
            self._free.setdefault(block.nbytes, []).append(block)
            self._cached_bytes += block.nbytes

    def _trim(self, nbytes: int | None) -> int:
        unmapped = 0
        for size in sorted(self._free, reverse=True):
            blocks = self._free[size]
            while blocks and (nbytes is None or unmapped < nbytes):
                block = blocks.pop()
                self._cached_bytes -= size
                unmapped += size
                self._unmap(block)
            if not blocks:
                del self._free[size]
        return unmapped

    def _unmap(self, block: _Block) -> None:
        try:
            # A forked child has no pins of its own to undo.
            if self._unregister is not None and os.getpid() == self._pid:
                self._unregister(block.address, block.nbytes)
        except Exception:
            # Runs under the lock, maybe on behalf of a finalizer: there is nobody to raise to.
            _log.exception("unpinning %d bytes of host memory failed", block.nbytes)
        block.reservation.release()

    def _over_budget(self, nbytes: int, what: str) -> BudgetError:
        return BudgetError(
            tier=self._tier,
            kind=self._kind,
            requested=nbytes,
            used=self._budget.used(self._tier),
            limit=self._budget.limit(self._tier) or 0,
            what=what,
        )
