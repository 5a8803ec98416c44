"""The engine without io_uring: a pool of threads in preadv and pwritev, which release the GIL."""

from __future__ import annotations

import threading
import time

from swap.engines.protocol import BounceSource, Request, System
from swap.engines.queue import RequestQueue
from swap.engines.queued import QueuedEngine
from swap.engines.system import transfer
from swap.engines.watch import Watch


class ThreadsEngine(QueuedEngine):
    """``queue_depth`` daemon threads, each serving one request at a time."""

    name = "threads"

    def __init__(
        self,
        *,
        system: System,
        bounce: BounceSource,
        queue_depth: int,
        owner: str = "",
        timeout: float = 0.0,
        burst: int = 0,
    ) -> None:
        super().__init__(owner, timeout, burst)
        # The threads know the queue, not the engine: a forgotten engine can be collected while they sleep.
        arguments = (self._queue, self._watch, system, bounce)
        self._threads = [
            threading.Thread(target=_serve, args=arguments, name=f"swap-io-{owner}-{number}", daemon=True)
            for number in range(queue_depth)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:
            self._end()
            raise

    def close(self, timeout: float) -> bool:
        self._end()
        return join_all([*self._threads, *self._watch.threads], timeout)


def _serve(queue: RequestQueue, watch: Watch, system: System, bounce: BounceSource) -> None:
    while True:
        request = queue.pop()
        if request is None:
            return
        error: BaseException | None = None
        watch.begin(request)
        try:
            _perform(request, system, bounce)
        except BaseException as failure:
            error = failure
        watch.end(request, error)
        # A sleeping thread must not be what keeps a caller's tensor, or the frames of an error, alive.
        del request, error


def _perform(request: Request, system: System, bounce: BounceSource) -> None:
    call = system.pwrite_from if request.write else system.pread_into
    fd = request.file.fd
    steps = transfer(request, bounce)
    try:
        view, offset = next(steps)
        while True:
            try:
                count = call(fd, view, offset)
            except OSError as error:
                view, offset = steps.throw(error)
            else:
                view, offset = steps.send(count)
    except StopIteration:
        pass
    finally:
        steps.close()
    try:
        request.file.settle(request.offset, request.view.nbytes, write=request.write)
    except OSError as error:
        raise request.failure(error, "writing back the page cache") from error


def join_all(threads: list[threading.Thread], timeout: float) -> bool:
    """Join all threads within ``timeout`` seconds together; False if one is still running."""
    deadline = time.monotonic() + timeout
    for thread in threads:
        # A finalizer may close an engine from one of the engine's own threads: it cannot wait for itself.
        if thread is not threading.current_thread() and thread.ident is not None:
            thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)
