"""Page-aligned scratch memory for direct transfers whose address or length is not whole pages."""

from __future__ import annotations

import mmap
import threading

from swap.budget import Budget, Reservation
from swap.geometry import PAGE, align_up

_LARGE = 256 * 1024


class BouncePool:
    """One page for each of ``count`` transfers in flight, charged at once to the host tier as "bounce".

    Larger scratch (256 KiB a piece) is made only when a transfer asks for it and the budget has room; otherwise the
    transfer goes page by page. So an odd transfer never fails in mid-run for want of memory.
    """

    def __init__(self, count: int, budget: Budget) -> None:
        self._budget = budget
        self._reservations: list[Reservation] = [
            budget.reserve("host", "bounce", count * PAGE, what="bounce pages for direct I/O")
        ]
        # At least a page: an empty mapping does not exist, and a store on buffered files never borrows.
        pages = memoryview(_map(max(count, 1) * PAGE))
        self._lock = threading.Lock()
        self._small = [pages[index * PAGE : (index + 1) * PAGE] for index in range(count)]
        self._large: list[memoryview] = []
        self._large_left = count

    def borrow(self, nbytes: int) -> memoryview:
        """A view of at most ``nbytes`` rounded up to pages. At most ``count`` may be out at once."""
        with self._lock:
            if nbytes > PAGE:
                if not self._large and self._large_left:
                    self._make_large()
                if self._large:
                    return self._large.pop()[: min(align_up(nbytes, PAGE), _LARGE)]
            return self._small.pop()

    def give_back(self, view: memoryview) -> None:
        with self._lock:
            if view.nbytes == PAGE:
                self._small.append(view)
            else:
                self._large.append(memoryview(view.obj).cast("B"))

    def close(self) -> None:
        """Give the memory back; views still lent stay valid."""
        with self._lock:
            self._small.clear()
            self._large.clear()
            self._large_left = 0
        for reservation in self._reservations:
            reservation.release()

    def _make_large(self) -> None:
        reservation = self._budget.try_reserve("host", "bounce", _LARGE, what="scratch for unaligned direct I/O")
        if reservation is None:
            return
        self._reservations.append(reservation)
        self._large.append(memoryview(_map(_LARGE)))
        self._large_left -= 1


def _map(nbytes: int) -> mmap.mmap:
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
