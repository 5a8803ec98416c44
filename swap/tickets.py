"""Tickets: what a caller holds while a read or write is under way."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

from swap.errors import SwapError, SwapIOError

_log = logging.getLogger(__name__)


class Ticket:
    """Completion of ``parts`` requests. It keeps ``buffer`` alive until all of them have ended."""

    __slots__ = ("_buffer", "_callbacks", "_done", "_error", "_lock", "_parts", "_sleepers")

    def __init__(self, parts: int, buffer: object = None) -> None:
        self._parts = parts
        self._buffer = buffer if parts else None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Ticket], None]] = []
        self._lock = threading.Lock()
        self._done = parts == 0
        # Made by the first who has to sleep: there are very many tickets, and most are done when somebody asks.
        self._sleepers: threading.Event | None = None

    @classmethod
    def gather(cls, tickets: Iterable[Ticket]) -> Ticket:
        """One ticket for many: done when all are, failed with the first error among them. Empty: done."""
        members = list(tickets)
        if len(members) == 1:
            return members[0]
        combined = cls(len(members))
        for member in members:
            member.add_done_callback(lambda ticket: combined.finish_part(ticket._error))
        return combined

    def done(self) -> bool:
        """Whether all requests have ended, well or not."""
        return self._done

    @property
    def error(self) -> BaseException | None:
        """The first error, None while there is none."""
        return self._error

    def wait(self, timeout: float | None = None) -> None:
        """Sleep until done; raise the first error, at every call. TimeoutError after ``timeout`` seconds."""
        if not self._done and not self._sleep(timeout):
            raise TimeoutError(f"swap I/O was not done after {timeout} s")
        if self._error is not None:
            raise fresh(self._error)

    def _sleep(self, timeout: float | None) -> bool:
        with self._lock:
            if self._done:
                return True
            sleepers = self._sleepers = self._sleepers or threading.Event()
        return sleepers.wait(timeout)

    def add_done_callback(self, function: Callable[[Ticket], None]) -> None:
        """Call ``function(ticket)`` when done: from an I/O thread, or at once if it is done. It must not block."""
        with self._lock:
            if not self._done:
                self._callbacks.append(function)
                return
        function(self)

    def finish_part(self, error: BaseException | None) -> None:
        """For the store: one request has ended."""
        with self._lock:
            if error is not None and self._error is None:
                self._error = error
            self._parts -= 1
            if self._parts:
                return
        # Before the event, so that a woken waiter is the memory's last owner; outside the lock, because dropping a
        # tensor may run anybody's finalizer.
        self._buffer = None
        with self._lock:
            callbacks, self._callbacks = self._callbacks, []
            self._done = True
            sleepers = self._sleepers
        if sleepers is not None:
            sleepers.set()
        for function in callbacks:
            try:
                function(self)
            except Exception:
                _log.exception("a callback of a finished swap ticket failed")


def wait_all(tickets: Iterable[Ticket], timeout: float | None = None) -> None:
    """Wait until *all* are done, then raise the first error. TimeoutError after ``timeout`` seconds together."""
    deadline = None if timeout is None else time.monotonic() + timeout
    first: BaseException | None = None
    for ticket in tickets:
        try:
            ticket.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            raise
        except Exception as error:
            first = first or error
    if first is not None:
        raise first


def fresh(error: BaseException) -> BaseException:
    """``error`` to raise now: stored errors are not raised themselves, or they would collect frames and tensors."""
    if isinstance(error, SwapIOError):
        clone = error.clone()
        clone.__cause__ = error.__cause__
        return clone
    if type(error) is SwapError:
        return SwapError(*error.args)
    return error.with_traceback(None)


def strip_frames(error: BaseException | None) -> None:
    """Drop the frames that ``error`` and its causes hold: they refer to the request and so to the caller's tensor."""
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
