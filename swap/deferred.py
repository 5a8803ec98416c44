"""A lock for state that garbage-collection finalizers change.

A finalizer can run at any bytecode of any thread, also in the thread that holds the very lock it wants: a plain lock
deadlocks there, and a re-entrant one lets the finalizer change state in the middle of somebody's update. So
finalizers never take the lock. They post an item to an inbox (an atomic append), and whoever holds the lock next
handles it; the poster does so itself when the lock happens to be free.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")


class DeferredLock(Generic[T]):
    """A mutex (``with lock:``) with an inbox whose items ``handler`` processes under the mutex.

    ``handler`` must not raise and must not take this lock. Inside ``with``, all items posted before it was entered
    have been handled; items posted meanwhile are handled before the last contender lets go.
    """

    __slots__ = ("_handler", "_inbox", "_lock")

    def __init__(self, handler: Callable[[T], None]) -> None:
        self._handler = handler
        self._inbox: deque[T] = deque()
        self._lock = threading.Lock()

    def post(self, item: T) -> None:
        """Hand ``item`` to the handler, now or as soon as the lock is free. Never blocks; safe in finalizers."""
        self._inbox.append(item)
        self._poll()

    def __enter__(self) -> None:
        self._lock.acquire()
        try:
            self._drain()
        except BaseException:
            self._lock.release()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()
        # A post that found the lock taken has left its item to us: look again after letting go.
        self._poll()

    def _poll(self) -> None:
        while self._inbox and self._lock.acquire(blocking=False):
            try:
                self._drain()
            finally:
                self._lock.release()

    def _drain(self) -> None:
        while True:
            try:
                item = self._inbox.popleft()
            except IndexError:
                return
            self._handler(item)


class Subscribers:
    """Wakes sleepers from finalizers: ``SimpleQueue.put`` is documented to be re-entrant, a Condition is not."""

    __slots__ = ("_queues",)

    def __init__(self) -> None:
        self._queues: list[SimpleQueue[None]] = []

    def add(self) -> SimpleQueue[None]:
        """A queue that receives one item per ``notify`` from now on. Subscribe first, then check, then sleep."""
        queue: SimpleQueue[None] = SimpleQueue()
        self._queues.append(queue)
        return queue

    def remove(self, queue: SimpleQueue[None]) -> None:
        self._queues.remove(queue)

    def notify(self) -> None:
        for queue in tuple(self._queues):
            queue.put(None)
