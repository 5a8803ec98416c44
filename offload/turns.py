"""Lets one thread at a time put a gradient into a parameter's `.grad` and take it out again."""

from __future__ import annotations

import threading
from threading import get_ident

_LONGEST_TURN = 60


class Turn:
    """Held between autograd's accumulation and our collection of a gradient.

    Autograd does the two under no common lock: in between, another thread's backward would add to a tensor that is
    being taken away. A thread that an error stopped in between keeps its turn until its next forward, its end, or a
    minute, longer than adding a gradient takes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # locked while somebody has the turn
        self._owner: int | None = None
        self._taking_over = threading.Lock()

    def take(self) -> None:
        me = get_ident()
        if self._owner != me:  # nobody else makes that true
            if not self._lock.acquire(False):
                self._wait(me)
            self._owner = me

    def _wait(self, me: int) -> None:
        seconds, seen = 0, self._owner
        while not self._lock.acquire(timeout=1.0):
            with self._taking_over:
                owner = self._owner
                seconds = seconds + 1 if owner == seen else 0
                seen = owner
                alive = owner in {t.ident for t in threading.enumerate()}
                if not alive or seconds >= _LONGEST_TURN:
                    self._owner = me  # the lock stays locked: it is ours now
                    return

    def give(self) -> None:
        if self._owner == get_ident():
            self._owner = None
            self._lock.release()
