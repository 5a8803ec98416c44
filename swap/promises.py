"""Disk space that stores of this process count on but have not taken yet.

A file's preallocated bytes are gone from the filesystem's free space; bytes that a store was promised and will take
later are not, and must not be promised twice.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from swap.errors import SwapPathError
from swap.files import SwapFile
from swap.geometry import format_bytes

_lock = threading.Lock()
_promised: dict[int, int] = {}  # device number -> bytes


class Promise:
    """Space promised to one store, by device."""

    def __init__(self) -> None:
        self._own: dict[int, int] = {}

    def request(self, nbytes: int, files: Sequence[SwapFile]) -> None:
        """Replace the promise by one for ``nbytes`` more over ``files``; SwapPathError if the disks lack them."""
        self.release()
        with _lock:
            free = {
                file.device: max(0, file.free_bytes - _promised.get(file.device, 0)) for file in files
            }
            total = sum(free.values())
            if nbytes > total:
                names = ", ".join(_parent(file) for file in files)
                raise SwapPathError(
                    f"swap needs {nbytes} bytes ({format_bytes(nbytes)}) but {names} has {total} bytes "
                    f"({format_bytes(total)}) free; free space, lower memory.nvme, or add a path to "
                    "memory.nvme_paths",
                    path=names,
                    needed=nbytes,
                    free=total,
                )
            left = nbytes
            for number, (device, available) in enumerate(sorted(free.items(), key=lambda item: item[1])):
                # Smallest first, each an equal part of what is left: nobody gets more than it has.
                share = min(available, -(-left // (len(free) - number)))
                self._own[device] = share
                _promised[device] = _promised.get(device, 0) + share
                left -= share

    def kept(self, device: int, nbytes: int) -> None:
        """``nbytes`` on ``device`` have become part of a file."""
        with _lock:
            share = min(nbytes, self._own.get(device, 0))
            if share:
                self._own[device] -= share
                _promised[device] -= share

    def release(self) -> None:
        """Promise nothing any more. Idempotent."""
        with _lock:
            for device, nbytes in self._own.items():
                _promised[device] -= nbytes
            self._own.clear()


def _parent(file: SwapFile) -> str:
    return str(Path(file.path).parent.parent)
