"""What the drives under a list of paths do: sequential reads, writes and a half-and-half mixture of both.

The bytes go through a ``SwapStore`` as those of a training run do: same files, same engine, same checks.
"""

from __future__ import annotations

import os
import resource
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from swap.budget import Budget
from swap.extents import Extent
from swap.geometry import PAGE, format_bytes
from swap.slabs import HostPool
from swap.store import SwapStore
from swap.tickets import Ticket

PATTERNS = ("write", "read", "mixed")
"""In this order: what is to be read must have been written."""

REQUEST = 64 << 20
"""Bytes of one read or write: about the weights of one block of a model of three billion parameters."""

_CLIFF = 0.6
"""A last quarter slower than this part of the first one is worth a word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One way to move bytes: engine name, bytes of a block, blocks in flight."""

    engine: str
    block: int
    queue_depth: int

    def __str__(self) -> str:
        return f"{self.engine}, block {format_bytes(self.block)}, depth {self.queue_depth}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """One measurement: ``nbytes`` in ``seconds`` of wall time and ``cpu_seconds`` of this process's processor time.

    ``first`` and ``last``: bytes per second in the first and the last quarter of the bytes.
    """

    nbytes: int
    seconds: float
    cpu_seconds: float
    first: float
    last: float

    @property
    def bytes_per_s(self) -> float:
        return self.nbytes / self.seconds

    @property
    def cpu_seconds_per_gb(self) -> float:
        """Processor seconds for 10^9 bytes."""
        return self.cpu_seconds / self.nbytes * 1e9

    @property
    def cliff(self) -> bool:
        """Whether the drive became much slower on the way, as when its write cache is full."""
        return self.last < _CLIFF * self.first


def mixing_penalty(read: float, write: float, mixed: float) -> float:
    """delta of: time = max(r/R, w/W) + delta * min(r/R, w/W), from rates in bytes per second, for equal r and w.

    0: reads and writes do not hinder each other; 1: they take turns; above 1: mixing is worse than taking turns.
    """
    times = (1 / read, 1 / write)
    return max(0.0, (2 / mixed - max(times)) / min(times))


class Bench:
    """A store of ``nbytes`` under ``paths`` for measurements with one setting. Use as a context manager.

    ``request``: bytes of one read or write as a user of the store submits it; by default ``REQUEST``. Buffers are
    charged to the "host" tier of ``budget``; BudgetError if it cannot hold them.
    """

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        setting: Setting,
        *,
        nbytes: int,
        request: int | None = None,
        direct: str | bool = "auto",
        checksum: bool = False,
        budget: Budget | None = None,
    ) -> None:
        budget = Budget({}) if budget is None else budget
        self.request = min(max(setting.block, REQUEST), nbytes // 4 // PAGE * PAGE) if request is None else request
        if self.request <= 0 or self.request % PAGE or nbytes < self.request:
            raise ValueError(f"a request of {self.request} bytes must be whole pages and at most {nbytes} bytes")
        self.nbytes = nbytes // self.request * self.request
        self._memory = HostPool(budget, "host", "bench")
        self._store = SwapStore(
            paths,
            engine=setting.engine,
            block=setting.block,
            queue_depth=setting.queue_depth,
            direct=direct,
            checksum=checksum,
            owner="bench",
        )
        try:
            self.engine = self._store.engine
            self.direct = all(self._store.direct)
            self._extent: Extent = self._store.allocate(self.nbytes, "bench")
            # Enough that the queue never runs dry while one request is waited for.
            count = max(3, -(-2 * setting.queue_depth * setting.block // self.request))
            count = min(count, self.nbytes // self.request)
            region = self._memory.take(count * self.request, what="bench")
            # Not zeros: a drive or a virtual disk may compress or skip them.
            words = region.view(torch.int64)
            words.random_()
            self._buffers = [region[at : at + self.request] for at in range(0, count * self.request, self.request)]
            self._store.register_memory(region)
        except BaseException:
            self._store.close()
            self._memory.close()
            raise

    def run(self, pattern: str, *, seconds: float | None = None) -> Rate:
        """Move all bytes once in ``pattern``, or as many as ``seconds`` allow, beginning anew at the end."""
        deadline = None if seconds is None else time.perf_counter() + seconds
        under_way: deque[tuple[Ticket, int]] = deque()
        free = deque(range(len(self._buffers)))
        marks: list[float] = []
        moved = 0
        cpu = _cpu_seconds()
        begun = time.perf_counter()
        for write, offset in self._requests(pattern, endless=seconds is not None):
            if deadline is not None and moved and time.perf_counter() > deadline:
                break
            if not free:
                ticket, index = under_way.popleft()
                ticket.wait()
                free.append(index)
                marks.append(time.perf_counter())
            index = free.popleft()
            call = self._store.write if write else self._store.read
            under_way.append((call(self._extent, self._buffers[index], offset=offset), index))
            moved += self.request
        while under_way:
            under_way.popleft()[0].wait()
            marks.append(time.perf_counter())
        elapsed = time.perf_counter() - begun
        quarter = max(1, len(marks) // 4)
        first = quarter * self.request / (marks[quarter - 1] - begun)
        last = quarter * self.request / max(1e-9, marks[-1] - (marks[-quarter - 1] if len(marks) > quarter else begun))
        return Rate(nbytes=moved, seconds=elapsed, cpu_seconds=_cpu_seconds() - cpu, first=first, last=last)

    def _requests(self, pattern: str, *, endless: bool) -> Iterator[tuple[bool, int]]:
        """(whether to write, offset) of each request; mixed: the first half is read while the second is written."""
        count = self.nbytes // self.request
        while True:
            for number in range(count):
                if pattern == "mixed":
                    write = number % 2 == 1
                    yield write, (number // 2 + (count // 2 if write else 0)) * self.request
                else:
                    yield pattern == "write", number * self.request
            if not endless:
                return

    def close(self) -> None:
        self._store.close()
        self._buffers.clear()
        self._memory.close()

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
