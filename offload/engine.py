"""The engine: what users call around their model."""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from offload.binding import Binding
from offload.build import Blueprint, build_units, draw_up, move_buffers, open_memory
from offload.checkpoint.access import CheckpointAccess
from offload.checkpoint.boundary import Boundary
from offload.checkpoint.weights import Weights, open_weights
from offload.config import Config, load_config
from offload.describe import placement_table
from offload.errors import GradientError, OffloadError
from offload.gradients import Held, norm_factor
from offload.growth import Growth
from offload.handover import HandingOver, Handover
from offload.initialization import InitFn
from offload.lifecycle import TRANSITIONS, Status
from offload.optimizer import EngineOptimizer, configured_scheduler, make_scheduler
from offload.parallel.exits import is_failure
from offload.parallel.together import Together, announced, open_ranks
from offload.parameters import ParameterRecord
from offload.planes import Loader, SlotQueue
from offload.residency import Residency, Unit
from offload.results import MemoryReport, StepResult
from offload.scaler import LossScaler
from offload.schedule.activations import open_activations
from offload.schedule.choice import choose_schedule
from offload.schedule.loss import set_loss_chunk
from offload.schedule.micro_batches import Runner
from offload.schedule.updates import UnitUpdate, Updates
from offload.state import FlatState, Update
from offload.step import uninterrupted
from offload.telemetry.trace import WAIT, Spans
from offload.tiers import Tier
from optimizer_cpu import AdamWHyper, kernels
from swap.faults import FaultPlan

log = logging.getLogger("offload")


_live: weakref.WeakSet[Engine] = weakref.WeakSet()


@atexit.register
def _close_forgotten() -> None:
    """Closes the engines that a program leaves open: torch must not take offloaded parameters apart by itself."""
    for engine in list(_live):
        with contextlib.suppress(Exception):
            engine.close()


class Engine(Together, CheckpointAccess, Growth, HandingOver):
    """A model whose parameters, gradients and optimizer states the engine keeps on device, host and nvme.

    Made by `offload.initialize`.
    """

    def __init__(self, blueprint: Blueprint, *, lr_scheduler: Any, faults: FaultPlan | None) -> None:
        self.config: Config = blueprint.config
        self.module: nn.Module = blueprint.model
        self.lr_scheduler: Any = None
        self._ready = False
        self._status = Status.READY
        self._blueprint = blueprint
        self._lock = threading.RLock()
        self._backward_depth = 0
        self._clip_factor = 1.0
        self._step_count = self._skipped_steps = 0
        self._last_unit: int | None = None
        try:  # what groups and scheduler refuse comes before anything large
            self._schedule = choose_schedule(blueprint)
            self.optimizer = self._make_optimizer(blueprint)
            self.lr_scheduler = make_scheduler(lr_scheduler, self.optimizer)
        except BaseException as error:
            blueprint.device.close()
            if blueprint.ranks is not None:
                blueprint.ranks.abandon(error)
            raise
        self._memory = open_memory(blueprint, faults)
        self._loader = Loader(self._memory)
        self._states: dict[tuple[int, int], FlatState] = {}
        try:
            self._buffer_bytes = move_buffers(self.module, self._memory.device.torch_device)
            units, self._states = build_units(blueprint, self._memory, self)
            self._gradient_queue, self._step_queue = SlotQueue(self._memory), SlotQueue(self._memory)
            self._updates = Updates(self._memory, _failing(self))
            self._residency = Residency(self._memory, units, self._loader, blueprint.plan.total(Tier.DEVICE))
            self._residency.updates = self._updates
            self._residency.persist = self._persist
            self._cluster = self._join(blueprint)
            self._records = self._in_order(units)
            self._trainable = {name: r for name, r in self._records.items() if r.slot.trainable}
            self._steps = dict.fromkeys(self._trainable, 0)
            self._binding = self._bind(blueprint, units)
            self._scaler = self._make_scaler()
            self._boundary = Boundary(self.module)
            self._handover = Handover(self._memory)
            self._prepare_growth()
        except BaseException as error:
            if blueprint.ranks is not None:
                blueprint.ranks.report_failure(error)
            self._release_everything()
            raise
        self._ready = True
        _live.add(self)

    def _in_order(self, units: Sequence[Unit]) -> dict[str, ParameterRecord]:
        """All records by name, in the order of `module.named_parameters()`."""
        records = {id(record.parameter): record for unit in units for record in unit.records}
        ordered = [records[id(p)] for p in self.module.parameters() if id(p) in records]
        return {record.name: record for record in ordered}

    def _bind(self, blueprint: Blueprint, units: Sequence[Unit]) -> Binding:
        binding = Binding(self._residency, self._gradient_arrived, self._prefetch_depth())
        for spec in blueprint.specs:
            own = [units[spec.index], *(units[i] for i in spec.borrows)]
            binding.attach(spec.root, own, repeatable=spec.kind != "container")
        for record in self._records.values():
            if record.parameter.requires_grad:
                binding.watch(record)
        binding.activations = open_activations(blueprint, self._residency)
        if self._cluster is not None:
            binding.on_backward_end = self._cluster.backward_ended
        set_loss_chunk(self.module, self.config.schedule.loss_chunk)
        self._runner = Runner(self.module, binding, self._residency, self.config.schedule.micro_batch_order)
        return binding

    def _make_scaler(self) -> LossScaler | None:
        if not any(r.slot.trainable and self._state(r).flat.dtype == torch.float16 for r in self._records.values()):
            return None
        precision = self.config.precision
        dynamic = precision.loss_scale == "dynamic"
        return LossScaler(
            scale=float(precision.initial_loss_scale if precision.loss_scale == "dynamic" else precision.loss_scale),
            dynamic=dynamic,
            window=precision.loss_scale_window,
            minimum=precision.min_loss_scale,
            hysteresis=precision.hysteresis,
        )

    def _make_optimizer(self, blueprint: Blueprint) -> EngineOptimizer:
        settings = self.config.optimizer
        defaults = {
            "lr": settings.lr,
            "betas": tuple(settings.betas),
            "eps": settings.eps,
            "weight_decay": settings.weight_decay,
        }
        groups = blueprint.groups
        if not any(group["params"] for group in groups):
            groups = [{"params": [torch.nn.Parameter(torch.zeros(0))]}]  # torch refuses an optimizer without parameters
        return EngineOptimizer(self, groups, defaults)

    # Forward and backward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, its outputs untouched."""
        self._check("it was called")
        self._check_parameters()
        self._boundary.crossed |= torch.is_grad_enabled()
        try:
            with self._runner.plain_call():
                return self.module(*args, **kwargs)
        finally:
            self._binding.rest()

    def train(self, mode: bool = True) -> Engine:
        """`module.train(mode)`."""
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """`module.eval()`."""
        return self.train(False)

    def backward(self, loss: Tensor, gradient: Tensor | None = None, **kwargs: Any) -> None:
        """`loss.backward(gradient, **kwargs)`, with the loss scale under fp16.

        Gradients add up until `step()`; nothing is divided.
        """
        self._check("backward was called")
        if self._scaler is not None and self._scaler.scale != 1.0:
            loss = loss * self._scaler.scale
        with self._lock:
            self._backward_depth += 1
        try:
            if self._binding.visitor is not None:
                self._binding.join(loss)
            loss.backward(gradient, **kwargs)  # type: ignore[no-untyped-call]
        except BaseException:
            if not self._binding.in_forward:
                self._binding.reset()
            raise
        finally:
            with self._lock:
                self._backward_depth -= 1

    def _gradient_arrived(self, record: ParameterRecord, gradient: Tensor) -> None:
        if self._status is not Status.READY:
            self._updates.report()  # the cause comes before its consequence
            raise GradientError(f"{record.name}: a gradient arrived while the engine is {self._status.value}")
        if record.name not in self._trainable:
            self._untrained_gradient(record)
            return
        if gradient.layout is not torch.strided:
            raise GradientError(f"{record.name}: a sparse gradient; build the embedding with sparse=False")
        if self._scaler is not None and self._backward_depth == 0:
            raise GradientError(
                f"{record.name}: under fp16 use engine.backward(loss), "
                "which applies the loss scale, not loss.backward()"
            )
        if self._clip_factor != 1.0:
            raise GradientError(
                f"{record.name}: a gradient arrived after clip_grad_norm_(); clip once, after the last backward"
            )
        self._boundary.crossed = True
        eager = self._eager
        if eager is not None:
            eager.check(record)
        if self._cluster is not None:
            self._cluster.reduction.before_arrival()
        with self._lock:
            if self._last_unit is not None and self._last_unit != record.unit:
                self._rest_gradients(self._last_unit)
            if eager is None and record.unit != self._last_unit and self._updates.wants_ahead:
                self._updates.read_ahead([self._states[key] for key in sorted(self._states)])
            self._last_unit = record.unit
            state = self._states[record.unit, record.flat]
            assert state.local is not None
            if state.pending is not None and state.local is state.gradients:
                state.wait_update()
            state.local.add(record.name, gradient, self._gradient_queue)
        if self._cluster is not None:
            self._cluster.reduction.arrived(record.unit, record.name)
        if eager is not None:
            eager.arrived(record, nested=self._binding.nested)

    def _rest_gradients(self, index: int) -> None:
        """Another unit's gradients arrive: those of unit `index` go to where they rest."""
        for flat in range(len(self._residency.units[index].flats)):
            gradients = self._states[index, flat].local
            if gradients is not None:
                gradients.settle_all()
                gradients.rest(self._gradient_queue)

    def zero_grad(self) -> None:
        """Forgets all gradients."""
        self._check("zero_grad was called")
        self._binding.end_step()
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        with self._lock:
            self._gradient_queue.drain()
            self.gradient_round += 1
            self._clip_factor = 1.0
            if self._cluster is not None:
                self._cluster.reduction.forget()
            for state in self._states.values():
                state.drop_gradients()

    # The step

    def _held(self) -> list[ParameterRecord]:
        """Parameters with a gradient, in registration order; as in torch, also those frozen after their backward. On
        several ranks, those of which any rank has had one, once gradients are reduced.
        """
        if self._cluster is not None:
            present = self._cluster.reduction.present()
            return [record for name, record in self._trainable.items() if name in present]
        return [r for name, r in self._trainable.items() if self._gradients(r).held(name) is not Held.NOTHING]

    def _norm(self, held: Sequence[ParameterRecord]) -> tuple[float, str | None]:
        """The norm of the accumulated gradients as they rest, and the first parameter whose gradient is not finite."""
        partials = self._square_sums(held)
        if self._cluster is not None:
            partials = self._cluster.assemble_partials(held, partials)
        norm = kernels.total_norm(partials)
        if math.isfinite(norm):
            return norm, None
        finite = (bool(torch.isfinite(sums).all()) for sums in partials)
        return norm, next((record.name for record, good in zip(held, finite, strict=True) if not good), None)

    @property
    def _scale(self) -> float:
        return 1.0 if self._scaler is None else self._scaler.scale

    def _global_norm(self, held: Sequence[ParameterRecord]) -> tuple[float, str | None]:
        """The norm of the gradients as a reader sees them: unscaled, and with what `clip_grad_norm_` did."""
        raw, bad = self._norm(held)
        return (raw / self._scale * self._clip_factor if math.isfinite(raw) else raw), bad

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Tensor:
        """Scales all gradients so that their global 2-norm is at most `max_norm`; returns the norm before, as torch's
        function.

        The factor is applied inside the optimizer's kernel; gradients read afterwards show it. `foreach` has no effect.

        Raises:
            ValueError: a `norm_type` other than 2, or a negative `max_norm`.
            RuntimeError: the norm is not finite and `error_if_nonfinite` is set; gradients are unchanged then.
        """
        self._check("clip_grad_norm_ was called")
        if float(norm_type) != 2.0:
            raise ValueError(f"clip_grad_norm_: norm_type = {norm_type}; only the 2-norm is supported")
        if not float(max_norm) >= 0:
            raise ValueError(f"clip_grad_norm_: max_norm = {max_norm} must be at least 0")
        self._binding.unwind()
        self._reduce(on_all_ranks=True)
        with self._lock:
            norm, bad = self._global_norm(self._held())
            if bad is not None and error_if_nonfinite:
                raise RuntimeError(f"clip_grad_norm_: the gradient of {bad} is not finite (global norm {norm})")
            self._clip_factor *= norm_factor(norm, float(max_norm))
        return torch.tensor(norm)

    def step(self) -> StepResult:
        """One AdamW step with the gradients summed since the last one; the only optimizer boundary there is.

        A step with a non-finite gradient (with `optimizer.check_finite`, or under fp16) changes nothing and names the
        parameter. A Ctrl-C takes effect at the end of the step; a second one cuts it short.

        Raises:
            OffloadError: the engine is closed, or an earlier step was cut short.
            SwapIOError: a transfer failed; the engine is then failed, since part of the state is new and part old.
        """
        self._check("step was called")
        self._check_parameters()
        self._binding.end_step()
        if busy := self._residency.busy_units():
            raise OffloadError(
                f"step() while {', '.join(busy[:3])} {'is' if len(busy) == 1 else 'are'} in use: "
                "leave gathered(), and end every forward and backward, before it"
            )
        self._residency.see_writes(self._residency.units)
        with uninterrupted():
            with self._lock:
                result = self._step()
            if result.stepped:
                self._verify_now_and_then()
            self._memory.spans.end_step(self._step_count + self._skipped_steps)
            if result.stepped:
                self.optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers warn otherwise
                if self.lr_scheduler is not None:
                    self.lr_scheduler.step()
            self._boundary.mark()
        return result

    def _step(self) -> StepResult:
        settings = self.config.optimizer
        self._gradient_queue.drain()
        self._reduce(on_all_ranks=True)
        held = self._held()
        scale, norm = self._scale, None
        check = settings.check_finite or self._scaler is not None
        if check or settings.max_grad_norm is not None:
            norm, bad = self._global_norm(held)
            if check and bad is not None:
                return self._skip(bad, norm, scale)
        factor = (
            self._clip_factor * norm_factor(norm, settings.max_grad_norm) if norm is not None else self._clip_factor
        )
        self._run(held, factor / scale)
        self._step_count += 1
        if self._scaler is not None:
            self._scaler.update(overflow=False)
        self._drop_gradients()
        return StepResult(stepped=True, grad_norm=norm, loss_scale=scale)

    def _skip(self, bad: str, norm: float, scale: float) -> StepResult:
        self._skipped_steps += 1
        reason = f"the gradient of {bad} is not finite (global norm {norm})"
        log.warning("step skipped: %s; %d skipped so far", reason, self._skipped_steps)
        if self._scaler is not None:
            self._scaler.update(overflow=True)
        self._drop_gradients()
        return StepResult(stepped=False, skipped_reason=reason, grad_norm=norm, loss_scale=scale)

    def _run(self, held: Sequence[ParameterRecord], grad_scale: float) -> None:
        """Updates every parameter in `held`, now or when its unit is used next; graphs made before it are stale."""
        updates = self._unit_updates(held, grad_scale)
        self._note_step(grad_scale)
        self._change(Status.STEPPING)
        try:
            self._updates.submit(updates)
            if self._cluster is not None:
                self._cluster.updated({record.unit for record in held})
            for record in held:
                self._steps[record.name] += 1
            self._binding.weights_changed(held)
        except BaseException:
            if self._status is Status.STEPPING:
                self._change(Status.FAILED)
            raise
        self._change(Status.READY)
        if self._schedule.waits:
            self._memory.spans.begin(WAIT, "wait for the optimizer", self)
            try:
                self._drain()
            except BaseException:
                # A second Ctrl-C: what belongs to the step, such as its number, is not done.
                if self._status is Status.READY:
                    self._change(Status.FAILED)
                raise
            finally:
                self._memory.spans.end(self)

    def _unit_updates(self, held: Sequence[ParameterRecord], grad_scale: float) -> list[UnitUpdate]:
        """The updates of the units that own the parameters in `held`, in forward order, with their gradients."""
        hypers = self._hypers(held)
        by_unit: dict[int, dict[int, list[Update]]] = {}
        for record in held:
            update = Update(slot=record.slot, hyper=hypers[record.name])
            by_unit.setdefault(record.unit, {}).setdefault(record.flat, []).append(update)
        updates = []
        for index, by_flat in sorted(by_unit.items()):
            jobs, taken, states = {}, [], []
            for flat, parts in sorted(by_flat.items()):
                state = self._states[index, flat]
                assert state.gradients is not None
                gradients = state.gradients.take()
                taken.append(gradients)
                states.append(state)
                jobs[flat] = list(state.jobs(parts, gradients))
            unit = self._residency.units[index]
            # What computes where it rests is updated at once: there is no buffer that its weights could go to.
            paced = not self._schedule.waits and any(not unit.flats[flat].fixed for flat in jobs)
            updates.append(UnitUpdate(index, unit.name, jobs, states, taken, grad_scale, paced=paced))
        return updates

    def synchronize(self) -> None:
        """Carries out every update that `step()` has decided on and waits until it is at rest.

        Never needed for right values: whatever reads a parameter or a state waits for its update by itself.

        Raises:
            SwapIOError: a transfer failed; the engine is then failed.
        """
        self._check("synchronize was called")
        self._drain()

    def _drain(self) -> None:
        self._updates.drain()
        for state in self._states.values():
            state.wait_replicated()

    def _hypers(self, held: Sequence[ParameterRecord]) -> dict[str, AdamWHyper]:
        group_of = {id(p): group for group in self.optimizer.param_groups for p in group["params"]}
        hypers: dict[str, AdamWHyper] = {}
        made: dict[tuple[int, int], AdamWHyper] = {}
        for record in held:
            group, step = group_of[id(record.parameter)], self._steps[record.name] + 1
            key = (id(group), step)
            if key not in made:
                beta1, beta2 = group["betas"]
                made[key] = AdamWHyper(
                    lr=float(group["lr"]),
                    beta1=float(beta1),
                    beta2=float(beta2),
                    eps=float(group["eps"]),
                    weight_decay=float(group["weight_decay"]),
                    step=step,
                )
            hypers[record.name] = made[key]
        return hypers

    # Reports

    def counters(self) -> dict[str, int]:
        """Bytes moved so far, steps, skipped steps and unit loads."""
        store = self._memory.store
        return {
            "nvme_read_bytes": store.stats.read_bytes if store else 0,
            "nvme_write_bytes": store.stats.write_bytes if store else 0,
            "h2d_bytes": self._memory.h2d_bytes,
            "d2h_bytes": self._memory.d2h_bytes,
            "steps": self._step_count,
            "skipped_steps": self._skipped_steps,
            "unit_loads": sum(unit.loads for unit in self._residency.units),
            **self._communicated(),
        }

    def wear(self, total_steps: int | None = None) -> dict[str, dict[str, int | float | None]]:
        """For each swap path the bytes written so far and per step and, with `swap.endurance_tbw`, the percent of the
        drive's life that they are and the steps left in it. Warns once if `total_steps` steps would use much of it.
        """
        store = self._memory.store
        if store is None:
            return {}
        written = store.stats.path_write_bytes
        if self._step_count == 0:
            store.wear.begin_steps(written)
        store.wear.check(written, steps=self._step_count, total_steps=total_steps)
        return {entry.path: entry.to_dict() for entry in store.wear.report(written, self._step_count)}

    def memory(self) -> MemoryReport:
        """Planned and measured bytes by tier and kind."""
        self._residency.settle()
        self._binding.settle()
        budget, tiers = self._memory.budget, [str(t) for t in Tier]
        resident = psutil.Process(os.getpid()).memory_info().rss
        in_memory = budget.used("host") + (budget.used("device") if self._memory.device.kind != "cuda" else 0)
        return MemoryReport(
            planned=self._blueprint.plan.planned,
            current={t: budget.used_by_kind(t) for t in tiers},
            peak={t: budget.peak_by_kind(t) for t in tiers},
            limits={t: budget.limit(t) for t in tiers},
            resident=resident,
            workspace=max(0, resident - in_memory),
        )

    @property
    def spans(self) -> Spans:
        """What each resource did when; recorded with `log.trace`. In `torch.profiler`, spans show in any case."""
        return self._memory.spans

    def write_trace(self, path: str | Path) -> None:
        """Writes the spans recorded so far for Perfetto; `close` does it too, as `trace.json` in `run_dir`."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._memory.spans.write(path, **self.counters())

    def describe(self) -> str:
        """The placement table and the plan, for people."""
        return placement_table(self._blueprint, self._memory, self._schedule, self._runner.order())

    def resident_units(self) -> list[str]:
        """Units that take device memory beyond what their placement says; none between steps."""
        return self._residency.resident_units()

    # Life cycle

    @property
    def _away(self) -> bool:
        return self._status is Status.AWAY

    def _set_away(self, away: bool) -> None:
        self._change(Status.AWAY if away else Status.READY)

    def _change(self, status: Status) -> None:
        if (self._status, status) not in TRANSITIONS:
            if self._status is Status.FAILED:
                self._updates.report()  # the cause comes before its consequence
            raise OffloadError(f"the engine cannot go from {self._status.value} to {status.value}")
        self._status = status

    def _check(self, action: str) -> None:
        if self._status is Status.READY:
            return
        hint = ""
        if self._status is Status.FAILED:
            self._updates.report()  # the cause comes before its consequence
            hint = ": an optimizer step or a load was cut short, so the state is partly old and partly new"
        raise OffloadError(f"the engine is {self._status.value}{hint}; {action}")

    def _begin_change(self) -> None:
        self._change(Status.STEPPING)
        self._updates.forget_ahead()

    def _end_change(self, *, failed: bool) -> None:
        self._change(Status.FAILED if failed else Status.READY)

    def close(self) -> None:
        """Waits for a save that is under way, ends I/O, releases memory, files and threads.

        Parameters are gone afterwards: export or gather what you need first. Idempotent.
        """
        error = sys.exc_info()[1]  # as in a `finally`: other ranks wait for this one, and closing takes a while
        if self.ranks is not None and is_failure(error):
            self.ranks.report_failure(error)
        self._close()

    def _close(self) -> None:
        if self._status is Status.CLOSED:
            return
        try:
            self._end_save(report=False)
            if self._cluster is not None and self._status is Status.READY:
                with contextlib.suppress(Exception):
                    self._cluster.finish_exchanges()
        finally:
            self._change(Status.CLOSED)
            self._release_everything()
        if self.config.log.trace and self.config.run_dir is not None:
            try:
                self.write_trace(Path(self.config.run_dir) / "trace.json")
            except OSError as error:
                log.warning("the trace cannot be written: %s", error)

    def _release_everything(self) -> None:
        updates = getattr(self, "_updates", None)
        if updates is not None:
            updates.close()
        cluster = getattr(self, "_cluster", None)
        if cluster is not None:
            cluster.close()
        binding = getattr(self, "_binding", None)
        if binding is not None:
            binding.detach()
        residency = getattr(self, "_residency", None)
        if residency is not None:
            residency.close()
        try:
            self._memory.close()
        finally:
            self._loader.close()
            for state in self._states.values():
                state.close()
            if self._blueprint.ranks is not None:
                self._blueprint.ranks.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_ready", False) and self._status is not Status.CLOSED:
            with contextlib.suppress(Exception):
                self._close()

    def __deepcopy__(self, memo: object) -> Engine:
        raise TypeError("an engine cannot be copied: copy the module, whose copy is an ordinary model")

    def __reduce__(self) -> Any:
        raise TypeError("an engine cannot be pickled: pickle the module, whose copy is an ordinary model")


def _failing(engine: Engine) -> Callable[[], None]:
    """Marks the engine as failed; does not keep it alive."""
    reference = weakref.ref(engine)

    def fail() -> None:
        owner = reference()
        if owner is not None and owner._status in (Status.READY, Status.STEPPING):
            owner._change(Status.FAILED)

    return fail


def initialize(
    model: nn.Module,
    config: Config | Mapping[str, Any] | str | Path | None = None,
    *,
    param_groups: Iterable[Any] | None = None,
    lr_scheduler: Any = None,
    init_fn: InitFn | None = None,
    weights: Weights | str | os.PathLike[str] | None = None,
    faults: FaultPlan | None = None,
) -> Engine:
    """Takes a model over and returns its engine.

    Args:
        model: any `nn.Module`, built normally (its memory is given up as it is taken over) or under
            `offload.empty_init()`.
        config: an `offload.Config`, a dict, or a path to a .toml or .json file.
        param_groups: as for `torch.optim.AdamW`; by default everything that requires a gradient, without weight decay
            for what `optimizer.no_decay` names.
        lr_scheduler: a callable that makes a torch scheduler from the optimizer, or a scheduler; stepped by
            `engine.step()`, not on skipped steps. By default what `optimizer.scheduler` asks for.
        init_fn: `init_fn(module)` gives initial values to the parameters that `module` owns directly; for models on the
            meta device.
        weights: safetensors files, as `transformers` saves them, to take the parameters' values from instead: a file or
            a directory, read range by range; `offload.Weights` has options. Tensors are converted to each parameter's
            dtype.
        faults: faults to inject beneath the I/O engine, for tests and drills.

    Raises:
        ConfigError, PlanError, UnsupportedModelError, SwapPathError, BudgetError: all `ValueError`s, before anything
        large is allocated.
    """
    with announced():
        resolved = load_config(dict(config) if isinstance(config, Mapping) else config)
        groups = None if param_groups is None else list(param_groups)
        lr_scheduler = configured_scheduler(resolved) if lr_scheduler is None else lr_scheduler
        source = open_weights(resolved.model.weights if weights is None else weights, model)
    try:
        blueprint = draw_up(model, resolved, groups, init_fn, source, open_ranks(resolved))
        return Engine(blueprint, lr_scheduler=lr_scheduler, faults=faults)
    finally:
        if source is not None:
            source.close()
