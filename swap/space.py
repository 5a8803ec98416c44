"""Where extents lie: which path, which hole, and when a file grows."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterable, Sequence

from swap.engines.protocol import System
from swap.errors import SwapIOError
from swap.extents import FreeSpace, Segment
from swap.files import SwapFile
from swap.geometry import PAGE

_log = logging.getLogger(__name__)

_GROWTH = 64 * 1024 * 1024
"""Smallest growth of a file in bytes, where capacity and disk allow: few, long runs of blocks."""

Piece = tuple[int, int]


class SwapSpace:
    """Allocates over several swap files. Not thread-safe: the store holds its lock.

    An extent of at most one stripe lies on the path with most room; a longer one is dealt out in stripes over all
    paths that have room, in proportion to ``weights`` (None: in equal parts). ``capacity`` bounds the bytes of all
    files together (None: the disks do).
    """

    def __init__(
        self,
        files: Sequence[SwapFile],
        system: System,
        *,
        stripe: int,
        capacity: int | None,
        weights: Sequence[float] | None = None,
    ) -> None:
        self._files = files
        self._system = system
        self._stripe = stripe
        self.capacity = capacity
        self._free = [FreeSpace() for _ in files]
        self._weights = tuple(weights or (1.0,) * len(files))
        # How much of its share each path is behind: what lets short extents add up to the right proportion.
        self._credit = [0.0] * len(files)
        self._full: set[int] = set()

    @property
    def file_bytes(self) -> int:
        """Bytes of all files together, used or not."""
        return sum(free.size for free in self._free)

    @property
    def used_bytes(self) -> int:
        """Bytes in extents."""
        return sum(free.used_bytes for free in self._free)

    def allocate(self, nbytes: int) -> tuple[Segment, ...] | None:
        """Segments for ``nbytes`` (whole pages); None if capacity is short, SwapIOError if the disks are."""
        if nbytes == 0:
            return ()
        usable = list(range(len(self._files)))
        if len(usable) > 1 and nbytes <= self._stripe:
            usable.sort(key=self._room, reverse=True)
        full: SwapIOError | None = None
        while usable:
            spread = usable if nbytes > self._stripe else usable[:1]
            placed, lacking, error = self._place(nbytes, spread)
            if placed is not None:
                return placed
            full = error or full
            if error is not None and lacking not in self._full and len(self._files) > 1:
                self._full.add(lacking)
                _log.warning("swap: path %s is full (%s): the other paths take its part", error.path, error.strerror)
            # Whoever has no room for its share is left out, and the others share its part.
            usable = [path for path in usable if path != lacking]
        if full is not None:
            raise full
        return None

    def give(self, segments: Sequence[Segment]) -> None:
        """Take back the segments of an extent."""
        for segment in segments:
            self._free[segment.path].give(segment.offset, segment.nbytes)

    def _room(self, path: int) -> int:
        return self._free[path].free_bytes + self._files[path].free_bytes

    def _place(
        self, nbytes: int, paths: list[int]
    ) -> tuple[tuple[Segment, ...] | None, int, SwapIOError | None]:
        """(segments, -, -), or (None, the path that lacks room, its error if the disk said so)."""
        stripe = self._stripe if len(paths) > 1 else nbytes
        sizes = [min(stripe, nbytes - start) for start in range(0, nbytes, stripe)]
        credit, owners = self._deal_out(len(sizes), paths)
        shares = dict.fromkeys(paths, 0)
        for path, size in zip(owners, sizes, strict=True):
            shares[path] += size
        pieces: dict[int, list[Piece]] = {}
        for path, share in shares.items():
            error: SwapIOError | None = None
            taken: list[Piece] | None = []
            try:
                taken = self._take(path, share) if share else []
            except SwapIOError as failure:
                if failure.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    self._undo(pieces)
                    raise
                taken, error = None, failure
            if taken is None:
                self._undo(pieces)
                return None, path, error
            pieces[path] = taken
        self._credit = credit
        return _deal(zip(owners, sizes, strict=True), pieces), -1, None

    def _deal_out(self, count: int, paths: list[int]) -> tuple[list[float], list[int]]:
        """(credits afterwards, the path of each of ``count`` stripes): whoever is furthest behind its share is next."""
        credit = list(self._credit)
        total = sum(self._weights[path] for path in paths)
        owners = []
        for _ in range(count):
            for path in paths:
                credit[path] += self._weights[path] / total
            # Rounded, so that equal shares stay equal.
            owner = max(paths, key=lambda path: round(credit[path], 6))
            credit[owner] -= 1.0
            owners.append(owner)
        return credit, owners

    def _undo(self, pieces: dict[int, list[Piece]]) -> None:
        for path, taken in pieces.items():
            for offset, size in taken:
                self._free[path].give(offset, size)

    def _take(self, path: int, nbytes: int) -> list[Piece] | None:
        """``nbytes`` of one file: a hole, else fresh bytes at its end, else the holes there are."""
        free = self._free[path]
        offset = free.take(nbytes)
        if offset is not None:
            return [(offset, nbytes)]
        full: SwapIOError | None = None
        try:
            grown = self._grow(path, nbytes - free.tail_bytes())
        except SwapIOError as error:
            grown, full = False, error
        if grown:
            offset = free.take(nbytes)
            if offset is not None:
                return [(offset, nbytes)]
        pieces = free.take_pieces(nbytes)
        if pieces is None and full is not None:
            raise full
        return pieces

    def _grow(self, path: int, nbytes: int) -> bool:
        """Lengthen a file by ``nbytes`` or, better, a long step; False if that exceeds the capacity."""
        step = max(nbytes, _GROWTH)
        if self.capacity is not None:
            headroom = (self.capacity - self.file_bytes) // PAGE * PAGE
            if headroom <= 0:
                return False
            # Less than asked for is worth having too: an extent may lie in pieces.
            nbytes = min(nbytes, headroom)
            step = min(step, headroom)
        file = self._files[path]
        try:
            file.grow(self._system, step)
        except SwapIOError as error:
            if step == nbytes or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            step = nbytes
            file.grow(self._system, step)
        self._free[path].grow(step)
        return True


def _deal(chunks: Iterable[tuple[int, int]], pieces: dict[int, list[Piece]]) -> tuple[Segment, ...]:
    """Cut each path's pieces into the stripes that it holds; neighbours in file and extent become one segment."""
    queues = {path: list(reversed(taken)) for path, taken in pieces.items()}
    segments: list[Segment] = []
    for path, size in chunks:
        queue = queues[path]
        while size:
            offset, available = queue.pop()
            part = min(size, available)
            if part < available:
                queue.append((offset + part, available - part))
            last = segments[-1] if segments else None
            if last is not None and last.path == path and last.offset + last.nbytes == offset:
                segments[-1] = Segment(path, last.offset, last.nbytes + part)
            else:
                segments.append(Segment(path, offset, part))
            size -= part
    return tuple(segments)
