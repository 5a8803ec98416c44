"""A limit on gathers in flight, in bytes.

What counts is what this rank has begun and not waited for. Both follow from the order of its program, which is that of
all ranks; so all of them wait at the same places, and the peak is the same in every step.
"""

from __future__ import annotations

import threading

from offload.parallel.channel import Pending


class InFlight:
    """Gathers that are under way; at most `limit` bytes, unless one alone is larger. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.bytes = self.peak = 0
        self._lock = threading.Lock()
        self._gathers: dict[Gather, None] = {}  # the oldest first

    def fits(self, nbytes: int) -> bool:
        """Whether one more may begin without waiting for another."""
        with self._lock:
            return not self._gathers or self.bytes + nbytes <= self.limit

    def make_room(self, nbytes: int) -> None:
        """Waits for the oldest ones until one more may begin."""
        while not self.fits(nbytes):
            with self._lock:
                oldest = next(iter(self._gathers), None)
            if oldest is not None:
                oldest.wait()

    def begin(self, pending: Pending[None], nbytes: int) -> Gather:
        """Counts a gather that was submitted."""
        gather = Gather(self, pending, nbytes)
        with self._lock:
            self._gathers[gather] = None
            self.bytes += nbytes
            self.peak = max(self.peak, self.bytes)
        return gather

    def end(self, gather: Gather) -> None:
        """It was waited for. Idempotent."""
        with self._lock:
            if gather in self._gathers:
                del self._gathers[gather]
                self.bytes -= gather.nbytes


class Gather:
    """One gather under way."""

    def __init__(self, flight: InFlight, pending: Pending[None], nbytes: int) -> None:
        self._flight, self._pending, self.nbytes = flight, pending, nbytes

    def wait(self, timeout: float | None = None) -> None:
        """Sleeps until the weights are there.

        Raises:
            ParallelError: as the channel's operations.
        """
        try:
            self._pending.wait(timeout)
        except TimeoutError:
            raise
        except BaseException:
            self._flight.end(self)
            raise
        self._flight.end(self)
