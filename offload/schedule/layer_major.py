"""All micro-batches of a step go through the model unit by unit, with the bits of one after another.

One thread per micro-batch runs the model's own forward and backward. A baton lets one of them run at a time; it passes
on whenever a micro-batch comes to another unit: at its entry in forward (or when checkpointing recomputes it), at the
first gradient that reaches its outputs, or where its weights are needed out of turn. So each unit serves all
micro-batches before any of them goes on, and is loaded once for all.

[Note: kept units] A unit that a micro-batch has reached is leased for all. The lease ends when each of them has gone on
to another unit, and gives way when the device has no room.

[Note: order of sums] Gradients add up in the order of the micro-batches, whatever the baton does. A micro-batch whose
gradient is about to be added waits until the earlier ones have added theirs, or have ended. How many contributions are
to come follows from the forward: one from the whole graph, if the parameter's units were entered with gradients on,
and one from each entry without, which is what reentrant checkpointing looks like. An entry that was none, such as an
evaluation on the side, makes later micro-batches wait for the end of the earlier ones: right, and slower. One that
contributes once more than expected, too late, is an error.
"""

from __future__ import annotations

import contextvars
import threading
from collections import Counter
from collections.abc import Callable, Sequence

from offload.binding_threads import ThreadState
from offload.errors import OffloadError
from offload.randomness import RandomState
from offload.residency import Residency, Unit
from offload.schedule.baton import Baton, Stopped


class _Progress:
    """Where one micro-batch is, how its units were entered, and what it has contributed so far."""

    def __init__(self) -> None:
        self.at: Unit | None = None
        self.graded: Counter[int] = Counter()
        self.ungraded: Counter[int] = Counter()
        self.added: Counter[str] = Counter()
        self.added_by_graph: set[str] = set()

    def complete(self, unit: int, name: str) -> bool:
        """Whether no further contribution to the parameter is to be expected."""
        graded = self.graded[unit] > 0
        expected = max(1, graded + self.ungraded[unit])
        return self.added[name] >= expected and (not graded or name in self.added_by_graph)


class LayerMajor:
    """The micro-batches of one step. A thread calls `before_pass` and `after_pass` around the time that others run."""

    def __init__(
        self, residency: Residency, count: int, *, before_pass: Callable[[], None], after_pass: Callable[[], None]
    ) -> None:
        self._residency, self._before_pass, self._after_pass = residency, before_pass, after_pass
        self._progress = [_Progress() for _ in range(count)]
        self._baton = Baton(count)
        self._index: dict[int, int] = {}  # of the micro-batch that a thread runs
        self._needed_by: dict[int, tuple[Unit, set[int]]] = {}
        self._final: RandomState | None = None

    def run(self, work: Callable[[int], None], device_type: str) -> None:
        """Calls `work(k)` for every micro-batch k in a thread of its own, and returns when all threads have ended.

        Raises:
            BaseException: the first error of a micro-batch, or what interrupted the wait; all others were stopped.
        """
        state, context = ThreadState(device_type), contextvars.copy_context()
        threads = [
            threading.Thread(
                target=self._run, args=(state, context.copy(), work, k), name=f"offload-micro-batch-{k}", daemon=True
            )
            for k in range(len(self._progress))
        ]
        with self._baton.stopping(threads):
            started = 0
            try:
                for thread in threads:
                    thread.start()
                    started += 1
            except BaseException as refused:
                self._baton.stop(refused)
                for k in range(started, len(threads)):
                    self._baton.leave_out(k)
            self._baton.begin()
            error = self._baton.wait_for_end(threads[:started])
        self._release(list(self._needed_by))
        if error is not None:
            try:
                raise error
            finally:
                del error  # its frames hold it
        if self._final is not None:
            self._final.restore()

    def _run(self, state: ThreadState, context: contextvars.Context, work: Callable[[int], None], k: int) -> None:
        error: BaseException | None = None
        try:
            self._baton.take(k)
            self._index[threading.get_ident()] = k
            state.run(context, work, k)
            if k == len(self._progress) - 1:
                self._final = RandomState.take()
        except Stopped:
            pass
        except BaseException as caught:
            error = caught
        finally:
            self._index.pop(threading.get_ident(), None)
            try:
                self._leave_for(k, ())
            finally:
                self._baton.finish(k, error)
                del error

    # Passing the baton

    def entering(self, units: Sequence[Unit], *, graded: bool) -> None:
        k = self._index.get(threading.get_ident())
        if k is None:
            return
        progress = self._progress[k]
        (progress.graded if graded else progress.ungraded).update(unit.index for unit in units)
        self._go_to(k, units)

    def reaching(self, units: Sequence[Unit]) -> None:
        k = self._index.get(threading.get_ident())
        if k is not None:
            self._go_to(k, units)

    def _go_to(self, k: int, units: Sequence[Unit]) -> None:
        # The last unit's backward follows its forward without a break: so the logits of one micro-batch live at a time.
        progress = self._progress[k]
        if progress.at is units[0]:
            return
        self._leave_for(k, units)
        self._pass_on(k)
        progress.at = units[0]

    def _pass_on(self, k: int, over: Callable[[], bool] | None = None) -> None:
        if self._baton.alone(k):
            return
        state = RandomState.take()
        self._before_pass()
        self._baton.pass_on(k, over)
        self._after_pass()
        state.restore()

    def paused(self, thread: int) -> bool:
        return thread in self._index and thread != threading.get_ident()

    # [Note: kept units]

    def leased(self, units: Sequence[Unit]) -> None:
        k = self._index.get(threading.get_ident())
        if k is None:
            return
        for unit in units:
            if unit.index not in self._needed_by and unit.load_bytes:
                # Some may have been there: they do no harm, since they are about to go on to another unit.
                running = {j for j in range(len(self._progress)) if self._baton.running(j)}
                self._needed_by[unit.index] = (unit, running)
                self._residency.acquire(unit, self)

    def _leave_for(self, k: int, units: Sequence[Unit]) -> None:
        """Micro-batch `k` needs `units` next, and none of the others for the time being."""
        wanted = {unit.index for unit in units}
        for index, (_, needing) in self._needed_by.items():
            if index in wanted:
                needing.add(k)
            else:
                needing.discard(k)
        self._release_unneeded()

    def _release_unneeded(self) -> None:
        self._release([index for index, (_, needing) in self._needed_by.items() if not needing])

    def _release(self, indices: Sequence[int]) -> None:
        for index in indices:
            unit, _ = self._needed_by.pop(index)
            self._residency.release(unit, self)

    def kept(self) -> list[Unit]:
        return [unit for unit, _ in self._needed_by.values()]

    def drop(self, unit: Unit) -> None:
        if unit.index in self._needed_by:
            self._release([unit.index])

    # [Note: order of sums]

    def gradient_due(self, unit: int, name: str) -> None:
        k = self._index.get(threading.get_ident())
        if k is None:
            return
        if self._earlier_to_come(k, unit, name):
            self._pass_on(k, lambda: self._earlier_to_come(k, unit, name))
        if any(progress.added[name] for progress in self._progress[k + 1 :]):
            raise OffloadError(
                f"{name}: micro-batch {k} adds to it again after later micro-batches have added theirs, as "
                "a backward of its own within forward or loss_fn gives; set schedule.micro_batch_order = 'batch_major'"
            )

    def gradient_added(self, unit: int, name: str, *, nested: bool) -> None:
        k = self._index.get(threading.get_ident())
        if k is not None:
            self._progress[k].added[name] += 1
            if not nested:
                self._progress[k].added_by_graph.add(name)

    def _earlier_to_come(self, k: int, unit: int, name: str) -> bool:
        return any(self._baton.running(j) and not self._progress[j].complete(unit, name) for j in range(k))
