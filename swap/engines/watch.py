"""A time limit for system calls: a request that a drive never answers becomes an error instead of a hang."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time

from swap.engines.protocol import Request
from swap.errors import SwapIOError

_log = logging.getLogger(__name__)


def timed_out(request: Request, seconds: float, *, offset: int | None = None, nbytes: int | None = None) -> SwapIOError:
    """The error of a request of which (these bytes) got no answer for ``seconds``."""
    cause = OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
    return request.failure(cause, f"no answer for {seconds:g} s (swap.timeout)", offset=offset, nbytes=nbytes)


def warn_slow(request: Request, seconds: float) -> None:
    """One line about a request that takes suspiciously long."""
    _log.warning(
        "swap %s of %d bytes at offset %d of %s has taken more than %.3g s; is the drive failing or overloaded?",
        request.operation,
        request.view.nbytes,
        request.offset,
        request.file.path,
        seconds,
    )


class Watch:
    """Ends requests through ``end``, each once: with their result, or with ETIMEDOUT after ``timeout`` seconds.

    The thread that is stuck keeps the request, and so its memory, until the system call comes back. ``timeout`` 0
    watches nothing and starts no thread.
    """

    def __init__(self, timeout: float, owner: str = "") -> None:
        self._timeout = timeout
        self._begun: dict[Request, float] = {}
        self._slow: set[Request] = set()
        self._busy = threading.Event()
        self._closed = threading.Event()
        self.threads: list[threading.Thread] = []
        if timeout > 0:
            thread = threading.Thread(target=self._run, name=f"swap-watch-{owner}", daemon=True)
            self.threads.append(thread)
            thread.start()

    def begin(self, request: Request) -> None:
        """A thread has taken ``request`` up."""
        self._begun[request] = time.monotonic()
        if self.threads and not self._busy.is_set():
            self._busy.set()

    def end(self, request: Request, error: BaseException | None) -> None:
        """``request`` has ended; does nothing if it has been given up."""
        if self._begun.pop(request, None) is not None:
            self._slow.discard(request)
            request.done(request, error)

    def close(self) -> None:
        """Let the thread end. What is under way can still be ended."""
        self._closed.set()
        self._busy.set()

    def _run(self) -> None:
        while True:
            self._busy.wait()
            if self._closed.wait(min(self._timeout / 4, 1.0)):
                return
            now = time.monotonic()
            for request, since in list(self._begun.items()):
                if now - since > self._timeout / 3 and request not in self._slow:
                    self._slow.add(request)
                    warn_slow(request, self._timeout / 3)
                if now - since > self._timeout:
                    self.end(request, timed_out(request, self._timeout))
            if not self._begun:
                self._busy.clear()
                # A request may have begun between the check and the clearing.
                if self._begun or self._closed.is_set():
                    self._busy.set()
