"""Reading a file from front to back without waiting for the disk at each piece, and without filling the page cache."""

from __future__ import annotations

import mmap
import os
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from offload.checkpoint.errors import DamagedCheckpointError
from offload.checkpoint.tensorfile import read_into
from swap.errors import BudgetError
from swap.geometry import PAGE

BLOCK = 8 << 20
_AHEAD, _KEPT, _THREADS = 2, 4, 2


class ReadAhead:
    """Reads of one file in aligned blocks: the block of the last read and the next `_AHEAD` ones are in memory.

    Blocks are read past the page cache where the filesystem allows it. At most `_KEPT` blocks are held.
    """

    def __init__(self, fd: int, path: Path, pool: ThreadPoolExecutor, allocate: Callable[[int], Tensor]) -> None:
        """`allocate(nbytes)`: page-aligned memory, or BudgetError; then the page cache serves instead."""
        self._path, self._pool, self._size = path, pool, os.fstat(fd).st_size
        self._fd, self.direct = _reopen(fd)
        self._blocks: OrderedDict[int, Future[int]] = OrderedDict()
        self._buffers: dict[int, Tensor] = {}
        self._free: list[Tensor] = []
        if self.direct:
            try:
                self._free = [allocate(BLOCK) for _ in range(_KEPT)]
            except BudgetError:
                self.direct = False
                os.close(self._fd)
                self._fd = os.dup(fd)

    def read(self, target: memoryview, offset: int) -> None:
        """Fills `target` from `offset` on."""
        if not self.direct:
            read_into(self._fd, target, offset, self._path)
            os.posix_fadvise(self._fd, offset, len(target), os.POSIX_FADV_DONTNEED)
            return
        done = 0
        while done < len(target):
            number, inside = divmod(offset + done, BLOCK)
            count = min(BLOCK - inside, len(target) - done)
            self._request(number)
            for ahead in range(1, _AHEAD + 1):
                if (number + ahead) * BLOCK < self._size:
                    self._request(number + ahead)
            got = self._blocks[number].result()
            if got < inside + count:
                raise DamagedCheckpointError(f"{self._path}: ends at byte {number * BLOCK + got:,}, before its data do")
            target[done : done + count] = self._buffers[number].numpy().data[inside : inside + count]
            done += count

    def _request(self, number: int) -> None:
        if number in self._blocks:
            self._blocks.move_to_end(number)
            return
        if self._free:
            buffer = self._free.pop()
        else:
            old, future = self._blocks.popitem(last=False)
            if not future.cancel():
                future.exception()  # waits: the buffer must not be written any more
            buffer = self._buffers.pop(old)
        self._buffers[number] = buffer
        self._blocks[number] = self._pool.submit(self._fetch, number, buffer)

    def _fetch(self, number: int, buffer: Tensor) -> int:
        """Bytes of a block that the file has."""
        start, done = number * BLOCK, 0
        want = min(BLOCK, self._size - start)
        memory: memoryview = buffer.numpy().data
        while done < want:
            part = memory[done // PAGE * PAGE :]
            count = os.preadv(self._fd, [part], start + done // PAGE * PAGE)
            reached = done // PAGE * PAGE + count
            if count == 0 or reached <= done:
                break
            done = reached
        return done

    def close(self) -> None:
        """Waits for reads under way and gives the buffers up. Idempotent."""
        for future in self._blocks.values():
            if not future.cancel():
                future.exception()
        self._blocks.clear()
        self._buffers.clear()
        self._free.clear()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _reopen(fd: int) -> tuple[int, bool]:
    """(a descriptor of the same file, whether it reads past the page cache)."""
    flag = getattr(os, "O_DIRECT", 0)
    if flag and os.fstat(fd).st_size >= BLOCK:
        try:
            direct = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | flag | os.O_CLOEXEC)
        except OSError:
            return os.dup(fd), False
        try:
            os.preadv(direct, [mmap.mmap(-1, PAGE)], 0)
            return direct, True
        except OSError:
            os.close(direct)
    return os.dup(fd), False


def aligned(nbytes: int) -> Tensor:
    """Uncharged memory on a page of its own, for readers outside an engine."""
    return torch.frombuffer(mmap.mmap(-1, max(1, nbytes)), dtype=torch.uint8)[:nbytes]


def make_pool() -> ThreadPoolExecutor:
    """The threads that read ahead."""
    return ThreadPoolExecutor(_THREADS, thread_name_prefix="offload-checkpoint-read")
