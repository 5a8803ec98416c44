"""The io_uring engine: a native thread moves the bytes, a Python thread hears of what is done.

[Note: two threads] The native driver (``csrc/transfers.cpp``) cuts requests into blocks, serves them by priority,
checks results, resubmits what came short and refills the queue, all without the GIL: a busy interpreter never idles
the drive. It writes to an eventfd when requests have ended; the reaper thread below sleeps on it in a plain system
call and calls ``done``. What io_uring serves no better (buffered files, bounced pages) goes to a ``ThreadsEngine``.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import select
import threading
import weakref
from typing import Any

import numpy as np

from swap.engines.protocol import BounceSource, Request, RequestFile, System
from swap.engines.threads import ThreadsEngine, join_all
from swap.engines.watch import timed_out, warn_slow
from swap.errors import SwapError
from swap.faults import FaultySystem
from swap.geometry import PAGE
from swap.interception import Call, Interceptor
from swap.native import explain_buffers, load

_log = logging.getLogger(__name__)

_DONE, _BEFORE, _AFTER, _STOPPED, _SLOW = range(5)
_NO_DETAIL, _END_OF_FILE, _TOO_MANY, _STALLED, _TIMEOUT, _CANCELLED = range(6)

_MOST_BLOCK = 1 << 30
"""One system call moves less than 2 GiB; more would only come back short."""

_live: weakref.WeakSet[UringEngine] = weakref.WeakSet()


class UringUnavailable(OSError):
    """The ring could not be made; the message says at which step."""


class UringEngine:
    """At most ``queue_depth`` blocks of ``block`` bytes in flight; requests of any size.

    ``registered``: try to register files and memory. ``explained``: somebody has said already why memory cannot be.
    """

    name = "io_uring"

    def __init__(
        self,
        *,
        system: System,
        bounce: BounceSource,
        queue_depth: int,
        block: int,
        owner: str = "",
        timeout: float = 0.0,
        burst: int = 0,
        registered: bool = True,
        explained: bool = False,
    ) -> None:
        module, why = load()
        if module is None:
            raise UringUnavailable(errno.ENOSYS, why)
        plan = system.plan if isinstance(system, FaultySystem) else None
        driver, number, stage = module.start(
            queue_depth, min(block, _MOST_BLOCK), timeout, plan is not None, registered, burst
        )
        if driver is None:
            raise UringUnavailable(number, f"io_uring: {stage} failed: {os.strerror(number)}")
        self._driver = driver
        self._arguments: dict[str, Any] = {
            "system": system,
            "bounce": bounce,
            "queue_depth": queue_depth,
            "owner": f"{owner}-plain",
            "timeout": timeout,
            "burst": burst,
        }
        self._plain: ThreadsEngine | None = None
        self._plain_lock = threading.Lock()
        self._closed = False
        self._warned = explained
        # The reaper knows the requests, not the engine: a forgotten engine can be collected while it sleeps.
        self._requests = _Requests(driver, timeout, Interceptor(plan, driver) if plan is not None else None)
        self._thread = threading.Thread(target=self._requests.run, name=f"swap-reaper-{owner}", daemon=True)
        _live.add(self)
        try:
            self._thread.start()
        except BaseException:
            driver.stop()
            raise

    def splits(self, file: RequestFile) -> bool:
        return file.direct

    def register(self, address: int, nbytes: int) -> None:
        error = -self._driver.add_region(address, nbytes)
        if error and not self._warned and error != errno.ECANCELED:
            self._warned = True
            reason, remedy = explain_buffers(error, nbytes)
            _log.warning("swap: io_uring goes on with plain buffers: %s%s", reason, f"; {remedy}" if remedy else "")

    def unregister(self, address: int) -> None:
        self._driver.remove_region(address)

    def add_file(self, file: RequestFile) -> None:
        """Register a file; where that fails, transfers name its descriptor."""
        if file.direct:
            self._driver.add_file(file.fd)

    def submit(self, request: Request) -> None:
        if request.bounce or not request.file.direct:
            self._plain_engine().submit(request)
        else:
            self._requests.submit(request)

    def cancel(self, error: BaseException) -> int:
        plain = self._plain
        return self._requests.cancel(error) + (plain.cancel(error) if plain is not None else 0)

    def close(self, timeout: float) -> bool:
        with self._plain_lock:
            self._closed = True
        self._requests.cancel(SwapError("store closed before the request was begun"))
        self._requests.stop()
        plain_idle = self._plain is None or self._plain.close(timeout)
        reaped = join_all([self._thread], timeout)
        if reaped and self._thread is not threading.current_thread():
            self._driver.close_descriptors()
        return reaped and plain_idle

    def counters(self) -> dict[str, int]:
        """Blocks submitted, how many with registered buffers, calls of io_uring_enter, blocks submitted again."""
        return dict(self._driver.counters())

    def _plain_engine(self) -> ThreadsEngine:
        with self._plain_lock:
            if self._closed:
                raise SwapError("the I/O engine is closed")
            if self._plain is None:
                self._plain = ThreadsEngine(**self._arguments)
            return self._plain

    def _abandon_in_child(self) -> None:
        """After fork: drop the descriptors, or the ring would keep the swap files when the parent is gone."""
        for descriptor in self._driver.descriptors():
            if descriptor >= 0:
                try:
                    os.close(descriptor)
                except OSError:
                    continue
        # Its destructor would close the numbers again: let the child's copy live for ever.
        _inherited.append(self._driver)


_inherited: list[Any] = []


def _after_fork_in_child() -> None:
    for engine in list(_live):
        engine._abandon_in_child()
    _live.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


class _Requests:
    """The requests under way and the thread that ends them."""

    def __init__(self, driver: Any, timeout: float, interceptor: Interceptor | None) -> None:
        self._driver = driver
        self._timeout = timeout
        self._interceptor = interceptor
        self._numbers = itertools.count(1)
        self._active: dict[int, Request] = {}
        # Given up, but the kernel may still write to their memory: kept until the driver reports them again.
        self._given_up: dict[int, Request] = {}
        self._cancel_error: BaseException | None = None
        self._stopping = False

    def submit(self, request: Request) -> None:
        number = next(self._numbers)
        self._active[number] = request
        view = request.view
        address = request.address or np.frombuffer(view, dtype=np.uint8).ctypes.data
        if address % PAGE or view.nbytes % PAGE or request.offset % PAGE:
            del self._active[number]
            raise SwapError(f"an unaligned {request.operation} reached io_uring; it has to be bounced")
        if not self._driver.submit(
            number, request.file.fd, request.write, request.offset, address, view.nbytes, request.priority
        ):
            del self._active[number]
            raise SwapError("the I/O engine is closed")

    def cancel(self, error: BaseException) -> int:
        self._cancel_error = error
        return int(self._driver.cancel())

    def stop(self) -> None:
        self._stopping = True
        self._driver.stop()

    def run(self) -> None:
        """The reaper: sleeps until the driver has something to say."""
        poll = select.poll()
        poll.register(self._driver.event_fd(), select.POLLIN)
        while True:
            seconds = None
            if self._interceptor is not None:
                self._interceptor.run(everything=self._stopping)
                seconds = self._interceptor.wait_seconds()
            poll.poll(None if seconds is None else seconds * 1000)
            for event in self._driver.take():
                if event[0] == _STOPPED:
                    return
                self._handle(*event)

    def _handle(
        self,
        kind: int,
        number: int,
        result: int,
        detail: int,
        offset: int,
        nbytes: int,
        moved: int,
        write: bool,
        fd: int,
        address: int,
    ) -> None:
        if kind == _DONE:
            request = self._active.pop(number, None)
            if request is None:
                self._given_up.pop(number, None)
                return
            if detail == _TIMEOUT:
                self._given_up[number] = request
            error = self._error(request, result, detail, offset, nbytes, moved) if result else None
            request.done(request, error)
        elif kind == _SLOW:
            request = self._active.get(number)
            if request is not None:
                warn_slow(request, self._timeout / 3)
        elif self._interceptor is not None:
            call = Call(number, write, fd, offset, nbytes, address)
            if kind == _BEFORE:
                self._interceptor.before(call)
            else:
                self._interceptor.after(call, result)

    def _error(
        self, request: Request, number: int, detail: int, offset: int, nbytes: int, moved: int
    ) -> BaseException:
        if detail == _CANCELLED:
            return self._cancel_error or SwapError("the request was cancelled")
        after = f"after {moved} of {nbytes} bytes"
        if detail == _TIMEOUT:
            return timed_out(request, self._timeout, offset=offset, nbytes=nbytes)
        if detail == _NO_DETAIL:
            cause = OSError(number, os.strerror(number))
            return request.failure(cause, after if moved else "", offset=offset, nbytes=nbytes)
        text = {
            _END_OF_FILE: f"unexpected end of file {after}",
            _TOO_MANY: f"the system reported more bytes than the {nbytes - moved} of the transfer",
            _STALLED: f"no progress {after} in 16 attempts",
        }[detail]
        return request.failure(None, text, offset=offset, nbytes=nbytes)
