"""Counters of a swap store, and a look at them for a path that is much slower than it should be."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

_log = logging.getLogger(__name__)

_SLOW = 0.4
"""A path below this part of the others' rate, each relative to its weight, is named."""

_SAMPLE = 256 << 20
"""Bytes of a path after which its rate means something."""


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

    __slots__ = (
        "active",
        "begun",
        "nbytes",
        "path_active",
        "path_begun",
        "path_bytes",
        "path_seconds",
        "requests",
        "seconds",
    )

    def __init__(self, paths: int) -> None:
        self.nbytes = 0
        self.requests = 0
        self.seconds = 0.0
        self.active = 0
        self.begun = 0.0
        self.path_bytes = [0] * paths
        self.path_active = [0] * paths
        self.path_begun = [0.0] * paths
        self.path_seconds = [0.0] * paths

    def busy(self, now: float) -> float:
        return self.seconds + (now - self.begun if self.active else 0.0)


class SwapStats:
    """Live counters; every attribute can be read at any time from any thread.

    ``paths``: their names, for messages; ``weights``: their expected bandwidths relative to each other.
    """

    def __init__(self, paths: Sequence[str], weights: Sequence[float] | None = None) -> None:
        self._lock = threading.Lock()
        self._paths = tuple(paths)
        self._weights = tuple(weights or (1.0,) * len(self._paths))
        self._directions = (_Direction(len(self._paths)), _Direction(len(self._paths)))
        self._bounced = 0
        self._next_look = _SAMPLE
        self._named: set[int] = set()

    def begin(self, *, write: bool, path: int) -> None:
        """A request was submitted."""
        with self._lock:
            direction = self._directions[write]
            now = time.monotonic()
            if direction.active == 0:
                direction.begun = now
            direction.active += 1
            if direction.path_active[path] == 0:
                direction.path_begun[path] = now
            direction.path_active[path] += 1

    def end(self, *, write: bool, path: int, nbytes: int, bounced: bool) -> None:
        """A request ended, having moved ``nbytes`` (0 if it failed)."""
        slow = None
        with self._lock:
            direction = self._directions[write]
            now = time.monotonic()
            direction.active -= 1
            if direction.active == 0:
                direction.seconds += now - direction.begun
            direction.path_active[path] -= 1
            if direction.path_active[path] == 0:
                direction.path_seconds[path] += now - direction.path_begun[path]
            if nbytes:
                direction.requests += 1
                direction.nbytes += nbytes
                direction.path_bytes[path] += nbytes
                self._bounced += nbytes if bounced else 0
            if len(self._paths) > 1 and direction.nbytes > self._next_look:
                self._next_look = direction.nbytes + _SAMPLE
                slow = self._slow_path(direction, write=write)
        if slow is not None:
            _log.warning("%s", slow)

    def path_rates(self, *, write: bool) -> tuple[float, ...]:
        """Bytes per second of each path while it had requests; 0 for one that had none."""
        with self._lock:
            return self._rates(self._directions[write])

    def _rates(self, direction: _Direction) -> tuple[float, ...]:
        now = time.monotonic()
        seconds = (
            done + (now - begun if active else 0.0)
            for done, begun, active in zip(
                direction.path_seconds, direction.path_begun, direction.path_active, strict=True
            )
        )
        return tuple(
            nbytes / busy if busy else 0.0 for nbytes, busy in zip(direction.path_bytes, seconds, strict=True)
        )

    def _slow_path(self, direction: _Direction, *, write: bool) -> str | None:
        """A line about a path that lags behind the others, each named once."""
        rates = self._rates(direction)
        if min(direction.path_bytes) < _SAMPLE // 4:
            return None
        shares = [rate / weight for rate, weight in zip(rates, self._weights, strict=True)]
        slowest = min(range(len(shares)), key=lambda path: shares[path])
        others = [share for path, share in enumerate(shares) if path != slowest]
        if slowest in self._named or shares[slowest] >= _SLOW * sorted(others)[len(others) // 2]:
            return None
        self._named.add(slowest)
        verb = "writes" if write else "reads"
        rest = ", ".join(f"{rate / 1e6:.0f}" for path, rate in enumerate(rates) if path != slowest)
        return (
            f"swap: path {self._paths[slowest]} {verb} at {rates[slowest] / 1e6:.0f} MB/s, the others at {rest} MB/s: "
            "all wait for it; check the drive, or take it out of memory.nvme_paths"
        )

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
