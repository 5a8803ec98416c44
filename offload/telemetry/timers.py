"""Seconds by phase, added up within a step."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class PhaseTimers:
    """Adds up seconds by phase name within a step; `end_step` closes the step and `medians` looks back over all."""

    def __init__(self) -> None:
        self._current: dict[str, float] = defaultdict(float)
        self._steps: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times a block. A block that raises counts too: its seconds were spent."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._current[name] += time.perf_counter() - start

    def end_step(self) -> dict[str, float]:
        """Closes the step; returns its seconds by phase."""
        done = dict(self._current)
        self._current.clear()
        for name, seconds in done.items():
            self._steps[name].append(seconds)
        return done

    def medians(self) -> dict[str, float]:
        """Median seconds by phase over the steps in which the phase ran."""
        return {name: statistics.median(values) for name, values in self._steps.items()}
