"""Errors of the swap layer. Each names the offender, the measured value, the limit and the knob to turn."""

from __future__ import annotations

import errno as errno_module
import os
from typing import Any

from swap.geometry import format_bytes

_REMEDIES = {
    errno_module.ENOSPC: "free space on that filesystem, lower memory.nvme, or add a path to memory.nvme_paths",
    errno_module.EDQUOT: "raise the disk quota, lower memory.nvme, or add a path to memory.nvme_paths",
    errno_module.EFBIG: "raise the file size limit (ulimit -f) or add a path to memory.nvme_paths",
    errno_module.EIO: "check the drive (dmesg, smartctl) or move memory.nvme_paths to another one",
    errno_module.EINVAL: "set swap.direct = false if the filesystem refuses direct I/O",
    errno_module.EROFS: "the filesystem is read-only: choose another path in memory.nvme_paths",
    errno_module.EMFILE: "raise the open file limit (ulimit -n)",
    errno_module.EBADMSG: "the drive or another program changed the data: check it (smartctl) or use another path",
    errno_module.ETIMEDOUT: "check the drive (dmesg, smartctl), or raise swap.timeout if it is only slow",
    errno_module.ENODEV: "the drive is gone: choose another path in memory.nvme_paths",
}


class SwapError(RuntimeError):
    """A fault of the swap layer at run time."""


class SwapIOError(OSError, SwapError):
    """A read, write or allocation on a swap file failed.

    Attributes: ``operation`` ("read", "write" or "allocate"), ``path``, ``offset`` and ``nbytes`` (bytes within
    the file), ``errno`` (int) and ``detail`` (what happened beyond the errno, or "").
    """

    def __init__(
        self, *, operation: str, path: str, offset: int, nbytes: int, errno: int | None, detail: str = ""
    ) -> None:
        number = errno_module.EIO if errno is None else errno
        cause = f"{os.strerror(number)} ({errno_module.errorcode.get(number, str(number))})"
        if detail:
            cause = f"{detail}: {cause}"
        message = f"swap {operation} of {nbytes} bytes at offset {offset} of {path} failed: {cause}"
        if number in _REMEDIES:
            message += f"; {_REMEDIES[number]}"
        super().__init__(message)
        self.operation = operation
        self.path = path
        self.offset = offset
        self.nbytes = nbytes
        self.errno = number
        self.strerror = os.strerror(number)
        self.detail = detail
        self.message = message

    def __str__(self) -> str:
        return self.message

    def clone(self) -> SwapIOError:
        """The same error as a new object.

        An exception object keeps the frames that raised it, and those keep their tensors: whoever raises a stored
        error again and again raises a clone.
        """
        return SwapIOError(
            operation=self.operation,
            path=self.path,
            offset=self.offset,
            nbytes=self.nbytes,
            errno=self.errno,
            detail=self.detail,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        fields = (self.operation, self.path, self.offset, self.nbytes, self.errno, self.detail)
        return _rebuild_io_error, fields


def _rebuild_io_error(
    operation: str, path: str, offset: int, nbytes: int, errno: int, detail: str
) -> SwapIOError:
    return SwapIOError(operation=operation, path=path, offset=offset, nbytes=nbytes, errno=errno, detail=detail)


class SwapPathError(ValueError):
    """A path given for swap files cannot be used; the message names ``memory.nvme_paths`` or ``memory.nvme``.

    Attributes: ``path``, and for too little space ``needed`` and ``free`` (bytes, else None).
    """

    def __init__(self, message: str, *, path: str, needed: int | None = None, free: int | None = None) -> None:
        super().__init__(message)
        self.path = path
        self.needed = needed
        self.free = free


class BudgetError(MemoryError, ValueError):
    """A reservation would exceed the byte budget of a tier.

    Attributes: ``tier``, ``kind``, ``requested``, ``used`` and ``limit`` (bytes), ``what`` (who asked).
    """

    def __init__(
        self, *, tier: str, kind: str, requested: int, used: int, limit: int, what: str = "", hint: str = ""
    ) -> None:
        over = used + requested - limit
        message = (
            f"{what or kind}: needs {format_bytes(requested)} ({requested} bytes) on the {tier} tier as {kind!r}, but "
            f"{used} of {limit} bytes are in use: {format_bytes(over)} ({over} bytes) over; "
        )
        message += hint or f"raise memory.{tier}"
        super().__init__(message)
        self.tier = tier
        self.kind = kind
        self.requested = requested
        self.used = used
        self.limit = limit
        self.what = what
