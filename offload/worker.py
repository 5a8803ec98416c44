"""One background thread that runs tasks in order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue

_Tasks = SimpleQueue["Callable[[], None] | None"]


class Worker:
    """Starts its thread with the first task. The thread holds nothing but tasks, so whoever owns it can be forgotten
    while it sleeps; it is a daemon, so that the interpreter can end while a task waits for what will not come.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: _Tasks = SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def started(self) -> bool:
        return self._thread is not None

    def submit(self, task: Callable[[], None]) -> Future[None]:
        """Runs `task` after all earlier ones."""
        if self._thread is None:
            self._thread = threading.Thread(target=_work, args=(self._tasks,), name=self._name, daemon=True)
            self._thread.start()
        future: Future[None] = Future()
        self._tasks.put(partial(_run, future, task))
        return future

    def post(self, task: Callable[[], None]) -> None:
        """Runs `task`, which must not raise, after all earlier ones, if there is ever a thread. For finalizers too."""
        self._tasks.put(task)

    def close(self) -> None:
        """Ends the thread once it has run what it has. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._tasks.put(None)
            if thread is not threading.current_thread():  # a finalizer may run anywhere
                thread.join()


def _work(tasks: _Tasks) -> None:
    while True:
        task = tasks.get()
        if task is None:
            return
        task()
        del task  # a sleeping thread keeps nobody's tensors alive


def _run(future: Future[None], task: Callable[[], None]) -> None:
    try:
        task()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(None)
