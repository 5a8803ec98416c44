"""What an I/O engine is: it moves the bytes of requests and reports each one once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from swap.errors import SwapIOError

PATIENCE = 1 << 30
"""Bytes. ``kPatience`` of csrc/transfers.cpp is the same."""


BURST = 64 << 20
"""Bytes. What suits a drive that does one thing at a time: long against a turn, short against a unit's weights.

[Note: bursts] With a burst of n bytes an engine reads until n bytes are read before it turns to writes that wait, and
the other way round, whatever their priorities: an urgent read waits for n bytes of writes at most, beside the blocks
that are under way. Within a direction priorities order as ever. Without (0) only priorities decide.
"""


class Priority(IntEnum):
    """Which requests are served first: the lower number, but a request of a higher one does not wait for ever.

    [Note: ageing] A request stands in line as if it had come ``priority * PATIENCE`` bytes of requests later. So
    later requests of a priority n lower overtake it only until n * PATIENCE bytes have come after it.
    """

    WEIGHT_READ = 0
    STATE_READ = 1
    STATE_WRITE = 2
    SPILL = 3


class RequestFile(Protocol):
    """The swap file of a request."""

    @property
    def fd(self) -> int:
        """Open for reading and writing, with O_DIRECT if ``direct``."""

    @property
    def path(self) -> str:
        """Where the user put it, for messages (the file itself is usually anonymous)."""

    @property
    def direct(self) -> bool:
        """Address, offset and length of every transfer must be multiples of a page."""

    def settle(self, offset: int, nbytes: int, *, write: bool) -> None:
        """Call after each finished transfer, from a thread that may block: keeps the page cache small. May raise."""


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One contiguous transfer between ``view`` and ``file`` at ``offset`` (bytes).

    ``view`` is flat, of format "B", and keeps its memory alive. ``bounce``: the file is direct but address or length
    are not whole pages; the file range rounded up to whole pages is free to be written. Lower ``priority`` is served
    first, equal ones in order of submission. ``done`` is called once, from any thread: with None, or with the
    exception that ended the request. It must not block and does not raise. ``address`` is that of ``view``, 0 if the
    submitter did not look it up.
    """

    file: RequestFile
    offset: int
    view: memoryview
    write: bool
    done: Callable[[Request, BaseException | None], None]
    priority: int = 0
    bounce: bool = False
    address: int = 0

    @property
    def operation(self) -> str:
        return "write" if self.write else "read"

    def failure(
        self, cause: OSError | None, detail: str = "", *, offset: int | None = None, nbytes: int | None = None
    ) -> SwapIOError:
        """The error of this request, for a failed system call or for something wrong in its result.

        ``offset`` and ``nbytes`` narrow it to a part of the request.
        """
        error = SwapIOError(
            operation=self.operation,
            path=self.file.path,
            offset=self.offset if offset is None else offset,
            nbytes=self.view.nbytes if nbytes is None else nbytes,
            errno=None if cause is None else cause.errno,
            detail=detail,
        )
        error.__cause__ = cause
        return error


class Engine(Protocol):
    """Serves requests concurrently and out of order.

    Two requests on the same bytes are in flight together if they were submitted together: ordering is the caller's.
    Every submitted request ends in exactly one ``done`` call, also after ``cancel`` and ``close``.
    """

    @property
    def name(self) -> str: ...

    def splits(self, file: RequestFile) -> bool:
        """Whether requests on ``file`` may be of any size, because the engine cuts them into blocks itself."""

    def add_file(self, file: RequestFile) -> None:
        """Requests on ``file`` will come."""

    def register(self, address: int, nbytes: int) -> None:
        """Transfers will often use this memory: prepare it, if that helps and the system lets us. Never fails."""

    def unregister(self, address: int) -> None:
        """The memory registered at ``address`` is about to be unmapped."""

    def submit(self, request: Request) -> None:
        """Queue a request; never blocks. SwapError after ``close``."""

    def cancel(self, error: BaseException) -> int:
        """End all requests that no thread has begun with ``error``; returns how many."""

    def close(self, timeout: float) -> bool:
        """Cancel what has not begun, let the rest end, join the threads. Idempotent.

        False if a system call was still running after ``timeout`` seconds: the files must then stay open.
        """


class System(Protocol):
    """The system calls beneath the engines; the fault layer stands here. Results and errors are those of the OS."""

    def pread_into(self, fd: int, view: memoryview, offset: int) -> int: ...

    def pwrite_from(self, fd: int, view: memoryview, offset: int) -> int: ...

    def fallocate(self, fd: int, offset: int, nbytes: int) -> None: ...


class BounceSource(Protocol):
    """Lends page-aligned scratch memory to one transfer at a time."""

    def borrow(self, nbytes: int) -> memoryview:
        """A page-aligned view of at least a page and at most ``nbytes`` rounded up; never fails nor waits."""

    def give_back(self, view: memoryview) -> None: ...
