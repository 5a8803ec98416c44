"""How much memory the C library's heap takes for a sequence of allocations.

glibc maps blocks from its threshold on apart (`machine.map_large_blocks_apart` sets it), and gives them back at once.
Whatever is smaller is carved from one heap (best fit, neighbours joined), whose top never comes down while anything
near it is alive. So a process holds more than the bytes that are alive in it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

from offload.machine import MAPPED_FROM

_LEAST = 64
"""Bytes that blocks are rounded up to."""


class Heap:
    """A heap, empty at first."""

    def __init__(self) -> None:
        self.top = self.apart = self.peak = 0
        self._free: list[tuple[int, int]] = []  # (size, start), ascending
        self._starts: dict[int, int] = {}  # of free ranges, with their ends
        self._ends: dict[int, int] = {}
        self._blocks: dict[int, tuple[int, int]] = {}  # by name: (start, or -1 if apart; size)

    def take(self, name: int, nbytes: int) -> None:
        """Allocates a block under a name of its own."""
        nbytes = -(-nbytes // _LEAST) * _LEAST
        if nbytes == 0:
            return
        if nbytes >= MAPPED_FROM:
            self.apart += nbytes
            self._blocks[name] = (-1, nbytes)
        else:
            self._blocks[name] = (self._carve(nbytes), nbytes)
        self.peak = max(self.peak, self.top + self.apart)

    def give(self, name: int) -> None:
        """Frees the block; nothing if there is none of that name."""
        start, nbytes = self._blocks.pop(name, (0, 0))
        if start < 0:
            self.apart -= nbytes
        elif nbytes:
            self._join(start, start + nbytes)

    def _carve(self, nbytes: int) -> int:
        place = bisect_left(self._free, (nbytes, -1))
        if place < len(self._free):
            size, start = self._free[place]
            self._remove(start, start + size)
            if size > nbytes:
                self._insert(start + nbytes, start + size)
            return start
        start = self._ends.get(self.top, self.top)
        if start < self.top:  # the free range at the top grows
            self._remove(start, self.top)
        self.top = start + nbytes
        return start

    def _join(self, start: int, end: int) -> None:
        if start in self._ends:
            before = self._ends[start]
            self._remove(before, start)
            start = before
        if end in self._starts:
            after = self._starts[end]
            self._remove(end, after)
            end = after
        self._insert(start, end)

    def _insert(self, start: int, end: int) -> None:
        insort(self._free, (end - start, start))
        self._starts[start], self._ends[end] = end, start

    def _remove(self, start: int, end: int) -> None:
        del self._free[bisect_left(self._free, (end - start, start))]
        del self._starts[start], self._ends[end]


def heap_peak(events: Iterable[tuple[int, int]], *, repeats: int = 3) -> int:
    """The most bytes that the heap and what is mapped apart take for `repeats` rounds of `events`.

    An event is (name, bytes) for an allocation and (name, -1) for its end; names are used once a round.
    """
    heap, rounds = Heap(), list(events)
    for number in range(repeats):
        alive: set[int] = set()
        for name, nbytes in rounds:
            if nbytes < 0:
                heap.give(name)
                alive.discard(name)
            else:
                heap.take(name, nbytes)
                alive.add(name)
        for name in alive:
            heap.give(name)
        if number == 0:
            heap.peak = heap.top + heap.apart
    return heap.peak
