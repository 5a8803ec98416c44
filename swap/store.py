"""The swap store: extents of memory on disk, written and read in the background."""

from __future__ import annotations

import errno
import os
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from swap.bounce import BouncePool
from swap.budget import Budget, Reservation
from swap.checksums import BYTES_PER_PAGE, PageChecksums
from swap.deferred import DeferredLock
from swap.engines import create_engine, resolve_engine
from swap.engines.protocol import Engine, Request, System
from swap.engines.system import OperatingSystem
from swap.errors import BudgetError, SwapError, SwapPathError
from swap.extents import Extent
from swap.faults import FaultPlan
from swap.files import SwapFile, check_path, open_swap_file
from swap.geometry import PAGE, align_up
from swap.pieces import Cutter, Piece, Region, bytes_of_buffer, bytes_to_sum, read_last_page_whole
from swap.promises import Promise
from swap.space import SwapSpace
from swap.stats import SwapStats
from swap.tickets import Ticket, fresh, strip_frames
from swap.transfer import Observer, Transfer
from swap.wear import WearLedger

DEFAULT_BLOCK = 1024 * 1024
"""Bytes of one request; larger ones gain nothing on the drives measured and delay those behind them."""

DEFAULT_QUEUE_DEPTH = 4
"""Blocks in flight per path."""

DEFAULT_TIMEOUT = 15.0
"""Seconds without an answer after which a block is an error; a healthy drive answers within one."""

STRIPE = 4 * 1024 * 1024
"""Bytes of an extent on one path before the next path takes over."""

_CLOSE_SECONDS = 2.0


class SwapStore:
    """Swap files under ``paths`` (existing directories) and the extents in them. Thread-safe.

    - ``engine``: "auto", "io_uring", "threads" or "aiofiles"; ``block``: bytes per request to the kernel;
      ``queue_depth``: blocks in flight per path; ``timeout``: seconds without an answer that are an error (0: never);
      ``burst``: bytes read, or written, before the other direction has its turn (0: priorities alone decide).
    - ``capacity``: bytes that the store may take on all paths together; free space for them is checked here.
    - ``budget``: charged on its "nvme" tier for every extent, on "host" for the few bounce pages.
    - ``direct``: "auto" probes O_DIRECT path by path; True insists on it; False never uses it.
    - ``checksum``: every read is compared with the CRC32C of what was written; ``BYTES_PER_PAGE`` bytes of host memory
      for every page of an extent, charged as "checksums".
    - ``endurance``: bytes that each drive may be written in its life; a run that takes much of it is warned once.
    - ``weights``: for each path, its bandwidth relative to the others: long extents are dealt out accordingly.
    - ``faults``: a fault plan to inject beneath the engine. ``owner``: a word for thread names.

    Raises SwapPathError (a ValueError) for a path that is missing, unwritable, too small or, with ``direct=True``,
    without direct I/O. Ordering is the caller's duty: a read of bytes whose write has not completed may return
    either. After the first failed request the store is failed: it cancels what is queued, and every later submission
    raises that error. Only ``free`` may be called from finalizers.
    """

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        *,
        engine: str = "auto",
        capacity: int | None = None,
        budget: Budget | None = None,
        block: int | None = None,
        queue_depth: int | None = None,
        direct: str | bool = "auto",
        timeout: float | None = None,
        burst: int = 0,
        checksum: bool = False,
        endurance: int | None = None,
        weights: Sequence[float] | None = None,
        faults: FaultPlan | None = None,
        owner: str = "",
    ) -> None:
        timeout = DEFAULT_TIMEOUT if timeout is None else timeout
        block = DEFAULT_BLOCK if block is None else block
        queue_depth = DEFAULT_QUEUE_DEPTH if queue_depth is None else queue_depth
        roots = _check_arguments(paths, engine, capacity, block, queue_depth, direct)
        if timeout < 0:
            raise ValueError(f"swap.timeout must not be negative, got {timeout}")
        if burst < 0:
            raise ValueError(f"swap.burst must not be negative, got {burst}")
        self._paths = tuple(str(root) for root in roots)
        if endurance is not None and endurance <= 0:
            raise ValueError(f"swap.endurance_tbw must be positive, got {endurance} bytes")
        if weights is not None and (len(weights) != len(roots) or not all(weight > 0 for weight in weights)):
            raise ValueError(f"{len(roots)} paths need as many positive weights, got {list(weights)}")
        self._wear = WearLedger(self._paths, endurance)
        budget = Budget({}) if budget is None else budget
        system: System = OperatingSystem() if faults is None else faults.wrap(OperatingSystem())
        self._core = _Core(budget, system, block, checksum, self._wear, weights)
        # The core knows nothing of this object: a store that was forgotten is closed by the finalizer.
        self._finalizer = weakref.finalize(self, self._core.close)
        try:
            self._core.open(roots, direct, capacity, engine, queue_depth, timeout, burst, owner)
        except BaseException:
            self.close()
            raise

    @property
    def stats(self) -> SwapStats:
        """Live counters of this store."""
        return self._core.stats

    @property
    def engine(self) -> str:
        """Name of the engine at work."""
        return self._core.engine_name

    @property
    def paths(self) -> tuple[str, ...]:
        """The directories given, absolute, in order."""
        return self._paths

    @property
    def direct(self) -> tuple[bool, ...]:
        """For each path, whether O_DIRECT is in use."""
        return tuple(file.direct for file in self._core.files)

    @property
    def block(self) -> int:
        """Bytes of one request at most."""
        return self._core.block

    @property
    def file_bytes(self) -> int:
        """Bytes that the swap files take on disk, used or not."""
        return self._core.space.file_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes in extents."""
        with self._core.lock:
            return self._core.space.used_bytes

    @property
    def wear(self) -> WearLedger:
        """What is known of the drives' endurance; ``stats.path_write_bytes`` is what its methods want."""
        return self._wear

    @property
    def observer(self) -> Observer | None:
        """Told of every request that ends, with times and bytes; None (the default) costs nothing."""
        return self._core.observer

    @observer.setter
    def observer(self, observer: Observer | None) -> None:
        self._core.observer = observer

    @property
    def closed(self) -> bool:
        return self._core.closed

    def reserve_capacity(self, nbytes: int) -> None:
        """Make sure that the files can come to ``nbytes`` in all, and count on it from now on.

        SwapPathError, with needed and free bytes, if the disks lack them or other stores of this process were
        promised them. Nothing is written; allocation takes the space later.
        """
        self._core.check_usable()
        with self._core.lock:
            more = max(0, nbytes - self._core.space.file_bytes)
            self._core.promise.request(more, self._core.files)

    def grow(self, nbytes: int) -> None:
        """Let the files come to ``nbytes`` more than the capacity so far; without one nothing changes.

        SwapPathError, with needed and free bytes, if the disks lack them. The budget's limit holds as before.
        """
        self._core.check_usable()
        with self._core.lock:
            if self._core.space.capacity is not None:
                capacity = self._core.space.capacity + nbytes
                self._core.promise.request(max(0, capacity - self._core.space.file_bytes), self._core.files)
                self._core.space.capacity = capacity

    def allocate(self, nbytes: int, label: str = "", *, kind: str = "swap") -> Extent:
        """An extent of ``nbytes`` rounded up to whole pages, with real disk blocks where the filesystem has them.

        BudgetError beyond the nvme budget or the capacity; SwapIOError ("allocate") if the disks are full, which
        leaves the store usable.
        """
        if nbytes < 0:
            raise ValueError(f"{label or 'extent'}: cannot allocate {nbytes} bytes")
        return self._core.allocate(align_up(nbytes, PAGE), label, kind)

    def free(self, extent: Extent) -> None:
        """Give an extent back. Its I/O must have ended. SwapError if it is not allocated here (any more)."""
        self._core.free(extent)

    def read(
        self,
        extent: Extent,
        buffer: torch.Tensor | Region,
        *,
        offset: int = 0,
        nbytes: int | None = None,
        priority: int = 0,
    ) -> Ticket:
        """Start reading bytes ``[offset, offset + nbytes)`` of ``extent`` into the start of ``buffer``.

        ``buffer`` is a contiguous CPU tensor of any dtype, or a region; ``nbytes`` defaults to all of it; ``offset`` is
        a multiple of 4096. Exactly ``nbytes`` of the buffer are written. Lower ``priority`` is served first. Direct
        transfers want a page-aligned buffer and whole pages; anything else is right too, but copied once more.
        ValueError for a range outside the extent or an unfit buffer.
        """
        return self._core.start(extent, buffer, offset, nbytes, priority, write=False)

    def write(
        self,
        extent: Extent,
        buffer: torch.Tensor | Region,
        *,
        offset: int = 0,
        nbytes: int | None = None,
        priority: int = 0,
    ) -> Ticket:
        """Start writing the first ``nbytes`` of ``buffer`` to ``extent`` at ``offset``; arguments as for ``read``.

        The buffer must not change before the ticket is done. The rest of the last page becomes undefined.
        """
        return self._core.start(extent, buffer, offset, nbytes, priority, write=True)

    def register_memory(self, buffer: torch.Tensor) -> None:
        """``buffer`` will be transferred often: let the engine pin it, if that helps and the system has room.

        It must stay alive until ``unregister_memory`` or ``close``. Never fails: at worst transfers cost the same.
        """
        self._core.check_usable()
        self._core.register(buffer.data_ptr(), buffer.numel() * buffer.element_size())

    def unregister_memory(self, buffer: torch.Tensor) -> None:
        """The opposite of ``register_memory``."""
        self._core.unregister(buffer.data_ptr())

    def close(self) -> None:
        """Cancel what is queued, let system calls under way end (2 s at most), close and free all. Idempotent."""
        self._core.close()
        if self._core.fully_closed:
            self._finalizer.detach()

    def __enter__(self) -> SwapStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _check_arguments(
    paths: Sequence[str | os.PathLike[str]],
    engine: str,
    capacity: int | None,
    block: int,
    queue_depth: int,
    direct: str | bool,
) -> list[Path]:
    resolve_engine(engine)
    if isinstance(paths, (str, os.PathLike)):
        raise ValueError(f"memory.nvme_paths must be a list of directories, got {paths!r}")
    if not paths:
        raise ValueError("memory.nvme_paths is empty: a swap store needs at least one directory")
    if block <= 0 or block % PAGE:
        raise ValueError(f"swap.block must be a positive multiple of {PAGE} bytes, got {block}")
    if queue_depth < 1:
        raise ValueError(f"swap.queue_depth must be at least 1, got {queue_depth}")
    if direct != "auto" and not isinstance(direct, bool):
        raise ValueError(f"swap.direct must be \"auto\", true or false, got {direct!r}")
    if capacity is not None and capacity < 0:
        raise ValueError(f"memory.nvme must not be negative, got {capacity}")
    roots: list[Path] = []
    for path in paths:
        root = Path(path).absolute()
        check_path(root)
        if any(os.path.samefile(root, other) for other in roots):
            raise SwapPathError(f"swap path {str(path)!r} is listed twice in memory.nvme_paths", path=str(path))
        roots.append(root)
    return roots


class _Core:
    """All resources of a store. Requests refer to it, it never refers to the store."""

    def __init__(
        self,
        budget: Budget,
        system: System,
        block: int,
        checksum: bool,
        wear: WearLedger,
        weights: Sequence[float] | None,
    ) -> None:
        self.checksum = checksum
        self.wear = wear
        self.weights = weights
        self.budget = budget
        self.system = system
        self.block = block
        self.files: list[SwapFile] = []
        self.promise = Promise()
        self.space = SwapSpace((), system, stripe=STRIPE, capacity=None)
        self.stats = SwapStats(())
        self.engine_name = ""
        self.closed = False
        self.fully_closed = False
        self.error: BaseException | None = None
        self.observer: Observer | None = None
        self.lock: DeferredLock[tuple[Extent, _Holding]] = DeferredLock(self._give_back)
        self._live: dict[Extent, _Holding] = {}
        self._engine: Engine | None = None
        self._bounce: BouncePool | None = None
        self._cutter = Cutter((), block, ())
        self._error_lock = threading.Lock()
        self._pid = os.getpid()

    def open(
        self,
        roots: Sequence[Path],
        direct: str | bool,
        capacity: int | None,
        engine: str,
        depth: int,
        timeout: float,
        burst: int,
        owner: str,
    ) -> None:
        for root in roots:
            self.files.append(open_swap_file(root, direct))
        limits = [limit for limit in (capacity, self.budget.limit("nvme")) if limit is not None]
        stripe = align_up(STRIPE, self.block)
        self.space = SwapSpace(
            self.files, self.system, stripe=stripe, capacity=min(limits, default=None), weights=self.weights
        )
        self.stats = SwapStats([str(root) for root in roots], weights=self.weights)
        # Each path has its own queue's worth of blocks: a slow drive must not keep the others waiting.
        depth *= len(roots)
        if capacity is not None:
            self.promise.request(capacity, self.files)
        self._bounce = BouncePool(depth if any(file.direct for file in self.files) else 0, self.budget)
        self._engine = create_engine(
            engine if any(file.direct for file in self.files) or engine != "auto" else "threads",
            system=self.system,
            bounce=self._bounce,
            queue_depth=depth,
            block=self.block,
            owner=owner or "store",
            timeout=timeout,
            burst=burst,
        )
        for file in self.files:
            self._engine.add_file(file)
        self._cutter = Cutter(self.files, self.block, [self._engine.splits(file) for file in self.files])
        self.engine_name = self._engine.name

    def check_usable(self) -> None:
        self._check_process()
        if self.closed:
            raise SwapError("the swap store is closed")
        if self.error is not None:
            raise fresh(self.error)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise SwapError(f"the swap store belongs to process {self._pid}; a forked child cannot use it")

    def allocate(self, nbytes: int, label: str, kind: str) -> Extent:
        self.check_usable()
        holding = _Holding([self.budget.reserve("nvme", kind, nbytes, what=label)])
        try:
            if self.checksum:
                table = nbytes // PAGE * BYTES_PER_PAGE
                holding.reservations.append(self.budget.reserve("host", "checksums", table, what=label))
                holding.sums = PageChecksums(nbytes)
            with self.lock:
                before = [file.size for file in self.files]
                try:
                    segments = self.space.allocate(nbytes)
                finally:
                    for file, size in zip(self.files, before, strict=True):
                        self.promise.kept(file.device, file.size - size)
                if segments is None:
                    raise BudgetError(
                        tier="nvme",
                        kind=kind,
                        requested=nbytes,
                        used=self.space.used_bytes,
                        limit=self.space.capacity or 0,
                        what=label,
                    )
            extent = Extent(segments=segments, nbytes=nbytes, label=label)
            self._live[extent] = holding
        except BaseException:
            holding.release()
            raise
        return extent

    def free(self, extent: Extent) -> None:
        self._check_process()
        # One atomic pop decides, so that this works in a finalizer too.
        holding = self._live.pop(extent, None)
        if holding is not None:
            self.lock.post((extent, holding))
        elif not self.closed:
            raise SwapError(f"extent {extent.label!r} of {extent.nbytes} bytes is not allocated in this store")

    def _give_back(self, item: tuple[Extent, _Holding]) -> None:
        extent, holding = item
        self.space.give(extent.segments)
        holding.release()

    def start(
        self,
        extent: Extent,
        buffer: torch.Tensor | Region,
        offset: int,
        nbytes: int | None,
        priority: int,
        *,
        write: bool,
    ) -> Ticket:
        self.check_usable()
        available = bytes_of_buffer(buffer, extent.label)
        nbytes = available if nbytes is None else nbytes
        holding = self._live.get(extent)
        if holding is None:
            raise SwapError(f"extent {extent.label!r} of {extent.nbytes} bytes is not allocated in this store")
        if offset < 0 or offset % PAGE:
            raise ValueError(f"extent {extent.label!r}: offset {offset} is not a multiple of {PAGE} bytes")
        if not 0 <= nbytes <= available:
            raise ValueError(f"extent {extent.label!r}: {nbytes} bytes asked of a buffer of {available} bytes")
        if offset + nbytes > extent.nbytes:
            raise ValueError(
                f"extent {extent.label!r}: bytes {offset} to {offset + nbytes} are beyond its {extent.nbytes} bytes"
            )
        pieces = self._cutter.cut(extent, buffer, offset, nbytes, write=write)
        sums = holding.sums
        if sums is not None and nbytes:
            if write:
                sums.record(offset, bytes_to_sum(buffer, nbytes))
            else:
                read_last_page_whole(pieces, sums)
        ticket = Ticket(len(pieces), buffer)
        origin = None if self.observer is None else (extent.label, time.perf_counter_ns())
        for piece in pieces:
            self.stats.begin(write=write, path=piece.path)
            request = Request(
                file=self.files[piece.path],
                offset=piece.position,
                view=piece.view,
                write=write,
                done=_Completion(self, ticket, piece, sums, origin),
                priority=priority,
                bounce=piece.bounce,
                address=piece.address,
            )
            try:
                self._submit(request)
            except SwapError as error:
                # Closed meanwhile. Parts may be under way, so the caller gets a ticket to wait for, with the error.
                request.done(request, error)
        return ticket

    def _submit(self, request: Request) -> None:
        if self._engine is None:
            raise SwapError("the swap store is closed")
        if self.error is not None:
            raise fresh(self.error)
        self._engine.submit(request)

    def register(self, address: int, nbytes: int) -> None:
        if self._engine is not None and nbytes:
            self._engine.register(address, nbytes)

    def unregister(self, address: int) -> None:
        if self._engine is not None and not self.closed:
            self._engine.unregister(address)

    def fail(self, error: BaseException) -> None:
        """Remember the first error and end what is queued with it."""
        with self._error_lock:
            if self.error is not None:
                return
            self.error = error
        if self._engine is not None:
            self._engine.cancel(error)

    def close(self) -> None:
        """See ``SwapStore.close``. Every step is idempotent, so that an interrupted close can be repeated."""
        if os.getpid() != self._pid or self.fully_closed:
            return
        self.closed = True
        idle = self._engine is None or self._engine.close(_CLOSE_SECONDS)
        while self._live:
            try:
                _, holding = self._live.popitem()
            except KeyError:
                break
            holding.release()
        self.promise.release()
        if not idle:
            # A system call hangs. Closing its descriptor now could hand its number to another file.
            return
        for file in self.files:
            file.close()
        if self._bounce is not None:
            self._bounce.close()
        self.fully_closed = True


@dataclass(slots=True, eq=False)
class _Holding:
    """What an allocated extent has taken, and the checksums of what was written to it."""

    reservations: list[Reservation]
    sums: PageChecksums | None = None

    def release(self) -> None:
        for reservation in self.reservations:
            reservation.release()


_NO_BYTES = memoryview(b"")


class _Completion:
    """Ends one request: checksum, counters, the store's failure, then the ticket, in this order."""

    __slots__ = ("_core", "_origin", "_piece", "_sums", "_ticket")

    def __init__(
        self,
        core: _Core,
        ticket: Ticket,
        piece: Piece,
        sums: PageChecksums | None,
        origin: tuple[str, int] | None = None,
    ) -> None:
        self._core = core
        self._ticket = ticket
        self._piece = piece
        self._sums = sums
        self._origin = origin  # label and time of submission, if somebody observes

    def __call__(self, request: Request, error: BaseException | None) -> None:
        if error is None and not request.write and self._sums is not None:
            error = self._verify(request, self._sums)
        moved = 0 if error is not None else request.view.nbytes
        stats = self._core.stats
        stats.end(write=request.write, path=self._piece.path, nbytes=moved, bounced=request.bounce)
        observer = self._core.observer
        if observer is not None and self._origin is not None:
            label, begun = self._origin
            observer(Transfer(label, request.write, self._piece.path, moved, begun, time.perf_counter_ns()))
        if request.write and stats.path_write_bytes[self._piece.path] > self._core.wear.threshold:
            self._core.wear.check(stats.path_write_bytes)
        if error is not None:
            strip_frames(error)
            # Only what the request itself met fails the store; a cancelled one says "closed", or the first error.
            if type(error) is not SwapError:
                self._core.fail(error)
        else:
            # The thread that ends the request still has it for a moment: whoever wakes is then the memory's last owner.
            # A failed one keeps its memory, because a drive that was given up may yet write to it.
            request.view = self._piece.view = _NO_BYTES
            self._piece.target = None
        self._ticket.finish_part(error)

    def _verify(self, request: Request, sums: PageChecksums) -> BaseException | None:
        piece = self._piece
        try:
            bad = sums.check(piece.inside, request.view)
        except Exception as failure:
            return failure
        if bad is not None:
            offset, what = bad
            cause = OSError(errno.EBADMSG, os.strerror(errno.EBADMSG))
            return request.failure(
                cause, f"{what} (swap.checksum)", offset=piece.position + offset - piece.inside, nbytes=PAGE
            )
        if piece.target is not None:
            piece.target[:] = request.view[: piece.target.nbytes]
        return None
