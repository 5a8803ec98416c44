"""Ends a run on SIGINT, SIGTERM or SIGUSR1: promptly, once, and in an orderly way."""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

FORCE_AFTER_SECONDS = 0.5
"""Signals closer together than this are one request: a terminal and a supervisor may both send one."""
LAUNCHED_SECONDS = 10.0
"""The same under a launcher, which passes on what it gets, and sends SIGTERM to all ranks once one has ended."""

_AGAIN_SECONDS = 0.005
_FINALIZE = weakref.finalize.__call__.__code__

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
SAVING = (signal.SIGTERM, signal.SIGUSR1)
"""Signals that ask for a checkpoint before the end; schedulers send one of them ahead of taking a machine away."""


class Interrupted(BaseException):
    """Raised in the main thread by the first signal. Not an `Exception`, so that no handler of errors swallows it."""

    def __init__(self, signum: int) -> None:
        self.signum = signum
        self.name = signal.Signals(signum).name
        super().__init__(f"interrupted by {self.name}")

    @property
    def saves(self) -> bool:
        """Whether the signal asks for a checkpoint."""
        return self.signum in SAVING


class Interruption:
    """Context that remembers the first signal of `SIGNALS`, and ends the process on a second one, `apart` seconds later
    or more.

    Within `raising` the first one raises `Interrupted`; within `polling` too, those of `SAVING` wait for `check`. Where
    the interpreter happens to run a finalizer, an exception would be printed and lost: it is raised a little later
    then. Long loops call `check` as well.
    Outside the main thread, where handlers cannot be installed, the context does nothing.
    """

    def __init__(self, apart: float = FORCE_AFTER_SECONDS) -> None:
        self.signum: int | None = None
        self._apart = apart
        self._raising = self._polling = self._deferring = self._whole = False
        self._postponed = False  # the first signal came in a finalizer
        self._at = 0.0
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            for signum in SIGNALS:
                self._previous[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)  # type: ignore[arg-type]
        self._previous.clear()

    def check(self) -> None:
        """Raises `Interrupted` when a signal has arrived."""
        if self.signum is not None:
            raise Interrupted(self.signum)

    @contextmanager
    def raising(self) -> Iterator[None]:
        """The only context in which a signal raises `Interrupted`, at once and for one that came before it.

        Outside it a signal is only remembered: set-up and the closing of a run must not be left half done.
        """
        self.check()
        self._raising = True
        try:
            yield
        finally:
            self._raising = False

    @contextmanager
    def polling(self, *, everything: bool = False) -> Iterator[None]:
        """Within `raising`: signals that ask for a checkpoint take effect at the next `check`, not within a step.
        `everything`: so do all others, for several ranks, which have to end at the same place.
        """
        before = self._polling, self._deferring
        self._polling, self._deferring = True, everything
        try:
            yield
        finally:
            self._polling, self._deferring = before

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Within `raising`: what is done here is done whole, so it must be short; a signal takes effect at its end."""
        self._whole = True
        try:
            yield
        finally:
            self._whole = False
        if self.signum is not None and self._raises(self.signum):
            raise Interrupted(self.signum)

    def _raises(self, signum: int) -> bool:
        """Whether that signal raises where the main thread is."""
        if not self._raising or self._whole:
            return False
        return not (self._polling and (self._deferring or signum in SAVING))

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signum is None:
            self.signum, self._at = signum, now
        elif not self._postponed:
            if now - self._at >= self._apart:
                # Swap files have no name in a directory, and a checkpoint without a manifest is none, so even this
                # leaves nothing that could be mistaken for something else.
                os._exit(128 + signum)
            return
        raises = self._raises(self.signum)
        self._postponed = raises and _in_finalizer(frame)
        if self._postponed:
            again = threading.Timer(_AGAIN_SECONDS, self._ask_again)
            again.daemon = True
            again.start()
        elif raises:
            raise Interrupted(self.signum)

    def _ask_again(self) -> None:
        if self._postponed and self._previous and self.signum is not None:
            os.kill(os.getpid(), self.signum)


def _in_finalizer(frame: FrameType | None) -> bool:
    """Whether the interpreter drops what is raised in `frame`."""
    while frame is not None:
        if frame.f_code is _FINALIZE or frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False
