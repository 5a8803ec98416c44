"""A fault plan between an engine's native driver and the kernel.

The driver stops before and after each system call and asks; the answers come from the plan. Nothing here sleeps:
delays are kept in a queue, because one thread answers for all requests.
"""

from __future__ import annotations

import ctypes
import heapq
import itertools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from swap.faults import FaultPlan, Rule, flip_in_memory, flip_on_disk
from swap.geometry import PAGE

_STICK_POLL = 0.02
"""Seconds between two looks whether stuck calls were released."""


class Call(NamedTuple):
    """A system call of the driver: ``nbytes`` between memory at ``address`` and ``fd`` at ``offset``."""

    block: int
    write: bool
    fd: int
    offset: int
    nbytes: int
    address: int

    @property
    def operation(self) -> str:
        return "write" if self.write else "read"

    @property
    def memory(self) -> memoryview:
        return memoryview((ctypes.c_uint8 * self.nbytes).from_address(self.address)).cast("B")


class Interceptor:
    """Answers one driver's questions by ``plan``; used by one thread."""

    def __init__(self, plan: FaultPlan, driver: Any) -> None:
        self._plan = plan
        self._driver = driver
        self._drawn: dict[int, tuple[dict[str, Rule], bytes | None]] = {}
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._stuck: list[Callable[[], None]] = []
        self._numbers = itertools.count()

    def before(self, call: Call) -> None:
        """A call is about to be made."""
        drawn = self._plan.draw(call.operation, call.offset, call.nbytes)
        seconds = self._plan.pause(drawn["delay"]) if "delay" in drawn else 0.0
        self._schedule(seconds, lambda: self._release(call, drawn))

    def after(self, call: Call, result: int) -> None:
        """A call returned ``result``."""
        drawn, saved = self._drawn.pop(call.block)
        if result > 0:
            if "short" in drawn:
                # For a write the driver was told to move whole pages; the count says otherwise.
                result = min(drawn["short"].nbytes, result if not call.write else drawn["short"].nbytes)
                if saved is not None:
                    # What was not reported must not be found in the buffer: an engine that ignores the count shows.
                    call.memory[result:] = saved[result:]
            if "flip" in drawn:
                bit = self._plan.pick(result * 8)
                if call.write:
                    flip_on_disk(call.fd, call.offset, bit)
                else:
                    flip_in_memory(call.memory, bit)
        self._answer(call, result, drawn)

    def wait_seconds(self) -> float | None:
        """Seconds until ``run`` has something to do; None: nothing is waiting."""
        if self._stuck and not self._plan.released:
            return _STICK_POLL
        if self._stuck:
            return 0.0
        return max(0.0, self._later[0][0] - time.monotonic()) if self._later else None

    def run(self, *, everything: bool = False) -> None:
        """Give the answers that are due; ``everything`` also those that are not, but for stuck calls."""
        if self._stuck and self._plan.released:
            stuck, self._stuck = self._stuck, []
            for action in stuck:
                action()
        now = time.monotonic()
        while self._later and (everything or self._later[0][0] <= now):
            heapq.heappop(self._later)[2]()

    def _release(self, call: Call, drawn: dict[str, Rule]) -> None:
        if "stick" in drawn and not self._plan.released:
            self._stuck.append(lambda: self._perform(call, drawn))
        else:
            self._perform(call, drawn)

    def _perform(self, call: Call, drawn: dict[str, Rule]) -> None:
        if "fail" in drawn:
            self._driver.finish(call.block, -drawn["fail"].errno)
            return
        nbytes, saved = call.nbytes, None
        if "short" in drawn:
            if drawn["short"].nbytes >= nbytes:
                drawn = {name: rule for name, rule in drawn.items() if name != "short"}
            elif call.write:
                # A direct file takes whole pages only; the engine must write the broken one anew anyway.
                nbytes = drawn["short"].nbytes // PAGE * PAGE
                if not nbytes:
                    self._answer(call, drawn["short"].nbytes, drawn)
                    return
            elif drawn["short"].nbytes == 0:
                self._answer(call, 0, drawn)
                return
            else:
                saved = bytes(call.memory)
        self._drawn[call.block] = (drawn, saved)
        self._driver.proceed(call.block, nbytes)

    def _answer(self, call: Call, result: int, drawn: dict[str, Rule]) -> None:
        if result > 0:
            self._plan.moved(call.operation, result)
        seconds = self._plan.pause(drawn["reorder"]) if "reorder" in drawn else 0.0
        self._schedule(seconds, lambda: self._driver.finish(call.block, result))

    def _schedule(self, seconds: float, action: Callable[[], None]) -> None:
        if seconds <= 0:
            action()
        else:
            heapq.heappush(self._later, (time.monotonic() + seconds, next(self._numbers), action))
