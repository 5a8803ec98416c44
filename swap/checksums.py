"""CRC32C of every page of an extent, kept in memory while the data lie on the disk.

A read that returns other bits than were written, whatever the drive, the cable or another process did to them, is an
error and never data. Whole pages are the unit, so reads may begin at any page and have any length.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from swap.geometry import PAGE, align_up
from swap.native import load

BYTES_PER_PAGE = 6
"""Memory for one page of an extent: its checksum and how many bytes of it count."""

_POLYNOMIAL = 0x82F63B78

Words = npt.NDArray[np.uint32]


class PageChecksums:
    """Checksums of the pages of one extent of ``nbytes`` (whole pages); ``BYTES_PER_PAGE`` bytes of memory a page."""

    __slots__ = ("_length", "_sums")

    def __init__(self, nbytes: int) -> None:
        self._sums: Words = np.zeros(nbytes // PAGE, dtype=np.uint32)
        # Bytes of each page that were written; the rest of the page is undefined. 0: nothing was written yet.
        self._length: npt.NDArray[np.uint16] = np.zeros(nbytes // PAGE, dtype=np.uint16)

    def record(self, offset: int, data: memoryview) -> None:
        """``data`` is being written at ``offset`` (bytes, whole pages)."""
        first, count = offset // PAGE, align_up(data.nbytes, PAGE) // PAGE
        page_checksums(data, self._sums[first : first + count])
        self._length[first : first + count] = PAGE
        if data.nbytes % PAGE:
            self._length[first + count - 1] = data.nbytes % PAGE

    def length(self, offset: int) -> int:
        """Bytes that were written of the page at ``offset``."""
        return int(self._length[offset // PAGE])

    def check(self, offset: int, data: memoryview) -> tuple[int, str] | None:
        """None if ``data``, read at ``offset`` (whole pages), is what was written; else (bad offset, what is wrong).

        ``data`` may end beyond what was written of its last page, not before it.
        """
        first, count = offset // PAGE, align_up(data.nbytes, PAGE) // PAGE
        lengths = self._length[first : first + count]
        # Almost always all pages are whole: then one call does it.
        partial = np.flatnonzero(lengths != PAGE) if int(lengths.min(initial=PAGE)) != PAGE else ()
        start = 0
        for page in (*partial, count):
            good = int(page)
            bad = first_difference(data[start * PAGE : good * PAGE], self._sums[first + start : first + good])
            if bad is not None:
                return offset + (start + bad) * PAGE, "checksum mismatch"
            if good < count:
                written = int(lengths[good])
                if not written:
                    return offset + good * PAGE, "these bytes were never written"
                part = data[good * PAGE : good * PAGE + written]
                expected = self._sums[first + good : first + good + 1]
                if part.nbytes < written or first_difference(part, expected) is not None:
                    return offset + good * PAGE, "checksum mismatch"
            start = good + 1
        return None


def page_checksums(data: memoryview, out: Words) -> None:
    """``out[i]`` = CRC32C of page ``i`` of ``data``, the last of which may be short."""
    module, _ = load()
    if module is None:
        portable_checksums(data, out)
    elif data.nbytes:
        module.crc32c_pages(_address(data), data.nbytes, PAGE, out.ctypes.data)


def first_difference(data: memoryview, expected: Words) -> int | None:
    """Number of the first page of ``data`` whose CRC32C is not ``expected``."""
    if not data.nbytes:
        return None
    module, _ = load()
    if module is not None:
        bad = int(module.crc32c_verify(_address(data), data.nbytes, PAGE, expected.ctypes.data))
        return None if bad < 0 else bad
    found = np.empty_like(expected)
    portable_checksums(data, found)
    wrong = np.flatnonzero(found != expected)
    return int(wrong[0]) if wrong.size else None


def crc32(data: memoryview | bytes | bytearray, value: int = 0) -> int:
    """CRC-32 of contiguous ``data`` (the function of ``zlib``: polynomial 0x04C11DB7), going on from ``value``."""
    module, _ = load()
    if module is None:
        return zlib.crc32(data, value)
    view = memoryview(data)
    if not view.contiguous:
        raise BufferError("crc32 needs contiguous memory")
    return int(module.crc32(value, _address(view), view.nbytes)) if view.nbytes else value


def portable_checksums(data: memoryview, out: Words) -> None:
    """The slow twin of the native code: all pages side by side, byte after byte."""
    flat = np.frombuffer(data, dtype=np.uint8)
    whole = flat.size // PAGE
    pages = flat[: whole * PAGE].reshape(whole, PAGE).T
    out[:whole] = _table_sums(pages)
    if flat.size % PAGE:
        out[whole] = _table_sums(flat[whole * PAGE :].reshape(-1, 1))[0]


def _table_sums(columns: npt.NDArray[np.uint8]) -> Words:
    """CRC32C of each column."""
    crc = np.full(columns.shape[1], 0xFFFFFFFF, dtype=np.uint32)
    for row in columns:
        crc = _TABLE[(crc ^ row) & np.uint32(0xFF)] ^ (crc >> np.uint32(8))
    return ~crc


def _make_table() -> Words:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = (table >> np.uint32(1)) ^ np.where(table & np.uint32(1), np.uint32(_POLYNOMIAL), np.uint32(0))
    return table.astype(np.uint32)


_TABLE = _make_table()


def method() -> str:
    """How checksums are computed here: a processor instruction, native tables, or numpy."""
    module, _ = load()
    name: Callable[[], str] | None = None if module is None else module.crc32c_method
    return "numpy" if name is None else str(name())


def _address(data: memoryview) -> int:
    return int(np.frombuffer(data, dtype=np.uint8).ctypes.data)
