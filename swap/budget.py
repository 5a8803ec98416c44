"""One object that accounts for every byte of every tier."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from queue import Empty, SimpleQueue
from types import TracebackType
from weakref import WeakMethod

from swap.deferred import DeferredLock, Subscribers
from swap.errors import BudgetError

TIERS = ("device", "host", "nvme")


class Reservation:
    """Bytes taken from a budget until ``release``, which may be called twice, in any thread, also by a finalizer."""

    __slots__ = ("_budget", "_live", "kind", "nbytes", "tier", "what")

    def __init__(self, budget: Budget, tier: str, kind: str, nbytes: int, what: str) -> None:
        self._budget = budget
        # A list because its pop is atomic: two releases at once return the bytes once.
        self._live = [True]
        self.tier = tier
        self.kind = kind
        self.nbytes = nbytes
        self.what = what

    @property
    def released(self) -> bool:
        return not self._live

    def release(self) -> None:
        try:
            self._live.pop()
        except IndexError:
            return
        self._budget._return(self.tier, self.kind, self.nbytes)

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        state = "released" if self.released else "held"
        return f"Reservation({self.tier}, {self.kind}, {self.nbytes} bytes, {state})"


class Budget:
    """Byte limits per tier ("device", "host", "nvme"; None or absent: unlimited) and what is used of them, by kind.

    Thread-safe. Only ``Reservation.release`` may be called from finalizers.
    """

    def __init__(self, limits: Mapping[str, int | None]) -> None:
        for tier, limit in limits.items():
            _check_tier(tier)
            if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
                raise ValueError(f"memory.{tier} must be a non-negative number of bytes or None, got {limit!r}")
        self._limits: dict[str, int | None] = {tier: limits.get(tier) for tier in TIERS}
        self._used = dict.fromkeys(TIERS, 0)
        self._peak = dict.fromkeys(TIERS, 0)
        self._kinds: dict[str, dict[str, int]] = {tier: defaultdict(int) for tier in TIERS}
        self._kind_peaks: dict[str, dict[str, int]] = {tier: defaultdict(int) for tier in TIERS}
        self._reclaimers: dict[str, list[WeakMethod[Callable[[int], int]]]] = {tier: [] for tier in TIERS}
        self._subscribers = Subscribers()
        self._lock: DeferredLock[tuple[str, str, int]] = DeferredLock(self._settle)

    def reserve(self, tier: str, kind: str, nbytes: int, *, what: str = "") -> Reservation:
        """Take ``nbytes``; BudgetError, naming ``what``, the excess and the key to change, if they do not fit."""
        reservation, used = self._take_or_reclaim(tier, kind, nbytes, what)
        if reservation is None:
            limit = self._limits[tier]
            raise BudgetError(tier=tier, kind=kind, requested=nbytes, used=used, limit=limit or 0, what=what)
        return reservation

    def try_reserve(self, tier: str, kind: str, nbytes: int, *, what: str = "") -> Reservation | None:
        """Take ``nbytes``, or None if they do not fit."""
        return self._take_or_reclaim(tier, kind, nbytes, what)[0]

    def add_reclaimer(self, tier: str, method: Callable[[int], int]) -> None:
        """Register a bound method that gives back up to the asked number of bytes from a cache on ``tier``.

        It is called, with no lock of the budget held, when a reservation does not fit. Held weakly.
        """
        _check_tier(tier)
        self._reclaimers[tier].append(WeakMethod(method))

    def _take_or_reclaim(self, tier: str, kind: str, nbytes: int, what: str) -> tuple[Reservation | None, int]:
        reservation, used = self._take(tier, kind, nbytes, what)
        limit = self._limits[tier]
        if reservation is not None or limit is None or nbytes > limit:
            return reservation, used
        missing = used + nbytes - limit
        for reference in tuple(self._reclaimers[tier]):
            reclaim = reference()
            if reclaim is None:
                self._reclaimers[tier].remove(reference)
            elif missing > 0:
                missing -= reclaim(missing)
        return self._take(tier, kind, nbytes, what)

    def _take(self, tier: str, kind: str, nbytes: int, what: str) -> tuple[Reservation | None, int]:
        _check_tier(tier)
        if nbytes < 0:
            raise ValueError(f"{what or kind}: cannot reserve {nbytes} bytes")
        reservation = Reservation(self, tier, kind, nbytes, what)
        with self._lock:
            used = self._used[tier]
            limit = self._limits[tier]
            if limit is not None and used + nbytes > limit:
                return None, used
            self._used[tier] = used + nbytes
            self._peak[tier] = max(self._peak[tier], used + nbytes)
            kinds = self._kinds[tier]
            kinds[kind] += nbytes
            self._kind_peaks[tier][kind] = max(self._kind_peaks[tier][kind], kinds[kind])
        return reservation, used

    def _return(self, tier: str, kind: str, nbytes: int) -> None:
        self._lock.post((tier, kind, nbytes))
        self._subscribers.notify()

    def _settle(self, item: tuple[str, str, int]) -> None:
        tier, kind, nbytes = item
        self._used[tier] -= nbytes
        self._kinds[tier][kind] -= nbytes

    def limit(self, tier: str) -> int | None:
        """The tier's limit in bytes, None for unlimited."""
        _check_tier(tier)
        return self._limits[tier]

    def used(self, tier: str) -> int:
        """Bytes reserved now."""
        _check_tier(tier)
        with self._lock:
            return self._used[tier]

    def available(self, tier: str) -> int | None:
        """Bytes that can still be reserved, None for unlimited."""
        limit = self.limit(tier)
        return None if limit is None else limit - self.used(tier)

    def peak(self, tier: str) -> int:
        """Largest number of bytes ever reserved at once."""
        _check_tier(tier)
        with self._lock:
            return self._peak[tier]

    def used_by_kind(self, tier: str) -> dict[str, int]:
        """Bytes reserved now, by kind; kinds at zero are left out."""
        _check_tier(tier)
        with self._lock:
            return {kind: nbytes for kind, nbytes in self._kinds[tier].items() if nbytes}

    def peak_by_kind(self, tier: str) -> dict[str, int]:
        """Each kind's own largest number of bytes (their sum may exceed ``peak``: peaks differ in time)."""
        _check_tier(tier)
        with self._lock:
            return dict(self._kind_peaks[tier])

    def subscribe(self) -> SimpleQueue[None]:
        """A queue that gets an item at every release from now on; give it back with ``unsubscribe``."""
        return self._subscribers.add()

    def unsubscribe(self, queue: SimpleQueue[None]) -> None:
        self._subscribers.remove(queue)

    def notify(self) -> None:
        """Wake the subscribers: somebody can now return bytes if asked to. Safe in finalizers."""
        self._subscribers.notify()

    def wait_for_release(self, timeout: float | None = None) -> bool:
        """Sleep until the next release in any tier; False after ``timeout`` seconds."""
        queue = self.subscribe()
        try:
            queue.get(timeout=timeout)
        except Empty:
            return False
        finally:
            self.unsubscribe(queue)
        return True

    def wait_and_reserve(
        self, tier: str, kind: str, nbytes: int, *, timeout: float | None = None, what: str = ""
    ) -> Reservation:
        """Like ``reserve``, but sleeps while others hold the bytes. BudgetError if they can never fit or on timeout."""
        limit = self.limit(tier)
        deadline = None if timeout is None else time.monotonic() + timeout
        queue = self.subscribe()
        try:
            while True:
                reservation = self.try_reserve(tier, kind, nbytes, what=what)
                if reservation is not None:
                    return reservation
                remaining = None if deadline is None else deadline - time.monotonic()
                if (limit is not None and nbytes > limit) or (remaining is not None and remaining <= 0):
                    return self.reserve(tier, kind, nbytes, what=what)
                try:
                    queue.get(timeout=remaining)
                except Empty:
                    continue
        finally:
            self.unsubscribe(queue)


def _check_tier(tier: str) -> None:
    if tier not in TIERS:
        raise ValueError(f"unknown tier {tier!r}; the tiers are {', '.join(TIERS)}")
