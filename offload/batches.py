"""All micro-batches of an optimizer step in one call: the part of an engine that chooses their order."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor

from offload.config import Config
from offload.errors import GradientError
from offload.inspection import StateAccess
from offload.lifecycle import Status
from offload.parameters import ParameterRecord
from offload.randomness import seed_everything
from offload.residency import Unit
from offload.results import StepResult
from offload.schedule.choice import Schedule
from offload.schedule.eager import EagerStep
from offload.schedule.micro_batches import LossFn, MicroBatches, Runner
from offload.schedule.updates import Updates

_UPDATES_AT_ONCE = 2


class BatchTraining(StateAccess):
    """Forward and backward of a list of micro-batches, and the step."""

    config: Config
    _status: Status
    _schedule: Schedule
    _updates: Updates
    _runner: Runner
    _eager: EagerStep | None = None
    _step_count: int
    _skipped_steps: int
    _updated_early = False

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    @abstractmethod
    def backward(self, loss: Tensor, gradient: Tensor | None = None, **kwargs: Any) -> None: ...

    @abstractmethod
    def zero_grad(self) -> None: ...

    @abstractmethod
    def step(self) -> StepResult: ...

    @abstractmethod
    def _run(self, held: Sequence[ParameterRecord], grad_scale: float) -> None: ...

    @abstractmethod
    def _change(self, status: Status) -> None: ...

    def train_batch(self, micro_batches: Iterable[Any], loss_fn: LossFn | None = None) -> StepResult:
        """Forward and backward of all micro-batches of one optimizer step, then the step.

        A micro-batch is a dict (keyword arguments), a tuple (arguments) or a tensor. `loss_fn(outputs, micro_batch)`
        gives a loss to average over the micro-batches (default: `outputs.loss`), or a pair (sum of losses, number of
        target tokens), which are averaged over all tokens of the step. Before each micro-batch the global generators
        are seeded from (seed, step, micro-batch). After an exception the gradients of the whole step are forgotten;
        if units have been updated by then (`eager`), the engine is failed, since the step can be neither finished nor
        taken back.

        Raises:
            ValueError: no micro-batch, one in place of several, no loss to be found, or token counts for some
                micro-batches only.
            GradientError: gradients of an earlier backward are held; step or zero_grad first.
        """
        self._check("train_batch was called")
        if isinstance(micro_batches, Mapping):
            raise ValueError("train_batch takes a list of micro-batches, not one: train_batch([batch])")
        batches = list(micro_batches)
        if not batches:
            raise ValueError("train_batch needs at least one micro-batch")
        if self._holds_gradients():
            raise GradientError(
                "train_batch was called with gradients of an earlier backward: step() or zero_grad() first"
            )
        try:
            total = self._accumulate(batches, loss_fn)
        except BaseException:
            if self._status is Status.READY:
                self.zero_grad()
                if self._updated_early:
                    self._change(Status.FAILED)
            raise
        result = self.step()
        self._updated_early = False
        return StepResult(
            stepped=result.stepped,
            skipped_reason=result.skipped_reason,
            grad_norm=result.grad_norm,
            loss_scale=result.loss_scale,
            loss=total,
        )

    def _accumulate(self, batches: Sequence[Any], loss_fn: LossFn | None) -> float:
        """Forward and backward of all micro-batches; returns the mean loss."""
        step = self._step_count + self._skipped_steps
        work = MicroBatches(
            batches,
            loss_fn,
            forward=self,
            backward=self.backward,
            seed=lambda k: seed_everything(self.config.seed, step, k),
            begins=lambda k: self._micro_batch_begins(k, len(batches)),
        )
        self._check_alike(len(batches))
        with self._updating_early(work), self._as_one(layer_major=self._runner.order(len(work)) == "layer_major"):
            loss, _ = self._runner.run(work)
        # The number of tokens is only known at the end, so it divides the sum of the gradients, in the kernel.
        loss, divisor = self._over_ranks(work, loss)
        self._clip_factor /= divisor
        return loss

    def _holds_gradients(self) -> bool:
        """Whether anything is left of an earlier backward."""
        return bool(self._held())

    def _known_divisor(self, work: MicroBatches) -> float | None:
        """What the gradients are to be divided by, or None as long as it is not known."""
        return work.tokens()

    def _check_alike(self, count: int) -> None:
        """Refuses a number of micro-batches that is not the same on all ranks."""

    def _micro_batch_begins(self, k: int, count: int) -> None:
        """Micro-batch `k` of `count` is about to run."""

    def _as_one(self, *, layer_major: bool) -> AbstractContextManager[None]:
        """Around the micro-batches of a step."""
        return nullcontext()

    def _over_ranks(self, work: MicroBatches, loss: float) -> tuple[float, float]:
        """(mean loss, what the gradients are to be divided by) over all ranks."""
        return loss, work.tokens() or 1

    @contextmanager
    def _updating_early(self, work: MicroBatches) -> Iterator[None]:
        """Under `eager`, updates units within the context as soon as their gradients are final."""
        self._updated_early = False
        if self._schedule.name != "eager":
            yield
            return

        known: list[float] = []

        def final() -> bool:
            if not known and (divisor := self._known_divisor(work)) is not None:
                known.append(divisor)
            return bool(known)

        def update(unit: Unit) -> bool:
            if not final():
                return False
            divisor = known[0]
            # Residency's lock first: a unit that comes to rest calls this with it.
            with self._residency.lock, self._lock:
                self._gradient_queue.drain()
                held = [record for record in self._held() if record.unit == unit.index]
                self._updated_early = True
                self._run(held, 1.0 / divisor)
            # The gradients of a pending update are in memory.
            self._updates.wait_for(_UPDATES_AT_ONCE)
            return True

        if self._cluster is not None:
            with self._cluster.updating_early(self._residency.units, final, update):
                yield
            return
        expected = [record for record in self._trainable.values() if record.parameter.requires_grad]
        units = {unit.index: unit for unit in self._residency.units}
        eager = self._eager = EagerStep(units, expected, len(work), update)
        self._residency.on_rest = eager.try_update
        try:
            yield
        finally:
            self._eager = self._residency.on_rest = None
