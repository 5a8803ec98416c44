"""Requests waiting for an engine: a priority queue with cancellation, and with turns for reads and writes."""

from __future__ import annotations

import heapq
import itertools
import threading

from swap.engines.protocol import PATIENCE, Request
from swap.errors import SwapError

_Entry = tuple[int, int, Request]


class RequestQueue:
    """Thread-safe; lower priority first, then order of arrival; see the notes on ageing and bursts in protocol.py."""

    def __init__(self, burst: int = 0) -> None:
        self._burst = burst
        self._heaps: tuple[list[_Entry], list[_Entry]] = ([], [])  # reads, writes
        self._direction = 0  # of the burst under way: an index of _heaps
        self._served = 0  # bytes of it
        self._numbers = itertools.count()
        self._arrived = 0  # bytes
        # Re-entrant: closing a forgotten store from a finalizer may find this very thread inside.
        self._changed = threading.Condition(threading.RLock())
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    def push(self, request: Request) -> None:
        with self._changed:
            if self._closed:
                raise SwapError("the I/O engine is closed")
            place = self._arrived + request.priority * PATIENCE
            self._arrived += request.view.nbytes
            heapq.heappush(self._heaps[request.write], (place, next(self._numbers), request))
            self._changed.notify()

    def pop(self) -> Request | None:
        """The next request, waiting for one; None once closed and empty."""
        with self._changed:
            while not any(self._heaps):
                if self._closed:
                    return None
                self._changed.wait()
            return self._take()

    def pop_nowait(self) -> Request | None:
        """The next request, or None when there is none."""
        with self._changed:
            return self._take() if any(self._heaps) else None

    def _take(self) -> Request:
        """As `Driver::next_line` of csrc/transfers.cpp."""
        reads, writes = self._heaps
        if not (reads and writes):
            only = 0 if reads else 1
            self._served = self._served if only == self._direction else 0
            self._direction = only
        elif not self._burst:
            self._direction = int(writes[0] < reads[0])
        elif self._served >= self._burst:
            self._direction, self._served = 1 - self._direction, 0
        request = heapq.heappop(self._heaps[self._direction])[2]
        self._served += request.view.nbytes
        return request

    def cancel(self, error: BaseException) -> int:
        with self._changed:
            cancelled = [entry[2] for heap in self._heaps for entry in heap]
            for heap in self._heaps:
                heap.clear()
        for request in cancelled:
            request.done(request, error)
        return len(cancelled)

    def close(self) -> None:
        """Refuse new requests, end the waiting ones with SwapError, and release the threads in ``pop``."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.cancel(SwapError("store closed before the request was begun"))
