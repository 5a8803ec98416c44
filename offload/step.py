"""The optimizer step over all flats: chunk after chunk, the reads of the next ones and the writes of the last ones
beside the kernel.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable

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
