"""Requests waiting for an engine: a priority queue with cancellation."""

from __future__ import annotations

import heapq
import itertools
import threading

from swap.engines.protocol import PATIENCE, Request
from swap.errors import SwapError


class RequestQueue:
    """Thread-safe; lower priority first, then order of arrival; see [Note: ageing] in protocol.py."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Request]] = []
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
            heapq.heappush(self._heap, (place, next(self._numbers), request))
            self._changed.notify()

    def pop(self) -> Request | None:
        """The next request, waiting for one; None once closed and empty."""
        with self._changed:
            while not self._heap:
                if self._closed:
                    return None
                self._changed.wait()
            return heapq.heappop(self._heap)[2]

    def pop_nowait(self) -> Request | None:
        """The next request, or None when there is none."""
        with self._changed:
            return heapq.heappop(self._heap)[2] if self._heap else None

    def cancel(self, error: BaseException) -> int:
        with self._changed:
            cancelled = [entry[2] for entry in self._heap]
            self._heap.clear()
        for request in cancelled:
            request.done(request, error)
        return len(cancelled)

    def close(self) -> None:
        """Refuse new requests, end the waiting ones with SwapError, and release the threads in ``pop``."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.cancel(SwapError("store closed before the request was begun"))
