"""What engines whose requests wait in a Python queue have in common."""

from __future__ import annotations

from swap.engines.protocol import Request, RequestFile
from swap.engines.queue import RequestQueue
from swap.engines.watch import Watch


class QueuedEngine:
    """The part of an engine before its threads: requests wait whole, and memory and files need no registration."""

    def __init__(self, owner: str, timeout: float, burst: int) -> None:
        self._queue = RequestQueue(burst)
        self._watch = Watch(timeout, owner)

    def splits(self, file: RequestFile) -> bool:
        return False

    def add_file(self, file: RequestFile) -> None:
        pass

    def register(self, address: int, nbytes: int) -> None:
        pass

    def unregister(self, address: int) -> None:
        pass

    def submit(self, request: Request) -> None:
        self._queue.push(request)

    def cancel(self, error: BaseException) -> int:
        return self._queue.cancel(error)

    def _end(self) -> None:
        """Takes no more requests."""
        self._queue.close()
        self._watch.close()
