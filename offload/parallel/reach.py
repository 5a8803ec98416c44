"""The job's store, asked over a connection of one's own, and given up when nothing comes back.

A store is read over TCP without a limit: behind a link that is down, or a machine that has lost power, a call would
come back after many minutes. Who asks is mostly on the way out; an error must not wait for its details. A connection
that others use too may be held by a call that waits for a key.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from offload.parallel.lines import Lines, connected_to

T = TypeVar("T")


class Reach:
    """Calls of a store, `limit` seconds each at most. After the first that fails, or does not come back, the store
    counts as lost: its connection is shut down, and nothing waits again.
    """

    def __init__(self, store: Any, limit: float) -> None:
        self._store, self._lines = _own_connection(store)
        self._limit = limit
        self.lost = False

    @property
    def store(self) -> Any:
        """The store itself; its calls may wait for long. None once closed."""
        return self._store

    def call(self, function: Callable[[Any], T]) -> T | None:
        """What `function(store)` returns; None if it raises, or does not return in time."""
        if self.lost or self._store is None:
            return None
        answer = _Answer(function, self._store)
        thread = threading.Thread(target=answer.make, name="offload-reach", daemon=True)
        thread.start()
        if not answer.there.wait(self._limit) or answer.failed:
            self.lost = True
            self._lines.cut()
        thread.join(self._limit)
        return answer.value

    def look_up(self, key: str) -> str | None:
        """What is stored under `key`; None if nothing is, or the store cannot be reached."""
        return self.call(lambda store: bytes(store.get(key)).decode() if store.check([key]) else None)

    def close(self) -> None:
        """Lets go of the connection. Idempotent."""
        self._store = None


class _Answer(Generic[T]):
    def __init__(self, function: Callable[[Any], T], store: Any) -> None:
        self._function, self._store = function, store
        self.value: T | None = None
        self.failed = False
        self.there = threading.Event()

    def make(self) -> None:
        try:
            self.value = self._function(self._store)
        except Exception:  # a store that is gone raises many things
            self.failed = True
        finally:
            del self._store
            self.there.set()


def _own_connection(store: Any) -> tuple[Any, Lines]:
    """The same store over a new connection, and this one; the store as it is where it has none that is known."""
    base = store
    while hasattr(base, "underlying_store"):
        base = base.underlying_store
    port = getattr(base, "port", None)
    if port is None or not hasattr(store, "clone"):
        return store, Lines()
    before = connected_to(port)
    try:
        copy = store.clone()
    except (NotImplementedError, RuntimeError):
        return store, Lines()
    return copy, Lines(pairs=connected_to(port) - before)
