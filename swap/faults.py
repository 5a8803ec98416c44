"""Seeded faults at the system-call level, beneath every I/O engine.

    plan = FaultPlan(seed=1)
    plan.fail("read", errno=errno.EIO, nth=3)
    store = SwapStore([path], faults=plan)

The rules act on the calls that the engines make, so what the engines do about an error, a short transfer or a delay
is what gets tested. ``FaultySystem`` stands in front of blocking calls; ``swap.interception`` applies the same plan to
the submissions and completions of io_uring.
"""

from __future__ import annotations

import ctypes
import errno as errno_module
import mmap
import os
import random
import threading
import time
from dataclasses import dataclass, field

from swap.engines.protocol import System
from swap.geometry import PAGE

OPERATIONS = ("read", "write", "allocate")


@dataclass(slots=True, kw_only=True)
class Rule:
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
        self._rules: list[Rule] = []
        self._lock = threading.Lock()
        self.calls = dict.fromkeys(OPERATIONS, 0)
        self.transferred = dict.fromkeys(OPERATIONS, 0)
        self.injected = dict.fromkeys(("fail", "short", "delay", "reorder", "flip", "stick"), 0)
        self._released = threading.Event()

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
            Rule(
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
            Rule(
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
        return self._add(Rule(action="delay", operation=operation, seconds=max_seconds))

    def reorder(self, max_seconds: float, *, operation: str | None = None) -> FaultPlan:
        """Every result is held back for a seeded random time up to ``max_seconds``: completions change their order."""
        return self._add(Rule(action="reorder", operation=operation, seconds=max_seconds))

    def flip(
        self, operation: str = "read", *, nth: int | None = None, at_offset: int | None = None, times: int | None = 1
    ) -> FaultPlan:
        """A read returns with one bit, chosen by the seed, turned over; a write leaves one such bit on the disk."""
        if operation not in ("read", "write"):
            raise ValueError(f"only reads and writes can be flipped, not {operation!r}")
        return self._add(Rule(action="flip", operation=operation, nth=nth, at_offset=at_offset, times=times))

    def stick(
        self,
        operation: str,
        *,
        nth: int | None = None,
        at_offset: int | None = None,
        after_bytes: int | None = None,
        times: int | None = 1,
    ) -> FaultPlan:
        """A call does not return before ``release``, like one to a drive that hangs."""
        return self._add(
            Rule(
                action="stick",
                operation=operation,
                nth=nth,
                at_offset=at_offset,
                after_bytes=after_bytes,
                times=times,
            )
        )

    def release(self) -> None:
        """Let the stuck calls go on, now and from now on."""
        self._released.set()

    @property
    def released(self) -> bool:
        """Whether ``release`` was called."""
        return self._released.is_set()

    def wait_released(self) -> None:
        """Sleep until ``release``."""
        self._released.wait()

    def wrap(self, system: System) -> FaultySystem:
        """``system`` with this plan's faults."""
        return FaultySystem(system, self)

    def _add(self, rule: Rule) -> FaultPlan:
        if rule.operation is not None and rule.operation not in OPERATIONS:
            raise ValueError(f"unknown operation {rule.operation!r}; choose from {', '.join(OPERATIONS)}")
        if rule.action == "short" and rule.operation == "allocate":
            raise ValueError("an allocation cannot be short; use fail")
        with self._lock:
            self._rules.append(rule)
        return self

    def draw(self, operation: str, offset: int, nbytes: int) -> dict[str, Rule]:
        """Count one call and return the rules that fire on it, by action."""
        with self._lock:
            self.calls[operation] += 1
            drawn: dict[str, Rule] = {}
            for rule in self._rules:
                if rule.action not in drawn and self._matches(rule, operation, offset, nbytes):
                    rule.fired += 1
                    self.injected[rule.action] += 1
                    drawn[rule.action] = rule
            return drawn

    def pause(self, rule: Rule) -> float:
        """Seconds of this delay."""
        with self._lock:
            return self._random.uniform(0.0, rule.seconds)

    def pick(self, count: int) -> int:
        """A seeded number below ``count``."""
        with self._lock:
            return self._random.randrange(count)

    def moved(self, operation: str, nbytes: int) -> None:
        with self._lock:
            self.transferred[operation] += nbytes

    def _matches(self, rule: Rule, operation: str, offset: int, nbytes: int) -> bool:
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

    @property
    def plan(self) -> FaultPlan:
        return self._plan

    def pread_into(self, fd: int, view: memoryview, offset: int) -> int:
        drawn = self._before("read", offset, view.nbytes)
        if "short" in drawn and drawn["short"].nbytes < view.nbytes:
            count = self._short_read(fd, view, offset, drawn["short"].nbytes)
        else:
            count = self._system.pread_into(fd, view, offset)
        if "flip" in drawn and count:
            flip_in_memory(view, self._plan.pick(count * 8))
        return self._after("read", count, drawn)

    def pwrite_from(self, fd: int, view: memoryview, offset: int) -> int:
        drawn = self._before("write", offset, view.nbytes)
        if "short" in drawn and drawn["short"].nbytes < view.nbytes:
            count = self._short_write(fd, view, offset, drawn["short"].nbytes)
        else:
            count = self._system.pwrite_from(fd, view, offset)
        if "flip" in drawn and count:
            flip_on_disk(fd, offset, self._plan.pick(count * 8))
        return self._after("write", count, drawn)

    def _after(self, operation: str, count: int, drawn: dict[str, Rule]) -> int:
        self._plan.moved(operation, count)
        if "reorder" in drawn:
            time.sleep(self._plan.pause(drawn["reorder"]))
        return count

    def fallocate(self, fd: int, offset: int, nbytes: int) -> None:
        self._before("allocate", offset, nbytes)
        self._system.fallocate(fd, offset, nbytes)
        self._plan.moved("allocate", nbytes)

    def _before(self, operation: str, offset: int, nbytes: int) -> dict[str, Rule]:
        drawn = self._plan.draw(operation, offset, nbytes)
        if "delay" in drawn:
            time.sleep(self._plan.pause(drawn["delay"]))
        if "stick" in drawn:
            self._plan.wait_released()
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


def flip_in_memory(view: memoryview, bit: int) -> None:
    """Turn over bit number ``bit`` of ``view``."""
    view[bit // 8] ^= 1 << (bit % 8)


def flip_on_disk(fd: int, offset: int, bit: int) -> None:
    """Turn over bit number ``bit``, counted from the page boundary ``offset``, in the file."""
    page = offset + bit // 8 // PAGE * PAGE
    with mmap.mmap(-1, PAGE) as memory:
        view = (ctypes.c_uint8 * PAGE).from_buffer(memory)
        try:
            count = os.preadv(fd, [view], page)
            view[bit // 8 % PAGE] ^= 1 << (bit % 8)
            if count == PAGE:
                os.pwritev(fd, [view], page)
        finally:
            del view
