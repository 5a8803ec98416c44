"""Extents: which bytes of which swap file hold a plane chunk. Pure arithmetic."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from swap.geometry import PAGE


@dataclass(frozen=True, slots=True)
class Segment:
    """``nbytes`` at ``offset`` of the swap file under path number ``path``; both multiples of a page."""

    path: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Extent:
    """An allocated range, in order of its segments. Compared by identity: one allocation, one extent.

    ``nbytes`` is whole pages, at least what was asked for.
    """

    segments: tuple[Segment, ...]
    nbytes: int
    label: str = ""

    def slices(self, offset: int, nbytes: int) -> Iterator[Segment]:
        """The file ranges behind bytes ``[offset, offset + nbytes)`` of the extent, in order."""
        end = offset + nbytes
        start = 0
        for segment in self.segments:
            low = max(offset, start)
            high = min(end, start + segment.nbytes)
            if low < high:
                yield Segment(segment.path, segment.offset + low - start, high - low)
            start += segment.nbytes
            if start >= end:
                return


class FreeSpace:
    """Free ranges of one swap file: first fit, coalescing. Offsets and sizes are multiples of a page."""

    __slots__ = ("_free_bytes", "_sizes", "_starts", "size")

    def __init__(self) -> None:
        self.size = 0
        """Bytes of the file, free or not."""
        self._starts: list[int] = []
        self._sizes: dict[int, int] = {}
        self._free_bytes = 0

    @property
    def free_bytes(self) -> int:
        return self._free_bytes

    @property
    def used_bytes(self) -> int:
        return self.size - self._free_bytes

    def holes(self) -> list[tuple[int, int]]:
        """(offset, bytes) of every free range, in file order."""
        return [(start, self._sizes[start]) for start in self._starts]

    def tail_bytes(self) -> int:
        """Free bytes at the very end: growth continues them."""
        if not self._starts:
            return 0
        last = self._starts[-1]
        return self._sizes[last] if last + self._sizes[last] == self.size else 0

    def take(self, nbytes: int) -> int | None:
        """Offset of the first free range of ``nbytes``, now taken; None if no single one is large enough."""
        _check(nbytes)
        for start in self._starts:
            if self._sizes[start] >= nbytes:
                self._cut(start, nbytes)
                return start
        return None

    def take_pieces(self, nbytes: int) -> list[tuple[int, int]] | None:
        """(offset, bytes) ranges, largest holes first, that add up to ``nbytes``; None if less is free."""
        _check(nbytes)
        if nbytes > self._free_bytes:
            return None
        pieces = []
        for start in sorted(self._starts, key=lambda start: -self._sizes[start]):
            if nbytes == 0:
                break
            size = min(nbytes, self._sizes[start])
            self._cut(start, size)
            pieces.append((start, size))
            nbytes -= size
        return pieces

    def give(self, offset: int, nbytes: int) -> None:
        """Return a taken range. ValueError if any of it is free already or outside the file."""
        _check(nbytes)
        index = bisect_left(self._starts, offset)
        before = self._starts[index - 1] if index > 0 else None
        after = self._starts[index] if index < len(self._starts) else None
        overlaps = (before is not None and before + self._sizes[before] > offset) or (
            after is not None and offset + nbytes > after
        )
        if overlaps or offset < 0 or offset + nbytes > self.size:
            raise ValueError(f"bytes {offset} to {offset + nbytes} are not an allocated range of the swap file")
        start, size = offset, nbytes
        if after is not None and offset + nbytes == after:
            size += self._sizes.pop(after)
            del self._starts[index]
        if before is not None and before + self._sizes[before] == offset:
            self._sizes[before] += size
        else:
            self._starts.insert(index, start)
            self._sizes[start] = size
        self._free_bytes += nbytes

    def grow(self, nbytes: int) -> None:
        """The file got ``nbytes`` longer."""
        _check(nbytes)
        offset = self.size
        self.size += nbytes
        self.give(offset, nbytes)

    def _cut(self, start: int, nbytes: int) -> None:
        index = bisect_left(self._starts, start)
        size = self._sizes.pop(start)
        if size == nbytes:
            del self._starts[index]
        else:
            self._starts[index] = start + nbytes
            self._sizes[start + nbytes] = size - nbytes
        self._free_bytes -= nbytes


def _check(nbytes: int) -> None:
    if nbytes <= 0 or nbytes % PAGE:
        raise ValueError(f"{nbytes} bytes is not a positive number of {PAGE}-byte pages")
