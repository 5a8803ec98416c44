"""Collectives in one order: a thread that carries out what is submitted, and what happens when other ranks do not come.

All ranks submit the same operations to a channel in the same order. An operation's messages carry a tag made of the
channel, its number and its name, so data of different operations never mix. [Note: stalls] A rank that waits for long
says in the job's store what it waits in; as soon as it sees that another rank has failed, or that the two wait for each
other (see `stalls`), it raises an error that names both. The thread that is stuck in a message then stays there until
the channel is closed, which cuts the connections.
"""

from __future__ import annotations

import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from offload.errors import ParallelError
from offload.parallel.collectives import Allocate, Collectives, RankGoneError
from offload.parallel.ranks import Ranks
from offload.parallel.stalls import Stall, contradiction, say, unsay, whereabouts, why_closed
from swap.tickets import fresh

T = TypeVar("T")
_POLL = 1.0  # seconds between looks at what keeps an operation
_STALL = 3.0  # seconds after which an operation may be stuck
_CLOSE = 5.0  # seconds that `close` waits for what other ranks may be waiting for
_STUCK = 0.5  # seconds in which an operation that nobody waits for any more may end by itself


class Pending(Generic[T]):
    """One operation of a channel."""

    def __init__(
        self, what: str, job: Callable[[Collectives], T], before: Callable[[], object] | None, group: str
    ) -> None:
        self.what, self.group = what, group
        self._job: Callable[[Collectives], T] | None = job
        self._before = before
        self._ended = threading.Event()
        self.awaited = False
        """Whether somebody waits for it."""
        self._result: T | None = None
        self._error: BaseException | None = None

    def run(self, collectives: Collectives, latency: float = 0.0) -> None:
        """On the channel's thread."""
        assert self._job is not None
        if self._before is not None:
            self._before()
        if latency:
            time.sleep(latency)
        self._result = self._job(collectives)

    def end(self, error: BaseException | None) -> None:
        if not self._ended.is_set():
            self._error = error
            self._job = self._before = None  # what they hold may go
            self._ended.set()

    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Sleeps until it is carried out.

        Raises:
            ParallelError: it failed, or an earlier one of the channel did.
        """
        self.awaited = True
        try:
            if not self._ended.wait(timeout):
                raise TimeoutError(f"{self.what}: not done after {timeout} s")
        finally:
            self.awaited = False
        if self._error is not None:
            raise _anew(self._error)

    def result(self) -> T:
        """What the job returned; waits for it."""
        self.wait()
        return self._result  # type: ignore[return-value]


class Channel:
    """One order of operations. `allocate(numel, dtype)` gives host memory for what they need beside their operands.
    `awaited`: whether programs wait for them.
    """

    def __init__(self, name: str, ranks: Ranks, allocate: Allocate, *, awaited: bool = False) -> None:
        self.name, self._ranks = name, ranks
        self._changed = threading.Condition()
        self._queue: deque[Pending[Any]] = deque()
        self._current: Pending[Any] | None = None
        self._number = 0
        self._since = 0.0
        self._error: BaseException | None = None
        self._closed = self._said = False
        if awaited:
            ranks.come_to[name] = 0
        self._latency = 0.0  # seconds before every operation, to see what waits for them
        self._collectives = Collectives(ranks, allocate, self._tag)
        self._threads = [
            threading.Thread(
                target=_repeat,
                args=(weakref.ref(self), self._changed, turn, rests),
                name=f"offload-comm-{name}{kind}",
                daemon=True,
            )
            for turn, rests, kind in ((Channel.next, Channel._idle, ""), (Channel.look, Channel._open, "-watch"))
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self,
        what: str,
        job: Callable[[Collectives], T],
        *,
        before: Callable[[], object] | None = None,
        group: str = "world",
    ) -> Pending[T]:
        """Has `job` carried out after all that was submitted before, on all ranks, though only those of this rank's
        `group` do it together; `before` is called ahead of it, to wait for something of this rank's own.

        Raises:
            ParallelError: an operation failed, or the channel is closed.
        """
        pending = Pending(what, job, before, group)
        with self._changed:
            if self._error is not None:
                raise _anew(self._error)
            if self._closed:
                raise ParallelError(f"{what}: the engine is closed")
            self._queue.append(pending)
            if self.name in self._ranks.come_to:
                self._ranks.come_to[self.name] += 1
            self._changed.notify_all()
        return pending

    def _tag(self, part: int, nbytes: int) -> int:
        """A message's tag: alike on all ranks for one operation, different for others."""
        current = self._current
        what = "" if current is None else current.what
        return zlib.crc32(f"{self.name} {self._number} {part} {nbytes} {what}".encode()) & 0x7FFFFFFF

    def fail(self, error: BaseException) -> None:
        """Ends everything with `error`, unless something has failed before."""
        with self._changed:
            self._error = self._error or error
            pending = [*([] if self._current is None else [self._current]), *self._queue]
            self._queue.clear()
            self._changed.notify_all()
        for operation in pending:
            operation.end(self._error)

    # The thread

    def _open(self) -> bool:
        return not self._closed and self._error is None

    def _idle(self) -> bool:
        return self._open() and not self._queue

    def next(self) -> bool:
        """Carries out one operation if there is one; False if it is over."""
        with self._changed:
            if not self._queue:
                return self._open()
            current = self._current = self._queue.popleft()
            self._number += 1
            self._since = time.monotonic()
        error: BaseException | None = None
        try:
            current.run(self._collectives, self._latency)
        except BaseException as caught:
            self._since = time.monotonic()  # to find out about it takes a while too
            error = self._named(current.what, caught)
        with self._changed:
            self._current = None
        if error is not None:
            self._ranks.report_failure(error)
            current.end(error)
            self.fail(error)
        else:
            current.end(None)
        return True

    def _named(self, what: str, error: BaseException) -> BaseException:
        """The error that users see: those of messages tell who is missing, others stay what they are."""
        if not isinstance(error, RankGoneError):
            return error
        text, limit = str(error), f"parallel.timeout = {self._ranks.timeout:g} s"
        rank = self._ranks.report_loss(error.rank)
        if rank == self._ranks.rank:
            rank = error.rank
        late = "imed out" in text
        missing = f"rank {rank} did not come within {limit}, or with another length" if late else f"rank {rank} is gone"
        there = whereabouts(self._ranks, rank) if late else ""
        first = self._first_failure()
        if first is None and late:
            # The others see this rank's connections end.
            self._ranks.report_failure(TimeoutError(f"{what}: {missing}{there}"))
        reason = f"no rank has said why ({limit})" if first is None else f"the first failure was on {first}"
        if first is None and self._ranks.is_closed(rank):
            reason = why_closed(what)
        named = ParallelError(f"{what}: {missing} ({text[:200]}){there}; {reason}")
        error.__cause__, error.__suppress_context__ = None, True  # the transport's own words are in it
        named.__cause__ = error.with_traceback(None)
        return named

    def _first_failure(self) -> str | None:
        for _ in range(10):  # who failed may be about to say so
            first = self._ranks.first_failure()
            if first is not None:
                return first
            if not self._open():  # nobody asks any more
                break
            time.sleep(0.1)
        return None

    # The watch, see [Note: stalls]

    def look(self) -> bool:
        """Whether to go on looking; ends what cannot go on."""
        with self._changed:
            if not self._open():
                return False
            current, number, waited = self._current, self._number, time.monotonic() - self._since
            waits = any(pending.awaited for pending in (current, *self._queue) if pending is not None)
        if current is None or waited < _STALL or self._ranks.closed:
            if self._said:
                self._said = False
                unsay(self._ranks, self.name)
            return True
        first = self._ranks.first_failure()
        if first is not None:
            self.fail(ParallelError(f"{current.what}: another rank has failed; {first}"))
            return False
        own = Stall(
            number=number,
            what=current.what,
            waits=waits,
            come_to=dict(self._ranks.come_to),
            needs=self._ranks.members(current.group),
        )
        self._said = True
        say(self._ranks, self.name, own)
        why = contradiction(self._ranks, self.name, own)
        if why is not None:
            self._ranks.report_failure(RuntimeError(why))
            self.fail(ParallelError(why))
            return False
        if waited > self._ranks.timeout + _STALL:
            self.fail(ParallelError(f"{current.what}: not done after parallel.timeout = {self._ranks.timeout:g} s"))
            return False
        return True

    def close(self) -> None:
        """Ends the threads; what is not carried out in some seconds fails. Idempotent. Does not wait long for a peer
        that does not come: if a message still waits for one, all messages of these ranks end.
        """
        deadline = time.monotonic() + _CLOSE
        # Other ranks may be waiting for this one's part of what has been submitted.
        while self._threads and (self._queue or self._current) and self._error is None and time.monotonic() < deadline:
            time.sleep(0.01)
        with self._changed:
            self._closed = True
            pending = list(self._queue)
            self._queue.clear()
            self._changed.notify_all()
        for operation in pending:
            operation.end(ParallelError(f"{operation.what}: the engine is closed"))
        threads = [thread for thread in self._threads if thread is not threading.current_thread()]
        if not _joined(threads, _STUCK) and self._current is not None:
            self._ranks.cut()
        _joined(threads, _CLOSE)
        self._threads = []


def _joined(threads: list[threading.Thread], seconds: float) -> bool:
    """Whether all have ended, within some seconds."""
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


def _repeat(
    reference: weakref.ref[Channel],
    changed: threading.Condition,
    turn: Callable[[Channel], bool],
    rests: Callable[[Channel], bool],
) -> None:
    """Calls `turn` until it says no, with a sleep before it while the channel `rests`.

    A thread that sleeps holds no channel: one that is forgotten would never go, nor would what it leads to.
    """
    while True:
        with changed:
            channel = reference()
            wait = channel is not None and rests(channel)
            del channel
            if wait:
                changed.wait(_POLL)
        channel = reference()
        if channel is None or not turn(channel):
            return
        del channel


def _anew(error: BaseException) -> BaseException:
    """A stored error to raise now: several may wait for it, and one that is raised collects frames."""
    if type(error) is not ParallelError:
        return fresh(error)
    again = ParallelError(*error.args)
    again.__cause__ = error.__cause__
    return again
