"""Lets one thread at a time put a gradient into a parameter's `.grad` and take it out again."""

from __future__ import annotations

import threading

_LONGEST_TURN = 60


class Turn:
    """Held between autograd's accumulation and our collection of a gradient.

    Autograd does the two under no common lock: in between, another thread's backward would add to a tensor that is
    being taken away. A thread that an error stopped in between keeps its turn until its next forward, its end, or a
    minute, longer than adding a gradient takes.
    """

    def __init__(self) -> None:
        self._free = threading.Condition(threading.Lock())
        self._owner: int | None = None

    def take(self) -> None:
        me, seconds = threading.get_ident(), 0
        with self._free:
            while self._owner not in (None, me) and seconds < _LONGEST_TURN:
                if not self._free.wait(1.0):
                    alive = self._owner in {t.ident for t in threading.enumerate()}
                    seconds = seconds + 1 if alive else _LONGEST_TURN
            self._owner = me

    def give(self) -> None:
        with self._free:
            if self._owner == threading.get_ident():
                self._owner = None
                self._free.notify()
