"""Seeded faults at the system-call level, beneath every I/O engine.

    plan = FaultPlan(seed=1)
    plan.fail("read", errno=errno.EIO, nth=3)
    store = SwapStore([path], faults=plan)

The rules act on the calls that the engines make, so what the engines do about an error, a short transfer or a delay
is what gets tested.
"""

from __future__ import annotations

import errno as errno_module
import os
import random
import threading
import time
from dataclasses import dataclass, field

from swap.engines.protocol import System
from swap.geometry import PAGE

OPERATIONS = ("read", "write", "allocate")


@dataclass(slots=True, kw_only=True)
class _Rule:
    action: str
    operation: str | None
    nth: int | None = None
    at_offset: int | None = None
    after_bytes: int | None = None
    times: int | None = None
    errno: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    fired: int = field(default=0, init=False)


class FaultPlan:
    """Rules for faults; build it up, then give it to a store.

    Calls of each operation are counted from 1 over the whole plan. A rule fires on a call when all its conditions
    hold: the call is number ``nth`` or later; it covers file offset ``at_offset``; at least ``after_bytes`` were
    transferred by earlier calls of the operation. It fires ``times`` times at most (None: without end).
    ``injected`` counts the faults that fired, by action.
    """

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._rules: list[_Rule] = []
        self._lock = threading.Lock()
        self.calls = dict.fromkeys(OPERATIONS, 0)
        self.transferred = dict.fromkeys(OPERATIONS, 0)
        self.injected = dict.fromkeys(("fail", "short", "delay", "flip"), 0)

    def fail(
        self,
        operation: str,
        errno: int = errno_module.EIO,
        *,
        nth: int | None = None,
        at_offset: int | None = None,
        after_bytes: int | None = None,
        times: int | None = None,
    ) -> FaultPlan:
        """Calls fail with ``errno``; a full disk or a dead drive stays so unless ``times`` says otherwise."""
        return self._add(
            _Rule(
                action="fail",
                operation=operation,
                errno=errno,
                nth=nth,
                at_offset=at_offset,
                after_bytes=after_bytes,
                times=times,
            )
        )

    def short(
        self,
        operation: str,
        *,
        nbytes: int,
        nth: int | None = None,
        at_offset: int | None = None,
        after_bytes: int | None = None,
        times: int | None = 1,
    ) -> FaultPlan:
        """Reads or writes move at most ``nbytes`` of what was asked for."""
        return self._add(
            _Rule(
                action="short",
                operation=operation,
                nbytes=nbytes,
                nth=nth,
                at_offset=at_offset,
                after_bytes=after_bytes,
                times=times,
            )
        )

    def delay(self, max_seconds: float, *, operation: str | None = None) -> FaultPlan:
        """Every call sleeps first, for a seeded random time up to ``max_seconds``."""
        return self._add(_Rule(action="delay", operation=operation, seconds=max_seconds))

    def flip(self, operation: str = "read", *, nth: int | None = None, at_offset: int | None = None) -> FaultPlan:
        """One read returns with one bit, chosen by the seed, turned over."""
        if operation != "read":
            raise ValueError(f"only reads can be flipped, not {operation!r}")
        return self._add(_Rule(action="flip", operation=operation, nth=nth, at_offset=at_offset, times=1))

    def wrap(self, system: System) -> FaultySystem:
        """``system`` with this plan's faults."""
        return FaultySystem(system, self)

    def _add(self, rule: _Rule) -> FaultPlan:
        if rule.operation is not None and rule.operation not in OPERATIONS:
            raise ValueError(f"unknown operation {rule.operation!r}; choose from {', '.join(OPERATIONS)}")
        if rule.action == "short" and rule.operation == "allocate":
            raise ValueError("an allocation cannot be short; use fail")
        with self._lock:
            self._rules.append(rule)
        return self

    def draw(self, operation: str, offset: int, nbytes: int) -> dict[str, _Rule]:
        """Count one call and return the rules that fire on it, by action."""
        with self._lock:
            self.calls[operation] += 1
            drawn: dict[str, _Rule] = {}
            for rule in self._rules:
                if rule.action not in drawn and self._matches(rule, operation, offset, nbytes):
                    rule.fired += 1
                    self.injected[rule.action] += 1
                    drawn[rule.action] = rule
            return drawn

    def pause(self, rule: _Rule) -> None:
        with self._lock:
            seconds = self._random.uniform(0.0, rule.seconds)
        time.sleep(seconds)

    def pick(self, count: int) -> int:
        """A seeded number below ``count``."""
        with self._lock:
            return self._random.randrange(count)

    def moved(self, operation: str, nbytes: int) -> None:
        with self._lock:
            self.transferred[operation] += nbytes

    def _matches(self, rule: _Rule, operation: str, offset: int, nbytes: int) -> bool:
        return (
            (rule.operation is None or rule.operation == operation)
            and (rule.times is None or rule.fired < rule.times)
            and (rule.nth is None or self.calls[operation] >= rule.nth)
            and (rule.at_offset is None or offset <= rule.at_offset < offset + nbytes)
            and (rule.after_bytes is None or self.transferred[operation] >= rule.after_bytes)
        )


class FaultySystem:
    """A system-call layer with a plan's faults in front of another one."""

    def __init__(self, system: System, plan: FaultPlan) -> None:
        self._system = system
        self._plan = plan

    def pread_into(self, fd: int, view: memoryview, offset: int) -> int:
        drawn = self._before("read", offset, view.nbytes)
        if "short" in drawn and drawn["short"].nbytes < view.nbytes:
            count = self._short_read(fd, view, offset, drawn["short"].nbytes)
        else:
            count = self._system.pread_into(fd, view, offset)
        if "flip" in drawn and count:
            bit = self._plan.pick(count * 8)
            view[bit // 8] ^= 1 << (bit % 8)
        self._plan.moved("read", count)
        return count

    def pwrite_from(self, fd: int, view: memoryview, offset: int) -> int:
        drawn = self._before("write", offset, view.nbytes)
        if "short" in drawn and drawn["short"].nbytes < view.nbytes:
            count = self._short_write(fd, view, offset, drawn["short"].nbytes)
        else:
            count = self._system.pwrite_from(fd, view, offset)
        self._plan.moved("write", count)
        return count

    def fallocate(self, fd: int, offset: int, nbytes: int) -> None:
        self._before("allocate", offset, nbytes)
        self._system.fallocate(fd, offset, nbytes)
        self._plan.moved("allocate", nbytes)

    def _before(self, operation: str, offset: int, nbytes: int) -> dict[str, _Rule]:
        drawn = self._plan.draw(operation, offset, nbytes)
        if "delay" in drawn:
            self._plan.pause(drawn["delay"])
        if "fail" in drawn:
            number = drawn["fail"].errno
            raise OSError(number, os.strerror(number))
        return drawn

    def _short_read(self, fd: int, view: memoryview, offset: int, nbytes: int) -> int:
        if nbytes == 0:
            return 0
        scratch = bytearray(view)
        count = min(nbytes, self._system.pread_into(fd, view, offset))
        # What was not reported must not be found in the buffer: an engine that ignores the count shows.
        view[count:] = memoryview(scratch)[count:]
        return count

    def _short_write(self, fd: int, view: memoryview, offset: int, nbytes: int) -> int:
        if nbytes == 0:
            return 0
        try:
            return self._system.pwrite_from(fd, view[:nbytes], offset)
        except OSError as error:
            if error.errno != errno_module.EINVAL:
                raise
        # A direct file takes whole pages only; the engine must write the broken one anew anyway.
        whole = nbytes - nbytes % PAGE
        if whole:
            self._system.pwrite_from(fd, view[:whole], offset)
        return nbytes
