"""Reading and editing what an engine holds: parameters in place, and whole values by name."""

from __future__ import annotations

import contextlib
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from offload.binding import Binding
from offload.errors import GradientError, OffloadError
from offload.gradients import Held
from offload.parameters import ParameterRecord, record_of
from offload.planes import SlotQueue
from offload.residency import Residency, Unit
from offload.state import FlatState
from offload.tiers import TierMemory

if TYPE_CHECKING:
    from offload.parallel.cluster import Cluster

log = logging.getLogger("offload")

KINDS = ("weight", "parameter", "exp_avg", "exp_avg_sq", "grad")


class StateAccess(ABC):
    """The part of an engine that shows and changes its state; it is also the `ParameterHost` of its parameters."""

    _memory: TierMemory
    _states: dict[tuple[int, int], FlatState]
    _residency: Residency
    _binding: Binding
    _records: dict[str, ParameterRecord]
    _trainable: dict[str, ParameterRecord]
    _steps: dict[str, int]
    _lock: threading.RLock
    _gradient_queue: SlotQueue
    _step_queue: SlotQueue
    _clip_factor: float
    _cluster: Cluster | None = None
    _said_hidden = False
    gradient_round = 0
    """Grows whenever all gradients are let go."""

    @property
    @abstractmethod
    def _scale(self) -> float:
        """The loss scale in force."""

    @abstractmethod
    def _held(self) -> list[ParameterRecord]:
        """Parameters that hold a gradient."""

    @abstractmethod
    def unfrozen(self, record: ParameterRecord) -> None:
        """Follows `requires_grad` of a parameter becoming True."""

    @abstractmethod
    def _check(self, action: str) -> None:
        """Raises unless the engine is ready."""

    @abstractmethod
    def _before_edit(self) -> None:
        """Called before weights are edited in place, outside a step."""

    def _state(self, record: ParameterRecord) -> FlatState:
        return self._states[record.unit, record.flat]

    def _gradients(self, record: ParameterRecord) -> Any:
        return self._state(record).gradients

    def _square_sums(self, records: Sequence[ParameterRecord]) -> list[Tensor]:
        """`FlatGradients.square_sums` of each."""
        for state in self._states.values():
            if state.gradients is not None:
                state.gradients.sum_squares()
        return [self._gradients(record).square_sums(record.slot) for record in records]

    def access(
        self, records: Iterable[ParameterRecord], *, modified: Iterable[ParameterRecord] = ()
    ) -> contextlib.AbstractContextManager[None]:
        """Leases on the units of `records`, with views packed if autograd saves them.

        Used by offloaded parameters themselves.
        """
        modified = list(modified)
        if modified:
            self._before_edit()
        return self._access({r.unit for r in (*records, *modified)})

    @contextmanager
    def _access(self, indices: set[int]) -> Iterator[None]:
        units = [self._residency.units[i] for i in sorted(indices)]
        with self._binding.using(units):
            yield

    @contextmanager
    def gathered(self, params: Any = None, modify: bool = False) -> Iterator[None]:
        """Full parameters readable in place, on the device: all, or `params` (a parameter, or several, or names).

        With `modify`, what is written to them (also through `.data`) becomes their value; elements that did not change
        keep the low bits of their fp32 master. Without it ordinary operations in place are kept too, but what is
        written through `.data` may be lost. All of them must fit memory.device at once. Gradients do not show within.
        """
        self._check("gathered was called")
        self._say_gradients_are_hidden()
        if modify:
            self._before_edit()
        records = self._select(params)
        units = [self._residency.units[i] for i in sorted({r.unit for r in records})]
        with self._binding.using(units):
            try:
                yield
            finally:
                if modify:
                    self._binding.weights_changed(records, in_place=True)
                    for unit in units:
                        self._residency.keep_writes(unit)

    def _say_gradients_are_hidden(self) -> None:
        if self._said_hidden or self._cluster is not None or not self._held():
            return
        self._said_hidden = True
        log.warning(
            "engine.gathered() between a backward and its step: parameters are plain within it, so their .grad is None "
            "there; clip and edit gradients outside"
        )

    def _select(self, params: Any) -> list[ParameterRecord]:
        if params is None:
            return list(self._records.values())
        items = [params] if isinstance(params, (str, Tensor)) else list(params)
        return [self._record(item) for item in items]

    def _record(self, item: Any) -> ParameterRecord:
        record = self._records.get(item) if isinstance(item, str) else record_of(item)
        if record is None or record.host is not self:
            what = f"a tensor of shape {tuple(item.shape)}" if isinstance(item, Tensor) else repr(item)
            raise ValueError(f"{what} is not a parameter of this engine")
        return record

    def _persist(self, unit: Unit, records: list[ParameterRecord]) -> None:
        """Carries values written to resident parameters over to their planes."""
        for record in records:
            data = record.parameter.data.detach().reshape(-1)
            value = data
            if not self._memory.device.aliases_host:
                value = torch.empty_like(data, device="cpu")
                self._memory.copy_out(value, data).wait()
            self._note_written(f"the weight of {record.name}", value)
            self._state(record).write(record.slot, self._step_queue, weight=value)

    def _note_written(self, what: str, value: Tensor | None) -> None:
        """Where there are other ranks, they have to write the same."""
        if self._cluster is not None:
            self._cluster.reduction.note_written(what, value)

    def read_weight(self, record: ParameterRecord) -> Tensor:
        """A CPU copy of a parameter's weight in its own dtype."""
        self._check(f"{record.name} was read")
        self._residency.see_writes([self._residency.units[record.unit]])
        out = torch.empty(record.slot.numel, dtype=self._state(record).flat.dtype)
        if record.slot.numel:
            with self._lock:
                self._state(record).read_weight(record.slot, self._step_queue, out)
                self._whole_weight(record, out)
        return out.view(record.slot.shape)

    def holds_gradient(self, record: ParameterRecord) -> bool:
        """Whether there is an accumulated gradient; on several ranks, of any of them."""
        self._check(f"the gradient of {record.name} was read")
        if record.name not in self._trainable:
            return False
        if self._cluster is not None:
            self._reduce()
            return record.name in self._cluster.reduction.present()
        return bool(self._gradients(record).held(record.name) is not Held.NOTHING)

    def held_gradient(self, record: ParameterRecord, *, to_edit: bool = False) -> Tensor | None:
        """A copy of the accumulated gradient on the compute device, or None: in the parameter's dtype, or `to_edit` in
        one that holds all of its bits.
        """
        value = self.get_full(record.name, "grad")
        if value is None:
            return None
        dtype = self._state(record).flat.dtype
        if to_edit:
            once = self._gradients(record).held(record.name) is Held.RAW and self._cluster is None
            dtype = dtype if once and self._scale == 1.0 and self._clip_factor == 1.0 else value.dtype
        return value.to(self._memory.device.torch_device, dtype)

    def _refuse_on_ranks(self, action: str) -> None:
        if self._cluster is not None:
            raise OffloadError(
                f"{action} is not possible on several ranks ({self._cluster.ranks.world} here): how state is divided "
                "is fixed by offload.initialize"
            )

    @abstractmethod
    def _reduce(self, *, on_all_ranks: bool = False) -> None:
        """Where there are other ranks, every rank gets what it updates of the gradients' mean. `on_all_ranks`: all of
        them come here, also those that have had no backward.
        """

    def replace_gradient(self, record: ParameterRecord, value: Tensor | None) -> None:
        """Makes `value`, as `get_full` and `.grad` show it, the parameter's gradient; None forgets it."""
        self._state(record).wait_update()
        self._reduce()
        gradients = self._state(record).gradients
        if gradients is None or record.name not in self._trainable:
            if value is not None:
                raise GradientError(f"{record.name}: not trained by this engine, so it takes no gradient")
            return
        if self._cluster is not None:
            self._note_written(f"the gradient of {record.name}", None if value is None else value.detach().cpu())
        with self._lock:
            if value is None:
                self._gradient_queue.drain()
                if gradients.part(record.name) is not None:
                    gradients.drop(record.name)
                if self._cluster is not None:
                    self._cluster.reduction.note(record.unit, record.name, present=False)
                if not self._held():
                    self._clip_factor = 1.0
                return
            if self._clip_factor == 0.0:
                raise GradientError(f"{record.name}: a gradient cannot be set after clip_grad_norm_ made all of them 0")
            # What rests is the gradient times the loss scale and without the clipping.
            factor = self._scale / self._clip_factor
            resting = value.detach().to(self._memory.device.torch_device)
            if factor != 1.0:
                resting = resting * factor
            if self._cluster is not None:
                self._cluster.reduction.put(record, self._state(record), resting)
                return
            gradients.replace(record.name, resting, self._gradient_queue)
            gradients.rest(self._gradient_queue)

    def get_full(self, name: str, kind: str = "parameter") -> Tensor | None:
        """One parameter's whole value as a new CPU tensor of its shape.

        `kind`: "parameter" (the fp32 master; the weight itself if it is not trained), "weight" (compute dtype),
        "exp_avg", "exp_avg_sq" (fp32), or "grad" (the accumulated, unscaled gradient in the accumulation dtype; None
        without one).
        """
        self._check("get_full was called")
        record = self._record(name)
        if kind not in KINDS:
            raise ValueError(f"get_full: unknown kind {kind!r}; known: {', '.join(KINDS)}")
        if kind == "weight" or (kind == "parameter" and name not in self._trainable):
            return self.read_weight(record)
        if name not in self._trainable:
            if kind == "grad":
                return None
            raise ValueError(f"{name} is not trained, so it has no {kind}")
        if kind == "parameter":
            self._residency.see_writes([self._residency.units[record.unit]])
        with self._lock:
            if kind == "grad":
                value = self._read_gradient(record)
                factor = self._clip_factor / self._scale
                return None if value is None else (value if factor == 1.0 else value * factor).view(record.slot.shape)
            if record.slot.numel == 0:
                return torch.empty(record.slot.shape)
            plane = "master" if kind == "parameter" else kind
            found = self._state(record).read_state(record.slot, self._step_queue, [plane])[plane]
            self._whole_state(record, found)
            return found.view(record.slot.shape)

    @abstractmethod
    def _whole_weight(self, record: ParameterRecord, out: Tensor) -> None:
        """Fills the elements of a weight that are not here."""

    @abstractmethod
    def _whole_state(self, record: ParameterRecord, out: Tensor) -> None:
        """Fills the elements of an optimizer state that are not here."""

    def _read_gradient(self, record: ParameterRecord) -> Tensor | None:
        """The accumulated gradient as a new 1-D CPU tensor in the accumulation dtype, or None; as it rests."""
        found: Tensor | None = self._gradients(record).read(record.name, self._gradient_queue)
        return found

    def set_full(self, name: str, kind: str, value: Tensor) -> None:
        """Replaces one parameter's "parameter" (fp32 master and weight), "exp_avg", "exp_avg_sq" or "grad"."""
        self._check("set_full was called")
        record = self._record(name)
        if not isinstance(value, Tensor):
            raise ValueError(f"{name}: set_full needs a tensor of shape {record.slot.shape}, got {value!r}")
        if tuple(value.shape) != record.slot.shape:
            raise ValueError(
                f"{name}: a value of shape {tuple(value.shape)} for a parameter of shape {record.slot.shape}"
            )
        if kind == "grad":
            self.replace_gradient(record, value)
            return
        if kind not in ("parameter", "exp_avg", "exp_avg_sq"):
            hint = "; the weight follows from it: set 'parameter'" if kind == "weight" else ""
            raise ValueError(f"set_full: unknown kind {kind!r}; known: parameter, exp_avg, exp_avg_sq, grad{hint}")
        if kind != "parameter" and name not in self._trainable:
            raise ValueError(f"{name} is not trained, so it has no {kind}")
        state = self._state(record)
        trained = name in self._trainable
        flat = value.detach().to("cpu", torch.float32 if trained else state.flat.dtype).reshape(-1)
        self._note_written(f"{kind} of {name}", flat)
        with self._lock:
            if kind != "parameter":
                state.write(record.slot, self._step_queue, planes={kind: flat})
                return
            with self._changing_weight(record):
                if trained:
                    state.write(record.slot, self._step_queue, planes={"master": flat})
                else:
                    state.write(record.slot, self._step_queue, weight=flat)

    @contextmanager
    def _changing_weight(self, record: ParameterRecord) -> Iterator[None]:
        """Around a change of a resting weight: no copy of it on the device keeps the old value."""
        unit = self._residency.units[record.unit]
        with self._residency.lock:
            self._residency.drop_prefetched()
            yield
            self._binding.weights_changed([record])
            self._residency.refresh(unit)

    def optimizer_states(self, parameters: Mapping[int, nn.Parameter]) -> dict[int, dict[str, Tensor]]:
        """`step`, `exp_avg` and `exp_avg_sq` of those of `parameters` that were ever updated, under the same keys."""
        states: dict[int, dict[str, Tensor]] = {}
        for key, parameter in parameters.items():
            record = record_of(parameter)
            if record is None or not self._steps.get(record.name):
                continue
            moments = {kind: self.get_full(record.name, kind) for kind in ("exp_avg", "exp_avg_sq")}
            step = torch.tensor(float(self._steps[record.name]))
            states[key] = {"step": step, **{k: v for k, v in moments.items() if v is not None}}
        return states

    def load_optimizer_states(
        self, parameters: Mapping[int, nn.Parameter], states: Mapping[int, Mapping[str, Any]]
    ) -> None:
        """Sets moments and step counts from `states`; parameters without one start anew.

        Raises:
            ValueError: a state for a parameter that is not trained here.
        """
        records = {key: record_of(parameter) for key, parameter in parameters.items()}
        for key in states:
            record = records[key]
            if record is None or record.name not in self._trainable:
                raise ValueError(f"load_state_dict: parameter {key} is not trained by this engine")
        for key, record in records.items():
            if record is None or record.name not in self._trainable:
                continue
            state = states.get(key, {})
            if not state and not self._steps[record.name]:
                continue
            for kind in ("exp_avg", "exp_avg_sq"):
                self.set_full(record.name, kind, state.get(kind, torch.zeros(record.slot.shape)))
            self._steps[record.name] = int(state.get("step", 0))

    def named_full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter once (a tied one under its first name), one at a time: a CPU tensor in its compute dtype."""
        for name, record in self._records.items():
            yield name, self.read_weight(record)

    def named_full_states(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Every parameter with its fp32 value ("parameter"), moments and step count, on the CPU, one at a time; frozen
        ones with the value only.
        """
        for name in self._records:
            entry: dict[str, Any] = {"parameter": self.get_full(name)}
            if name in self._trainable:
                entry["exp_avg"] = self.get_full(name, "exp_avg")
                entry["exp_avg_sq"] = self.get_full(name, "exp_avg_sq")
                entry["step"] = self._steps[name]
            yield name, entry
