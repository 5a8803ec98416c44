"""The optimizer step over all flats: chunk after chunk, the reads of the next ones and the writes of the last ones
beside the kernel.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from types import FrameType

from offload.planes import SlotQueue
from offload.state import ChunkJob


def run_jobs(jobs: Iterable[ChunkJob], queue: SlotQueue, grad_scale: float, ahead: int) -> None:
    """Runs `jobs` in order with up to `ahead` of them being read in advance; returns when all writes are done.

    `ahead` must be below the number of staging slots. After an exception every slot is back and no transfer is under
    way.
    """
    pending: deque[ChunkJob] = deque()
    try:
        for job in jobs:
            pending.append(job)
            job.start(queue)
            if len(pending) > ahead:
                pending[0].finish(queue, grad_scale)
                pending.popleft()
        while pending:
            pending[0].finish(queue, grad_scale)
            pending.popleft()
        queue.drain()
    except BaseException:
        for job in pending:
            job.abandon(queue)
        with contextlib.suppress(Exception):
            queue.drain()
        raise


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Holds back a Ctrl-C until the block has ended, so that it finds a step done or not begun; but not a second one.

    Only in the main thread, and only where Ctrl-C raises `KeyboardInterrupt` as Python has it by default.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    arrived = False

    def remember(_number: int, _frame: FrameType | None) -> None:
        nonlocal arrived
        if arrived:
            raise KeyboardInterrupt
        arrived = True

    signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if arrived:
        raise KeyboardInterrupt
