"""The real system calls, and how a request becomes a series of them.

``transfer`` is written as a generator that yields what to transfer next and receives the byte count, so that the
blocking and the asyncio engine share every check: counts, short transfers, end of file, alignment and bouncing.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Generator

from swap.engines.protocol import BounceSource, Request
from swap.geometry import PAGE, align_up

_MAX_STALLS = 16
"""Transfers in a row without progress before a request is given up."""

Steps = Generator[tuple[memoryview, int], int, None]
"""Yields (view, file offset) to transfer, receives bytes transferred; OSErrors are thrown in."""


def _load_fallocate() -> Callable[[int, int, int, int], int] | None:
    try:
        function = ctypes.CDLL(None, use_errno=True).fallocate
    except (AttributeError, OSError):
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    function.restype = ctypes.c_int
    return function


# Not os.posix_fallocate: where the filesystem cannot preallocate, glibc emulates it by writing every block.
_fallocate = _load_fallocate()


class OperatingSystem:
    """The kernel's own calls. They release the GIL."""

    def pread_into(self, fd: int, view: memoryview, offset: int) -> int:
        return os.preadv(fd, [view], offset)

    def pwrite_from(self, fd: int, view: memoryview, offset: int) -> int:
        return os.pwritev(fd, [view], offset)

    def fallocate(self, fd: int, offset: int, nbytes: int) -> None:
        """Give the range real blocks and extend the file; OSError (EOPNOTSUPP where it cannot be done)."""
        if _fallocate is None:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        while _fallocate(fd, 0, offset, nbytes) != 0:
            number = ctypes.get_errno()
            if number != errno.EINTR:
                raise OSError(number, os.strerror(number))


def transfer(request: Request, bounce: BounceSource) -> Steps:
    """The transfers that ``request`` needs; raises SwapIOError."""
    if not request.bounce:
        yield from _move(request, request.view, request.offset)
        return
    done = 0
    total = request.view.nbytes
    while done < total:
        scratch = bounce.borrow(total - done)
        try:
            part = min(total - done, scratch.nbytes)
            window = scratch[: align_up(part, PAGE)]
            if request.write:
                window[:part] = request.view[done : done + part]
                yield from _move(request, window, request.offset + done)
            else:
                yield from _move(request, window, request.offset + done)
                request.view[done : done + part] = window[:part]
        finally:
            bounce.give_back(scratch)
        done += part


def _move(request: Request, view: memoryview, offset: int) -> Steps:
    total = view.nbytes
    done = 0
    stalls = 0
    while done < total:
        try:
            count = yield view[done:], offset + done
        except OSError as error:
            raise request.failure(error, f"after {done} of {total} bytes" if done else "") from error
        if not 0 <= count <= total - done:
            raise request.failure(None, f"the system reported {count} bytes for a transfer of {total - done}")
        if count == 0 and not request.write:
            raise request.failure(None, f"unexpected end of file after {done} of {total} bytes")
        progress = done + count
        if request.file.direct and progress < total:
            # The rest must start on a page again, in memory and in the file: transfer the broken page anew.
            progress -= progress % PAGE
        stalls = stalls + 1 if progress == done else 0
        if stalls >= _MAX_STALLS:
            raise request.failure(None, f"no progress after {done} of {total} bytes in {stalls} attempts")
        done = progress
