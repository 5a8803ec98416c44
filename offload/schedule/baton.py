"""A baton that lets exactly one of several micro-batch threads run, and passes on round robin."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import threading
from collections.abc import Callable, Iterator, Sequence

_PATIENCE = 1.0


class Stopped(BaseException):
    """Ends a micro-batch because another one failed or the step was interrupted; no `Exception`, so that models that
    catch those do not hold it up.
    """


class Baton:
    """Whoever has it runs. A thread that is let go waits until it is handed the baton again.

    A thread may ask to be passed over while a condition holds; the first of those that still run never may, so that
    somebody can always go on.
    """

    def __init__(self, count: int) -> None:
        # Plain locks, each taken until its thread is handed the baton: nothing can interrupt them half-way.
        self._wake = [threading.Lock() for _ in range(count)]
        for lock in self._wake:
            lock.acquire()
        self._running = [True] * count
        self._over: dict[int, Callable[[], bool]] = {}
        self._turn: int | None = None
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self._cut_short = False

    def running(self, k: int) -> bool:
        """Whether thread `k` has not finished."""
        return self._running[k]

    def begin(self) -> None:
        """Hands the baton to the first thread."""
        self._hand_to(self._following(len(self._wake) - 1))

    def take(self, k: int) -> None:
        """Waits for the baton.

        Raises:
            Stopped: a thread failed, or `stop` was called.
        """
        self._wake[k].acquire()
        self._check()

    def alone(self, k: int) -> bool:
        """Whether nobody else could run now, and nobody has to stop."""
        return self._following(k) == k and self._error is None

    def pass_on(self, k: int, over: Callable[[], bool] | None = None) -> None:
        """Lets the others run up to their next such call; with `over`, for as long as that is true.

        Raises:
            Stopped: as `take`.
        """
        self._check()
        if over is not None:
            self._over[k] = over
        following = self._following(k)
        if following != k:
            self._hand_to(following)
            self._wake[k].acquire()
        self._over.pop(k, None)
        self._check()

    def finish(self, k: int, error: BaseException | None = None) -> None:
        """Thread `k` has ended; `error`, if it is the first, stops all others at their next call."""
        if error is not None:
            self.stop(error)
        self._running[k] = False
        if any(self._running):
            self._hand_to(self._following(k))
        else:
            self._turn = None
            self._ended.set()

    def leave_out(self, k: int) -> None:
        """Thread `k` never started."""
        self._running[k] = False

    def stop(self, error: BaseException) -> bool:
        """Makes every thread raise `Stopped` when it has the baton next; False if they have to already."""
        if self._error is not None:
            return False
        self._error = error
        return True

    def wait_for_end(self, threads: Sequence[threading.Thread]) -> BaseException | None:
        """Waits until all threads have ended; returns the first error, if there was one, and forgets it.

        An interrupt makes them stop at the next unit; a second one cuts short what the running one is doing.
        """
        while True:
            try:
                while any(self._running) and not self._ended.wait(_PATIENCE):
                    self._finish_dead(threads)
                for thread in threads:
                    thread.join()
            except BaseException as interrupt:
                self.interrupt(interrupt, threads)
            else:
                break
        error, self._error = self._error, None  # its frames lead back here
        return error

    def _finish_dead(self, threads: Sequence[threading.Thread]) -> None:
        """Goes on for a thread that was cut short before it could hand the baton on itself."""
        turn = self._turn
        if turn is not None and self._running[turn] and not threads[turn].is_alive():
            self.finish(turn)

    def interrupt(self, error: BaseException, threads: Sequence[threading.Thread]) -> None:
        """Stops everybody; the second time, also what the running thread is doing."""
        turn = self._turn
        if self.stop(error) or turn is None or self._cut_short:
            return
        ident = threads[turn].ident
        if ident is not None:
            self._cut_short = True
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(Stopped))

    @contextlib.contextmanager
    def stopping(self, threads: Sequence[threading.Thread]) -> Iterator[None]:
        """Within the context a Ctrl-C stops the threads, and surfaces as their error, instead of leaving them behind.

        Only in the main thread, and only where Ctrl-C raises `KeyboardInterrupt` as Python has it by default.
        """
        in_main = threading.current_thread() is threading.main_thread()
        if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield
            return
        signal.signal(signal.SIGINT, lambda _number, _frame: self.interrupt(KeyboardInterrupt(), threads))
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _check(self) -> None:
        if self._error is not None:
            raise Stopped

    def _following(self, k: int) -> int:
        count = len(self._wake)
        for step in range(1, count + 1):
            j = (k + step) % count
            over = self._over.get(j)
            # Whoever has to stop is not passed over: what it waits for may never come.
            if self._running[j] and (over is None or self._error is not None or not over()):
                return j
        return k

    def _hand_to(self, k: int) -> None:
        self._turn = k
        self._wake[k].release()
