"""Counters of a swap store."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StatsSnapshot:
    """Counters at one moment. Bytes were moved by requests that ended well, seconds are wall time.

    ``read_seconds`` (``write_seconds``) is the time during which at least one read (write) was outstanding.
    ``bounced_bytes`` were copied through aligned scratch memory. ``path_*`` have one entry per path of the store.
    """

    read_bytes: int
    write_bytes: int
    read_seconds: float
    write_seconds: float
    read_requests: int
    write_requests: int
    bounced_bytes: int
    path_read_bytes: tuple[int, ...]
    path_write_bytes: tuple[int, ...]


class _Direction:
    """Counters of one direction; the caller holds the lock."""

    __slots__ = ("active", "begun", "nbytes", "path_bytes", "requests", "seconds")

    def __init__(self, paths: int) -> None:
        self.nbytes = 0
        self.requests = 0
        self.seconds = 0.0
        self.active = 0
        self.begun = 0.0
        self.path_bytes = [0] * paths

    def busy(self, now: float) -> float:
        return self.seconds + (now - self.begun if self.active else 0.0)


class SwapStats:
    """Live counters; every attribute can be read at any time from any thread."""

    def __init__(self, paths: int) -> None:
        self._lock = threading.Lock()
        self._directions = (_Direction(paths), _Direction(paths))
        self._bounced = 0

    def begin(self, *, write: bool) -> None:
        """A request was submitted."""
        with self._lock:
            direction = self._directions[write]
            if direction.active == 0:
                direction.begun = time.monotonic()
            direction.active += 1

    def end(self, *, write: bool, path: int, nbytes: int, bounced: bool) -> None:
        """A request ended, having moved ``nbytes`` (0 if it failed)."""
        with self._lock:
            direction = self._directions[write]
            direction.active -= 1
            if direction.active == 0:
                direction.seconds += time.monotonic() - direction.begun
            if nbytes:
                direction.requests += 1
                direction.nbytes += nbytes
                direction.path_bytes[path] += nbytes
                self._bounced += nbytes if bounced else 0

    def snapshot(self) -> StatsSnapshot:
        """All counters, consistent with each other."""
        with self._lock:
            now = time.monotonic()
            read, write = self._directions
            return StatsSnapshot(
                read_bytes=read.nbytes,
                write_bytes=write.nbytes,
                read_seconds=read.busy(now),
                write_seconds=write.busy(now),
                read_requests=read.requests,
                write_requests=write.requests,
                bounced_bytes=self._bounced,
                path_read_bytes=tuple(read.path_bytes),
                path_write_bytes=tuple(write.path_bytes),
            )

    @property
    def in_flight(self) -> int:
        """Requests submitted and not ended."""
        with self._lock:
            return sum(direction.active for direction in self._directions)

    @property
    def read_bytes(self) -> int:
        return self.snapshot().read_bytes

    @property
    def write_bytes(self) -> int:
        return self.snapshot().write_bytes

    @property
    def read_seconds(self) -> float:
        return self.snapshot().read_seconds

    @property
    def write_seconds(self) -> float:
        return self.snapshot().write_seconds

    @property
    def requests(self) -> int:
        snapshot = self.snapshot()
        return snapshot.read_requests + snapshot.write_requests

    @property
    def bounced_bytes(self) -> int:
        return self.snapshot().bounced_bytes

    @property
    def path_read_bytes(self) -> tuple[int, ...]:
        return self.snapshot().path_read_bytes

    @property
    def path_write_bytes(self) -> tuple[int, ...]:
        return self.snapshot().path_write_bytes
