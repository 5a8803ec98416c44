"""Updates that a step has decided on, carried out by a thread beside forward and backward.

`step()` decides everything about an update (hyperparameters, clipping factor, which gradients) and submits it unit by
unit. One worker thread runs the chunk jobs: it reads states ahead into staging slots, runs the kernel and leaves the
writes to the swap store. Whoever needs a unit's weights, states or gradients waits for its update first, which also
puts it before all others: the order of the work serves whoever is nearest to waiting.

[Note: delivery] A unit whose weights are brought to the device for every use would be read from the disk right after
its update wrote it. Instead the update hands its new weights to the unit's buffer while they are in memory. So the
update of such a unit is not begun before the unit has a buffer (it is being prefetched, or somebody waits for it);
until then its states are read ahead as far as there are staging slots.

[Note: slots] Reads ahead leave two staging slots to others: gradients and loads take one at a time and always give it
back, so whoever waits for a slot gets one. An update under way needs one slot to go on. While there is no update, in
backward, the same slots take what the next step's first updates will read (`ReadAhead`).
"""

from __future__ import annotations

import contextlib
import enum
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from torch import Tensor

from offload.errors import OffloadError
from offload.gradients import TakenGradients
from offload.planes import SlotQueue
from offload.schedule.ahead import ChunkRead, ReadAhead
from offload.state import ChunkJob, FlatState
from offload.tiers import TierMemory
from swap.devices import Event
from swap.staging import Slot
from swap.tickets import fresh

_AHEAD = 2
"""Chunks of a unit that are read while one is at work, where there are few staging slots."""
_SLOT_POLL = 0.02  # seconds between looks for a free slot while there is nothing else to do


class Stage(enum.Enum):
    """Life cycle of one unit's update."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


class UnitUpdate:
    """One unit's part in a step: its chunk jobs, in order. Waiting for it also asks for it."""

    def __init__(
        self,
        index: int,
        name: str,
        jobs: Mapping[int, Sequence[ChunkJob]],
        states: Sequence[FlatState],
        gradients: Sequence[TakenGradients],
        grad_scale: float,
        *,
        paced: bool,
    ) -> None:
        self.index, self.name, self.grad_scale = index, name, grad_scale
        self.stage = Stage.WAITING
        self.error: BaseException | None = None
        self.asked = not paced
        """Whether it may run before it has somewhere to deliver to, see [Note: delivery]."""
        self.ranges = {flat: [(job.lo, job.hi) for job in part] for flat, part in jobs.items()}
        """Elements of each flat that it writes."""
        self.states = states
        self.targets: dict[int, tuple[Tensor, Event | None]] = {}
        self._gradients = gradients
        self._todo = deque((flat, job) for flat, part in jobs.items() for job in part)
        self._started: deque[tuple[int, ChunkJob]] = deque()
        self._ended = threading.Event()
        self._owner: weakref.ref[Updates] | None = None

    def belongs_to(self, owner: Updates) -> None:
        self._owner = weakref.ref(owner)
        for state in self.states:
            state.pending = self

    def wait(self, timeout: float | None = None) -> None:
        """Sleeps until the update is carried out; its writes may be under way. Raises its error, at every call."""
        owner = None if self._owner is None else self._owner()
        if owner is not None and not self._ended.is_set():
            owner.ask(self)
        if not self._ended.wait(timeout):
            raise TimeoutError(f"the update of unit {self.name} was not done after {timeout} s")
        if self.error is not None:
            if owner is not None:
                owner.told = True
            raise fresh(self.error)

    def done(self) -> bool:
        return self._ended.is_set()

    # For the worker

    @property
    def runnable(self) -> bool:
        return self.stage is Stage.WAITING and (self.asked or bool(self.targets))

    @property
    def started(self) -> int:
        """Chunks that have a staging slot."""
        return len(self._started)

    @property
    def unread(self) -> bool:
        """Whether there are chunks that have none yet."""
        return bool(self._todo)

    @property
    def next_chunk(self) -> ChunkJob:
        """The first of those."""
        return self._todo[0][1]

    def start_next(self, source: Slot | ChunkRead) -> None:
        """Begins to read the next chunk into a slot, or goes on with what has been read of it."""
        item = self._todo.popleft()
        self._started.append(item)
        item[1].start(source)

    def chunks(self) -> list[ChunkJob]:
        """Those that have not begun."""
        return [job for _, job in self._todo]

    def finish_next(self, memory: TierMemory, queue: SlotQueue) -> None:
        flat, job = self._started[0]
        target = self.targets.get(flat)
        deliver = None if target is None else partial(_deliver, memory, *target)
        job.finish(queue, self.grad_scale, deliver)
        self._started.popleft()

    def end(self, error: BaseException | None) -> None:
        """Lets go of everything, then wakes who waits."""
        if self._ended.is_set():
            return
        self.error, self.stage = error, Stage.ENDED
        self.targets = {}
        self._todo.clear()
        if error is None:
            for gradients in self._gradients:
                gradients.release()
            for state in self.states:
                state.pending = None
        # No cycle keeps a forgotten engine's memory until the collector comes by.
        self._gradients, self.states = (), ()
        self._ended.set()

    def abandon(self, queue: SlotQueue) -> None:
        """Gives back the slots of chunks that were read ahead."""
        while self._started:
            with contextlib.suppress(Exception):
                self._started[0][1].abandon(queue)
            self._started.popleft()


def _deliver(memory: TierMemory, buffer: Tensor, allocated: Event | None, lo: int, hi: int, weight: Tensor) -> None:
    memory.copy_in(buffer[lo:hi], weight, after=() if allocated is None else (allocated,)).wait()


class Updates:
    """The pending updates of one engine, at most one a unit, in the order in which they were submitted."""

    def __init__(self, memory: TierMemory, on_failure: Callable[[], None]) -> None:
        """`on_failure` is called from the worker, before anybody learns of the error."""
        self._memory = memory
        self._queue = SlotQueue(memory)
        self._on_failure = on_failure
        self._changed = threading.Condition()
        self._pending: dict[int, UnitUpdate] = {}
        self._ahead = ReadAhead()
        self._reading_ahead = False
        self._started = 0
        """Chunks of updates that have a staging slot; the worker's."""
        self._error: BaseException | None = None
        self.told = False
        """Whether somebody has met the error."""
        self._closed = False
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

    # For the engine

    def submit(self, updates: Sequence[UnitUpdate]) -> None:
        """Takes updates over; a unit's earlier one must have ended.

        Raises:
            OffloadError: an earlier update failed, or the engine is closed.
        """
        wanted = [job.key for update in updates for job in update.chunks()]
        with self._changed:
            self._check()
            for update in updates:
                if update.index in self._pending:
                    raise OffloadError(f"unit {update.name}: a second update was submitted before the first one ended")
            for update in updates:
                update.belongs_to(self)
                self._pending[update.index] = update
            if updates:
                self._begin_work()
            self._reading_ahead = False
        self._ahead.keep(wanted)

    def _begin_work(self) -> None:
        if self._thread is None:
            # It knows nothing of the engine, so that a forgotten one can be collected while it sleeps; a daemon, so
            # that the interpreter can end.
            owner = weakref.ref(self)
            self._thread = threading.Thread(target=_work, args=(owner,), name="offload-optimizer", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    @property
    def wants_ahead(self) -> bool:
        """Whether `read_ahead` would begin something."""
        return not (self._reading_ahead or self._pending)

    def read_ahead(self, states: Sequence[FlatState]) -> None:
        """Begins to read what the next step's first updates will need of `states`, which come in the order of their
        use. Once a step, while no update is pending.
        """
        with self._changed:
            if self.wants_ahead and not self._closed and self._error is None:
                self._reading_ahead = True
                self._ahead.begin(states)
                self._begin_work()

    def forget_ahead(self) -> None:
        """Gives back the slots of what has been read ahead; what is laid out anew, or overwritten, was read in vain."""
        self._ahead.forget()
        self._reading_ahead = False

    def ask(self, update: UnitUpdate) -> None:
        """Somebody waits for `update`: it goes first, delivery or not."""
        with self._changed:
            if update.stage is Stage.WAITING and update.index in self._pending:
                update.asked = True
                del self._pending[update.index]
                self._pending = {update.index: update, **self._pending}
                self._changed.notify_all()

    def pending(self, index: int) -> UnitUpdate | None:
        """The update of unit `index` that has not ended."""
        return self._pending.get(index)

    def deliver(self, update: UnitUpdate, buffers: Mapping[int, tuple[Tensor, Event | None]]) -> bool:
        """Has `update` put the new weights of its ranges into `buffers` (by flat; compute must not have begun to use
        them, and the event says from when they are free). False if it has begun without.
        """
        with self._changed:
            if update.stage is not Stage.WAITING:
                return False
            update.targets = dict(buffers)
            self._changed.notify_all()
            return True

    def withdraw(self, update: UnitUpdate) -> bool:
        """Takes back where `update` was to deliver; False if it has begun."""
        with self._changed:
            if update.stage is Stage.WAITING:
                update.targets = {}
            return update.stage is not Stage.RUNNING

    def drain(self) -> None:
        """Waits until every update is carried out and written. Raises the first error."""
        while True:
            with self._changed:
                update = next(iter(self._pending.values()), None)
                for other in self._pending.values():
                    other.asked = True
                self._changed.notify_all()
            if update is None:
                break
            update.wait()
        self._raise_error()
        self.settle_writes()
        self.forget_ahead()

    def wait_for(self, most: int) -> None:
        """Waits until at most `most` updates are pending. Raises the error of one that it waited for."""
        while len(self._pending) > most:
            update = next(iter(self._pending.values()), None)
            if update is not None:
                update.wait()

    def settle_writes(self) -> None:
        """Waits for the writes of updates that have ended. Raises the first error of one."""
        with self._changed:
            if self._pending:
                return
        try:
            self._queue.drain()
        except Exception as error:
            self._error = self._error or error
            self.told = True
            self._on_failure()
            raise

    @property
    def idle(self) -> bool:
        return not self._pending

    def report(self) -> None:
        """Raises the error of a failed update, if nobody has met it yet."""
        if not self.told:
            self._raise_error()

    def close(self) -> None:
        """Gives up what has not been done and joins the worker. Idempotent; nothing in a forked child."""
        if os.getpid() != self._process:
            return  # the child has no worker, and may have its lock as the worker held it
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self._give_up(OffloadError("the engine is closed"))

    def _check(self) -> None:
        if self._closed:
            raise OffloadError("the engine is closed")
        self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            self.told = True
            raise fresh(self._error)

    # The worker

    def _next(self) -> UnitUpdate | None:
        """The update to carry out now, if there is one; else begins a read ahead, or sleeps until something changes."""
        with self._changed:
            for update in self._pending.values():
                if update.runnable:
                    update.stage = Stage.RUNNING
                    return update
        if self._read_ahead():
            return None
        with self._changed:
            if self._closed or any(update.runnable for update in self._pending.values()):
                return None
            # A slot that becomes free says nothing; who waits for one looks again.
            self._changed.wait(_SLOT_POLL if self._has_room and self._unread else None)
        return None

    @property
    def _unread(self) -> bool:
        """Whether there is something to read before it is its turn."""
        if self._pending:
            return any(update.unread for update in self._pending.values())
        return self._ahead.unread

    @property
    def _has_room(self) -> bool:
        """Whether a read ahead may take a slot, see [Note: slots]."""
        staging = self._memory.staging
        assert staging is not None
        return self._started + len(self._ahead) < staging.count - 2

    def _read_ahead(self) -> bool:
        """Begins to read one chunk of an update that cannot run yet, or of one to come; False if it may not, or there
        is no slot.
        """
        with self._changed:
            update = next((update for update in self._pending.values() if update.unread), None)
            room = self._has_room
            if update is None:
                return room and not self._pending and self._ahead.read(self._queue)
        if any(state.writing for state in update.states):
            return False
        return self._start(update, room=room)

    def _start(self, update: UnitUpdate, *, room: bool = True, wait: bool = False) -> bool:
        """Begins the next chunk of `update` with what has been read of it or, if there is `room`, with a free slot;
        False if there is none. `wait`: until there is.
        """
        source: Slot | ChunkRead | None = self._ahead.take(*update.next_chunk.key)
        if source is None and room:
            source = self._queue.acquire() if wait else self._queue.try_acquire()
        if source is not None:
            update.start_next(source)
            self._started += 1
        return source is not None

    def _run(self, update: UnitUpdate) -> None:
        staging = self._memory.staging
        assert staging is not None
        ahead = max(_AHEAD, staging.count - 3)
        while update.started or update.unread:
            if self._closed:
                return
            if not update.started:
                self._start(update, wait=True)
            while update.unread and update.started <= ahead and self._start(update):
                pass
            if not update.unread:
                while self._read_ahead():
                    pass
            update.finish_next(self._memory, self._queue)
            self._started -= 1
        with self._changed:
            self._pending.pop(update.index, None)
            update.end(None)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
        self._on_failure()
        self._give_up(error)

    def _give_up(self, error: BaseException) -> None:
        with self._changed:
            pending, self._pending = list(self._pending.values()), {}
        for update in pending:
            update.abandon(self._queue)
            update.end(error)
        self._started = 0
        self._ahead.forget()
        with contextlib.suppress(Exception):
            self._queue.drain()


def _work(owner: weakref.ref[Updates]) -> None:
    while True:
        updates = owner()
        if updates is None:
            return
        update: UnitUpdate | None = None
        try:
            if updates._closed:
                return
            update = updates._next()
            if update is not None:
                updates._run(update)
        except BaseException as error:
            updates._fail(error)
        del updates, update


def uncovered(ranges: Sequence[tuple[int, int]], start: int, stop: int) -> Iterator[tuple[int, int]]:
    """What of `[start, stop)` the ascending `ranges` leave out."""
    for lo, hi in ranges:
        if start < lo:
            yield start, lo
        start = hi
    if start < stop:
        yield start, stop
