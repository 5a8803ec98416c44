"""What a store tells its observer about each request."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Transfer(NamedTuple):
    """One request that has ended. Times are `time.perf_counter_ns`: of the submission, and of the end.

    `nbytes`: bytes moved, 0 if it failed. `label`: of the extent. `path`: index of the store's path.
    """

    label: str
    write: bool
    path: int
    nbytes: int
    begun_ns: int
    ended_ns: int


Observer = Callable[[Transfer], None]
"""Called from I/O threads, before whoever waits for the request wakes; it must not block or raise."""
