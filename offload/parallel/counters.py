"""Bytes through collectives, counted as logical payload."""

from __future__ import annotations

import threading
from collections import Counter


class Counters:
    """Payload by operation and category: a gather or a reduce-scatter counts its full size once, an all-reduce twice.

    That is what the algorithms are compared by; on the wire it is (n - 1) / n of it for each of n ranks. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes: Counter[tuple[str, str]] = Counter()
        self._calls: Counter[tuple[str, str]] = Counter()

    def add(self, operation: str, category: str, nbytes: int) -> None:
        with self._lock:
            self._bytes[operation, category] += nbytes
            self._calls[operation, category] += 1

    def snapshot(self) -> dict[str, dict[str, int]]:
        """{"operation category": {"bytes": ..., "calls": ...}}"""
        with self._lock:
            return {
                f"{operation} {category}": {"bytes": self._bytes[operation, category], "calls": calls}
                for (operation, category), calls in sorted(self._calls.items())
            }

    def by_category(self) -> dict[str, int]:
        """Bytes by category."""
        found: Counter[str] = Counter()
        with self._lock:
            for (_, category), nbytes in self._bytes.items():
                found[category] += nbytes
        return dict(sorted(found.items()))
