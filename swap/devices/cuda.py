"""CUDA behind the device protocol: two streams, torch's caching allocator, torch's events.

Nothing here guesses which stream computes: work is ordered against the *current* stream of the calling thread at the
moment of the call, because autograd runs hooks on threads and streams of its own.
"""

from __future__ import annotations

import threading
import time
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .protocol import COMPLETED, CopyError, Device, DeviceOutOfMemory, Event, check_copy, check_size

_cuda: Any = torch.cuda  # only partly annotated

REGISTER_CHUNK = 1 << 30  # bytes; one huge cudaHostRegister fails where several smaller ones pass
_FIRST_NAP, _LONGEST_NAP = 20e-6, 1e-3  # seconds between looks at an event


class _CudaEvent(Event):
    __slots__ = ("_error", "recorded")

    def __init__(self, recorded: torch.cuda.Event) -> None:
        self.recorded: Any = recorded
        self._error: BaseException | None = None

    def done(self) -> bool:
        if self._error is not None:
            return True
        try:
            return bool(self.recorded.query())
        except RuntimeError as error:  # asynchronous faults of the device show up here
            self._error = error.with_traceback(None)
            return True

    def wait(self, timeout: float | None = None) -> None:
        # cudaEventSynchronize cannot be interrupted by signals, so look and sleep.
        deadline = None if timeout is None else time.monotonic() + timeout
        nap = _FIRST_NAP
        while not self.done():
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"work on the CUDA device has not ended within {timeout} seconds")
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP)
        if self._error is not None:
            raise CopyError(f"work on the CUDA device failed: {self._error}") from self._error


class CudaDevice(Device):
    """GPU ``index``. ``capacity`` caps the bytes of ``empty`` in bytes; the GPU's own memory does in any case."""

    kind = "cuda"
    aliases_host = False

    def __init__(self, *, capacity: int | None = None, index: int = 0) -> None:
        if not torch.cuda.is_available():
            raise ValueError("device is 'cuda' but torch finds no CUDA device; use 'cpu', 'sim' or 'auto'")
        if not 0 <= index < torch.cuda.device_count():
            raise ValueError(f"there is no CUDA device {index}; torch finds {torch.cuda.device_count()}")
        if capacity is not None and capacity < 0:
            raise ValueError(f"the capacity of the cuda device must not be negative, got {capacity} bytes")
        self.torch_device = torch.device("cuda", index)
        self.capacity = capacity
        self._h2d = _cuda.Stream(self.torch_device)
        self._d2h = _cuda.Stream(self.torch_device)
        self._lock = threading.Lock()
        self._running: deque[tuple[_CudaEvent, Tensor, Tensor]] = deque()
        self._returned: deque[int] = deque()  # sizes of dead buffers; finalizers take no lock
        self._used = 0
        self._peak = 0
        self._registered: dict[int, list[int]] = {}  # start -> chunk starts and the end
        self._closed = False

    def empty(self, nbytes: int, *, what: str = "") -> Tensor:
        check_size(nbytes, what)
        self._release_finished()
        with self._lock:
            if self._closed:
                raise RuntimeError(f"the cuda device is closed; {what or 'a buffer'} cannot be allocated")
            self._sort_in()
            if self.capacity is not None and self._used + nbytes > self.capacity:
                raise DeviceOutOfMemory(self.kind, what, nbytes, self._used, self.capacity)
            self._used += nbytes
            self._peak = max(self._peak, self._used)
        try:
            tensor = self._allocate(nbytes, what)
        except BaseException:
            self._returned.append(nbytes)
            raise
        finalizer = weakref.finalize(tensor.untyped_storage(), self._returned.append, nbytes)
        finalizer.atexit = False
        return tensor

    def _allocate(self, nbytes: int, what: str) -> Tensor:
        def attempt() -> Tensor:
            with torch.inference_mode(False):
                return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)

        try:
            return attempt()
        except torch.OutOfMemoryError:
            pass
        self.synchronize()  # ended copies may still hold buffers
        try:
            return attempt()
        except torch.OutOfMemoryError as error:
            others = self.used - nbytes  # ours was counted before it was asked for
            raise DeviceOutOfMemory(self.kind, what, nbytes, others, self.capacity, str(error)) from error

    @property
    def used(self) -> int:
        self._release_finished()
        with self._lock:
            self._sort_in()
            return self._used

    @property
    def peak(self) -> int:
        return self._peak

    def _sort_in(self) -> None:
        while self._returned:
            self._used -= self._returned.popleft()

    def copy_in(self, dst: Tensor, src: Tensor, *, after: Sequence[Event] = ()) -> Event:
        return self._copy(self._h2d, dst, src, src, after)

    def copy_out(self, dst: Tensor, src: Tensor, *, after: Sequence[Event] = ()) -> Event:
        return self._copy(self._d2h, dst, src, dst, after)

    def _copy(self, stream: torch.cuda.Stream, dst: Tensor, src: Tensor, host: Tensor, after: Sequence[Event]) -> Event:
        check_copy(dst, src)
        self._release_finished()
        for event in after:
            if not isinstance(event, _CudaEvent):
                event.wait()
        with self._lock:
            if self._closed:
                raise RuntimeError("the cuda device is closed; it copies no more")
            # One lock over wait, copy and record: another thread's copy between them would only add waiting, but the
            # order of issue within a stream is part of the protocol.
            stream.wait_event(self._record_current())
            for event in after:
                if isinstance(event, _CudaEvent):
                    stream.wait_event(event.recorded)
            # `.data` keeps the move out of autograd's version counters.
            flat_dst, flat_src = dst.data.view(-1), src.data.view(-1)
            with torch.cuda.stream(stream):
                for begin, end in self._pieces(host):
                    flat_dst[begin:end].copy_(flat_src[begin:end], non_blocking=True)
            recorded = _cuda.Event()
            recorded.record(stream)
            done = _CudaEvent(recorded)
            # The caching allocator knows only the stream of allocation: hold both ends until the copy has ended.
            self._running.append((done, flat_dst, flat_src))
        return done

    def _pieces(self, host: Tensor) -> Iterator[tuple[int, int]]:
        """Element ranges of ``host`` that lie in one page-locked chunk each: CUDA refuses a copy across two."""
        begin, size, count = host.data_ptr(), host.element_size(), host.numel()
        cuts: list[int] = []
        for bounds in self._registered.values():
            if bounds[0] <= begin < bounds[-1]:
                inner = bounds[bisect_right(bounds, begin) :]
                cuts = [(bound - begin) // size for bound in inner if bound < begin + count * size]
        edges = [0, *cuts, count]
        return ((low, high) for low, high in pairwise(edges) if high > low)

    def _release_finished(self) -> None:
        released = []  # dropped after the lock: their finalizers are user code as far as we know
        with self._lock:
            for _ in range(len(self._running)):
                entry = self._running.popleft()
                if entry[0].done():
                    released.append(entry)
                else:
                    self._running.append(entry)

    def _record_current(self) -> torch.cuda.Event:
        recorded: torch.cuda.Event = _cuda.Event()
        recorded.record(torch.cuda.current_stream(self.torch_device))
        return recorded

    def record(self) -> Event:
        return _CudaEvent(self._record_current())

    def compute_wait(self, event: Event) -> None:
        if isinstance(event, _CudaEvent):
            torch.cuda.current_stream(self.torch_device).wait_event(event.recorded)
        elif event is not COMPLETED:
            event.wait()

    def synchronize(self) -> None:
        events = [_CudaEvent(self._record_current())]
        with self._lock:
            events.extend(entry[0] for entry in self._running)
        for event in events:
            while not event.done():
                time.sleep(_LONGEST_NAP)
        self._release_finished()

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        try:
            self.synchronize()
        finally:
            for ptr in list(self._registered):
                self.host_unregister(ptr)

    def memory_info(self) -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info(self.torch_device)
        if self.capacity is None:
            return free, total
        return min(max(self.capacity - self.used, 0), free), min(self.capacity, total)

    def host_register(self, ptr: int, nbytes: int) -> None:
        bounds = [*range(ptr, ptr + nbytes, REGISTER_CHUNK), ptr + nbytes]
        runtime = _cuda.cudart()
        for position, (begin, end) in enumerate(pairwise(bounds)):
            with torch.cuda.device(self.torch_device):
                status = int(runtime.cudaHostRegister(begin, end - begin, 0))
            if status != 0:
                for earlier in bounds[:position]:
                    runtime.cudaHostUnregister(earlier)
                self._clear_error()
                raise RuntimeError(
                    f"cudaHostRegister refused to page-lock {end - begin:,} bytes (error {status}) after "
                    f"{begin - ptr:,} of {nbytes:,}; lower memory.host or raise the limit on locked memory (ulimit -l)"
                )
        with self._lock:
            self._registered[ptr] = bounds

    def host_unregister(self, ptr: int) -> None:
        with self._lock:
            bounds = self._registered.pop(ptr, None)
        if bounds is None:
            raise ValueError(f"host memory at {ptr:#x} is not registered")
        runtime = _cuda.cudart()
        failed = [status for begin in bounds[:-1] if (status := int(runtime.cudaHostUnregister(begin))) != 0]
        if failed:
            self._clear_error()
            raise RuntimeError(f"cudaHostUnregister failed at {ptr:#x} (error {failed[0]})")

    def _clear_error(self) -> None:
        # A refused call stays behind as the runtime's last error and would be blamed on the next kernel launch.
        try:
            torch.zeros(1, device=self.torch_device)
        except RuntimeError:
            return
