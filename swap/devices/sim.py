"""A simulated accelerator on host memory, whose ordering mistakes give NaN instead of luck.

- Device memory is apart from host memory, capped, and full of 0xFF bytes (NaN in every float format) when a buffer is
  handed out and again from the moment it dies.
- Each copy stream is one worker thread that runs its copies in order, each after a seeded random delay.
- ``dst`` is poisoned when a copy is *issued*: whoever reads it without waiting sees NaN, not plausible old contents.
- A copy works on raw addresses, as DMA does, and keeps no device buffer alive. A source elsewhere (autograd's tensors,
  host pools) is kept for memory safety; if nobody else holds it any more when the copy runs, poison is delivered.

Computation is the host's and synchronous, so ``record`` is always done and ``compute_wait`` blocks the caller.
"""

from __future__ import annotations

import ctypes
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .arena import POISON, HostArena
from .cpu import host_memory_info
from .protocol import COMPLETED, CopyError, Device, Event, check_copy

DEFAULT_DELAY = 1e-3  # seconds
_POLL = 0.05  # seconds between looks at close() while a worker waits for a foreign event
_H2D, _D2H = 0, 1

# Undocumented in torch; without it a dropped source outside the arena is copied as if it were alive.
_use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


def _memmove(dst: int, src: int, nbytes: int) -> None:
    ctypes.memmove(dst, src, nbytes)  # releases the GIL


class _SimEvent(Event):
    """Completion of one queued copy. ``clock`` counts, per stream, the copies that end before this event."""

    __slots__ = ("_error", "_flag", "_what", "clock")

    def __init__(self, what: str, clock: tuple[int, int]) -> None:
        self._flag = threading.Event()
        self._error: BaseException | None = None
        self._what = what
        self.clock = clock

    def done(self) -> bool:
        return self._flag.is_set()

    def wait(self, timeout: float | None = None) -> None:
        if not self._flag.wait(timeout):
            raise TimeoutError(f"{self._what} has not ended within {timeout} seconds")
        if self._error is not None:
            raise CopyError(f"{self._what} failed: {self._error}") from self._error

    def finish(self, error: BaseException | None) -> None:
        if error is not None:
            self._error = error.with_traceback(None)  # its frames would keep tensors alive
        self._flag.set()


class _Kept:
    """One Storage outside the arena that queued copies read or write, held once for all of them."""

    def __init__(self, tensor: Tensor) -> None:
        self.storage = tensor.untyped_storage()
        self.copies = 0

    def only_ours(self) -> bool:
        """Whether neither a tensor nor a Python name holds the Storage besides this object."""
        return _use_count is not None and _use_count(self.storage._cdata) == 1 and sys.getrefcount(self.storage) <= 2


@dataclass(slots=True, eq=False)
class _Copy:
    """One queued copy, on raw addresses."""

    stream: int
    sequence: int
    dst: int
    src: int
    nbytes: int
    after: tuple[Event, ...]
    delay: float
    event: _SimEvent
    poison_late: bool
    source: _Kept | None = None
    kept: list[_Kept] = field(default_factory=list)

    def reads(self, address: int, nbytes: int) -> bool:
        return self.src < address + nbytes and address < self.src + self.nbytes

    def run(self) -> None:
        if self.source is not None and self.source.only_ours():
            ctypes.memset(self.dst, POISON, self.nbytes)
        else:
            _memmove(self.dst, self.src, self.nbytes)


class _Stream:
    """A worker thread that runs copies in the order of their submission."""

    def __init__(self, name: str, retire: Callable[[_Copy], None]) -> None:
        self.name = name
        self._retire = retire
        self._jobs: deque[_Copy] = deque()
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._paused = False
        self._thread = threading.Thread(target=self._work, name=f"sim-{name}", daemon=True)
        self._thread.start()

    def submit(self, job: _Copy) -> None:
        with self._changed:
            if self._stop.is_set():
                raise RuntimeError("the sim device is closed; it copies no more")
            self._jobs.append(job)
            self._changed.notify()

    def pause(self, paused: bool) -> None:
        with self._changed:
            self._paused = paused
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._stop.set()
            self._changed.notify()
        self._thread.join()
        while self._jobs:
            self._end(self._jobs.popleft(), _closed())

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._stop.is_set() and (self._paused or not self._jobs):
                    self._changed.wait()
                if self._stop.is_set():
                    return
                job = self._jobs.popleft()
            error: BaseException | None = None
            try:
                self._run(job)
            except BaseException as caught:
                error = caught
            self._end(job, error)
            del job, error

    def _run(self, job: _Copy) -> None:
        for event in job.after:
            while not event.done():
                if self._stop.is_set():
                    raise _closed()
                try:
                    event.wait(_POLL)
                except TimeoutError:
                    continue
            event.wait()  # an error of what came before is ours too
        if job.poison_late:
            ctypes.memset(job.dst, POISON, job.nbytes)
        if job.delay > 0:
            self._stop.wait(job.delay)
        if self._stop.is_set():
            raise _closed()
        job.run()

    def _end(self, job: _Copy, error: BaseException | None) -> None:
        self._retire(job)  # first, so that whoever waited finds nothing of the copy left
        job.event.finish(error)


def _closed() -> RuntimeError:
    return RuntimeError("the device was closed before the copy ran")


class SimDevice(Device):
    """``delay`` is the longest pause before a copy in seconds, or a (shortest, longest) pair; 0 means none.

    Each stream draws its delays when copies are issued, from its own generator seeded with ``seed``. For tests,
    ``delay`` can be assigned at any time, and ``pause()`` holds copies back until ``resume()``.
    """

    kind = "sim"
    aliases_host = False

    def __init__(
        self, *, capacity: int | None = None, seed: int = 0, delay: float | tuple[float, float] = DEFAULT_DELAY
    ) -> None:
        self.torch_device = torch.device("cpu")
        self.capacity = capacity
        self.delay = delay
        self._lock = threading.Lock()
        self._queued: dict[int, _Copy] = {}  # id -> copy issued and not ended
        self._kept: dict[int, _Kept] = {}  # StorageImpl address -> hold
        self._issued = [0, 0]
        self._clocks = [(0, 0), (0, 0)]  # of the last copy on each stream
        self._random = [random.Random(f"{seed}/h2d"), random.Random(f"{seed}/d2h")]
        # A dead buffer may be unmapped only once no queued copy can still use its address.
        self._arena = HostArena(self.kind, capacity, poison=True, can_unmap=lambda: not self._queued)
        self._streams = [_Stream("h2d", self._retire), _Stream("d2h", self._retire)]

    @property
    def delay(self) -> tuple[float, float]:
        """(shortest, longest) pause before a copy, in seconds; assign a number for (0, number)."""
        return self._delay

    @delay.setter
    def delay(self, value: float | tuple[float, float]) -> None:
        low, high = value if isinstance(value, tuple) else (0.0, value)
        if not 0 <= low <= high:
            raise ValueError(f"delay must be seconds or a rising pair of seconds, not below 0, got {value!r}")
        self._delay = (low, high)

    def pause(self) -> None:
        """Hold back the copies that have not begun."""
        for stream in self._streams:
            stream.pause(True)

    def resume(self) -> None:
        """Let the copies run again."""
        for stream in self._streams:
            stream.pause(False)

    def empty(self, nbytes: int, *, what: str = "") -> Tensor:
        return self._arena.empty(nbytes, what)

    @property
    def used(self) -> int:
        return self._arena.used

    @property
    def peak(self) -> int:
        return self._arena.peak

    def copy_in(self, dst: Tensor, src: Tensor, *, after: Sequence[Event] = ()) -> Event:
        return self._issue(_H2D, dst, src, after)

    def copy_out(self, dst: Tensor, src: Tensor, *, after: Sequence[Event] = ()) -> Event:
        return self._issue(_D2H, dst, src, after)

    def record(self) -> Event:
        return COMPLETED

    def compute_wait(self, event: Event) -> None:
        event.wait()

    def synchronize(self) -> None:
        with self._lock:
            events = [job.event for job in self._queued.values()]
        for event in events:
            event._flag.wait()

    def close(self) -> None:
        for stream in self._streams:
            stream.close()
        self._arena.close()

    def memory_info(self) -> tuple[int, int]:
        return host_memory_info(self.capacity, self.used)

    def _issue(self, stream: int, dst: Tensor, src: Tensor, after: Sequence[Event]) -> Event:
        nbytes = check_copy(dst, src)
        dst_address, src_address = dst.data_ptr(), src.data_ptr()
        if nbytes and dst_address < src_address + nbytes and src_address < dst_address + nbytes:
            raise ValueError(f"dst and src of a copy overlap in memory ({nbytes:,} bytes)")
        with self._lock:
            job = self._plan(stream, dst_address, src_address, nbytes, tuple(after))
            if not self._arena.owns(src):
                job.source = self._keep(job, src)
            if not self._arena.owns(dst):
                self._keep(job, dst)
            self._queued[id(job)] = job
            try:
                if nbytes and not job.poison_late:
                    ctypes.memset(dst_address, POISON, nbytes)
                self._streams[stream].submit(job)  # under the lock: the queue keeps the order of the sequence numbers
            except BaseException:
                self._forget(job)
                raise
            return job.event

    def _plan(self, stream: int, dst: int, src: int, nbytes: int, after: tuple[Event, ...]) -> _Copy:
        self._issued[stream] += 1
        sequence = self._issued[stream]
        clocks = [self._clocks[stream], *(event.clock for event in after if isinstance(event, _SimEvent))]
        clock = [max(entries) for entries in zip(*clocks, strict=True)]
        clock[stream] = sequence
        self._clocks[stream] = (clock[0], clock[1])
        # A queued copy that reads `dst` and is ordered before this one is no mistake: it must find its data, so the
        # poison waits until it has run. Without that order the poison is written now, and its reader gets it.
        readers = [job for job in self._queued.values() if job.reads(dst, nbytes)]
        late = bool(readers) and all(job.sequence <= clock[job.stream] for job in readers)
        name = f"copy {sequence} {'to' if stream == _H2D else 'from'} the sim device ({nbytes:,} bytes)"
        return _Copy(
            stream=stream,
            sequence=sequence,
            dst=dst,
            src=src,
            nbytes=nbytes,
            after=after,
            delay=self._random[stream].uniform(*self._delay),
            event=_SimEvent(name, self._clocks[stream]),
            poison_late=late,
        )

    def _keep(self, job: _Copy, tensor: Tensor) -> _Kept:
        key = tensor.untyped_storage()._cdata
        kept = self._kept.get(key)
        if kept is None:
            kept = self._kept[key] = _Kept(tensor)
        kept.copies += 1
        job.kept.append(kept)
        return kept

    def _retire(self, job: _Copy) -> None:
        with self._lock:
            dropped = self._forget(job)
        del dropped  # after the lock: the last hold on a Storage runs its owner's finalizers

    def _forget(self, job: _Copy) -> list[_Kept]:
        del self._queued[id(job)]
        dropped = []
        for kept in job.kept:
            kept.copies -= 1
            if not kept.copies:
                dropped.append(self._kept.pop(kept.storage._cdata))
        job.kept.clear()
        job.source = None
        job.after = ()
        return dropped
