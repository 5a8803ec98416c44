"""The portable engine: aiofiles on an asyncio loop in one background thread.

aiofiles gives files coroutines for seek, readinto and write and runs them in an executor. The files handed to it are
``PositionedFile``: their position lives in the object, and the transfer goes through the same system-call layer as
that of the other engines, with the same checks.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import io
import os
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from aiofiles.threadpool import wrap
from aiofiles.threadpool.binary import AsyncFileIO

from swap.engines.protocol import BounceSource, Request, RequestFile, System
from swap.engines.queue import RequestQueue
from swap.engines.queued import QueuedEngine
from swap.engines.system import transfer
from swap.engines.threads import join_all
from swap.engines.watch import Watch
from swap.errors import SwapError


class PositionedFile(io.FileIO):
    """A handle with a position of its own on a descriptor that others use at the same time, and that others close."""

    def __init__(self, fd: int, system: System) -> None:
        super().__init__(fd, "r+", closefd=False)
        self._system = system
        self._position = 0

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        # No lseek: all handles would share the descriptor's position.
        self._position = offset
        return offset

    def readinto(self, buffer: Any, /) -> int:
        return self._system.pread_into(self.fileno(), buffer, self._position)

    def write(self, buffer: Any, /) -> int:
        return self._system.pwrite_from(self.fileno(), buffer, self._position)


class DaemonExecutor(concurrent.futures.Executor):
    """A fixed pool of daemon threads: a hung system call must not keep the interpreter from exiting."""

    def __init__(self, workers: int, name: str) -> None:
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.threads = [
            threading.Thread(target=_work, args=(self._tasks,), name=f"{name}-{number}", daemon=True)
            for number in range(workers)
        ]
        for thread in self.threads:
            thread.start()

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[Any]:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._tasks.put(functools.partial(_run, future, functools.partial(function, *args, **kwargs)))
        return future

    def stop(self) -> None:
        for _ in self.threads:
            self._tasks.put(None)


def _work(tasks: SimpleQueue[Callable[[], None] | None]) -> None:
    while True:
        task = tasks.get()
        if task is None:
            return
        task()
        del task


def _run(future: concurrent.futures.Future[Any], function: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


class AiofilesEngine(QueuedEngine):
    """At most ``queue_depth`` requests in flight, each a coroutine on the engine's loop."""

    name = "aiofiles"

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
        self._server = _Server(self._queue, self._watch, system, bounce, queue_depth, owner)
        self._thread = threading.Thread(target=self._server.run, name=f"swap-aiofiles-{owner}", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> None:
        super().submit(request)
        self._server.wake()

    def close(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        self._end()
        self._server.wake()
        threads = [self._thread, *self._server.executor.threads, *self._watch.threads]
        return join_all(threads, max(0.0, deadline - time.monotonic()))


class _Server:
    """What the loop's thread runs. It refers to the queue, never to the engine or the store."""

    def __init__(
        self, queue: RequestQueue, watch: Watch, system: System, bounce: BounceSource, queue_depth: int, owner: str
    ) -> None:
        self._queue = queue
        self._watch = watch
        self._system = system
        self._bounce = bounce
        self._depth = queue_depth
        self.executor = DaemonExecutor(queue_depth, f"swap-aiofiles-io-{owner}")
        self._loop = asyncio.new_event_loop()
        self._idle: dict[int, list[AsyncFileIO]] = {}
        self._active: set[asyncio.Task[None]] = set()

    def run(self) -> None:
        try:
            self._loop.call_soon(self._pump)
            self._loop.run_forever()
        finally:
            self.executor.stop()
            self._loop.close()

    def wake(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._pump)
        except RuntimeError:
            # The loop is gone: only after close, when nothing is left to do.
            if not self._queue.closed:
                raise SwapError("the aiofiles engine's event loop has died") from None

    def _pump(self) -> None:
        while len(self._active) < self._depth:
            request = self._queue.pop_nowait()
            if request is None:
                break
            task = self._loop.create_task(self._serve(request))
            self._active.add(task)
            task.add_done_callback(self._finished)
        if self._queue.closed and not self._active:
            self._loop.stop()

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._active.discard(task)
        self._pump()

    async def _serve(self, request: Request) -> None:
        error: BaseException | None = None
        self._watch.begin(request)
        try:
            handle = self._handle(request.file)
            try:
                await self._perform(request, handle)
            finally:
                self._idle[request.file.fd].append(handle)
        except OSError as failure:
            error = failure if isinstance(failure, SwapError) else request.failure(failure)
        except BaseException as failure:
            error = failure
        self._watch.end(request, error)

    def _handle(self, file: RequestFile) -> AsyncFileIO:
        idle = self._idle.setdefault(file.fd, [])
        if idle:
            return idle.pop()
        handle: AsyncFileIO = wrap(
            PositionedFile(file.fd, self._system), loop=self._loop, executor=self.executor
        )
        return handle

    async def _perform(self, request: Request, handle: AsyncFileIO) -> None:
        call = handle.write if request.write else handle.readinto
        steps = transfer(request, self._bounce)
        try:
            view, offset = next(steps)
            while True:
                try:
                    await handle.seek(offset)
                    count = await call(view)
                except OSError as error:
                    view, offset = steps.throw(error)
                else:
                    view, offset = steps.send(count or 0)
        except StopIteration:
            pass
        finally:
            steps.close()
        try:
            settle = functools.partial(request.file.settle, write=request.write)
            await self._loop.run_in_executor(self.executor, settle, request.offset, request.view.nbytes)
        except OSError as error:
            raise request.failure(error, "writing back the page cache") from error
