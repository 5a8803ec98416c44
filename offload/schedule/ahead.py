"""States that are read before the step that uses them: while backward runs, the first units' chunks of the next update
come into staging slots that nobody needs then, so that the update begins with the kernel.

Nothing depends on it. What was read and is not what the step turns out to need, or is not what rests any more, is
dropped and read again: [Note: marks]. Which chunks a step has, and whether a chunk's weight is read, is known from the
step before.

[Note: marks] A plane in a swap file counts the writes to it. A read is good for a step if no write was under way when
it began and none has begun since.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from offload.planes import Carver, Operand, SlotQueue
from offload.tiers import Tier
from swap.staging import Slot

if TYPE_CHECKING:
    from offload.state import FlatState


class ChunkRead:
    """The planes of the elements `[lo, hi)` of `state` on their way into a staging slot, or there."""

    def __init__(self, state: FlatState, lo: int, hi: int, slot: Slot) -> None:
        self.state, self.lo, self.hi, self.slot = state, lo, hi, slot
        self.carver = Carver(slot)
        self.operands: dict[str, Operand] = state.operands(lo, hi, self.carver, on_device=state.on_device)
        self._fetched: set[str] = set()
        self._marks: dict[str, int] = {}

    def fetch(self, *, weight: bool) -> None:
        """Starts to bring what has not been asked for; `weight`: that plane too."""
        for name, operand in self.operands.items():
            if name not in self._fetched and (weight or name != "weight"):
                self._fetched.add(name)
                operand.fetch()

    def fetch_ahead(self, *, weight: bool) -> bool:
        """Starts to read what rests in swap files, whose writes are counted; False if one is being written."""
        wanted = {n: op for n, op in self.operands.items() if _in_file(op) and (weight or n != "weight")}
        for name, operand in wanted.items():
            mark = operand.plane.mark()
            if mark is None:
                return False
            self._marks[name] = mark
        for name, operand in wanted.items():
            self._fetched.add(name)
            operand.fetch()
        return True

    @property
    def current(self) -> bool:
        """Whether what was read ahead is still what rests, see [Note: marks]."""
        return all(self.operands[name].plane.mark() == mark for name, mark in self._marks.items())

    def ready(self) -> None:
        """Waits until everything that was asked for is there. Raises the first error."""
        for name in self.operands:
            if name in self._fetched:
                self.operands[name].ready()

    def abandon(self) -> None:
        """Waits for what is under way; the slot is its owner's again."""
        for operand in self.operands.values():
            operand.forget()


def _in_file(operand: Operand) -> bool:
    return operand.plane.tier is Tier.NVME


class ReadAhead:
    """Chunks read before their step. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reads: dict[tuple[FlatState, int, int], ChunkRead] = {}
        self._todo: deque[tuple[FlatState, int, int, bool]] = deque()

    def __len__(self) -> int:
        """Slots that are held."""
        return len(self._reads)

    @property
    def unread(self) -> bool:
        """Whether there is more to read."""
        return bool(self._todo)

    def begin(self, states: Iterable[FlatState]) -> None:
        """Plans to read what the last step needed of `states`, in this order. What has been read stays.

        A chunk of which nothing is in a swap file would hold its slot for nothing; one whose kernel runs on the device
        would take memory there that backward needs.
        """
        with self._lock:
            self._todo.clear()
            for state in states:
                if state.on_device:
                    continue
                filed = any(plane.tier is Tier.NVME for plane in state.planes.values())
                for lo, hi, weight in state.last_chunks:
                    wanted = filed or (weight and state.weight.tier is Tier.NVME)
                    if wanted and (state, lo, hi) not in self._reads:
                        self._todo.append((state, lo, hi, weight))

    def read(self, queue: SlotQueue) -> bool:
        """Begins to read the next chunk; False if there is none, or it cannot be read yet, or no slot is free. A drive
        that refuses is the update's to tell of, which asks it again.
        """
        with self._lock:
            if not self._todo:
                return False
            state, lo, hi, weight = self._todo[0]
            if state.closed:
                self._todo.popleft()
                return True
            if state.pending is not None or state.writing:
                return False
            slot = queue.try_acquire()
            if slot is None:
                return False
            chunk, begun = None, False
            try:
                chunk = ChunkRead(state, lo, hi, slot)
                begun = chunk.fetch_ahead(weight=weight)
            except Exception:
                self._todo.clear()
            if not begun or chunk is None:
                _drop(chunk, slot)
                return False
            self._todo.popleft()
            self._reads[state, lo, hi] = chunk
            return True

    def take(self, state: FlatState, lo: int, hi: int) -> ChunkRead | None:
        """What was read of this chunk, whose slot is the caller's from now on; None if nothing that is good."""
        with self._lock:
            chunk = self._reads.pop((state, lo, hi), None)
        if chunk is not None and not chunk.current:
            _drop(chunk, chunk.slot)
            return None
        return chunk

    def keep(self, wanted: Iterable[tuple[FlatState, int, int]]) -> None:
        """Reads no more, and drops all that is not `wanted`."""
        with self._lock:
            self._todo.clear()
            if not self._reads:
                return
            chosen = set(wanted)
            dropped = [self._reads.pop(key) for key in [key for key in self._reads if key not in chosen]]
        for chunk in dropped:
            _drop(chunk, chunk.slot)

    def forget(self) -> None:
        """Drops everything and reads no more."""
        self.keep(())


def _drop(chunk: ChunkRead | None, slot: Slot) -> None:
    if chunk is not None:
        with contextlib.suppress(Exception):
            chunk.abandon()
    slot.release()
