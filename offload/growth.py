"""Models that change after `initialize`: frozen parameters that begin to be trained, new submodules, and modules that
left.

[Note: flats of their own] A parameter that begins to be trained moves to a new flat of its unit, whose master is the
resting weight, with moments zero; what stays frozen is not touched. So everything that works on flats (the step, edits,
placement, budgets) works on these too. The room that it leaves behind is given back once its old flat is empty, or at
the old flat's end; elsewhere it stays unused. New parameters get flats in the unit whose root holds their module, or a
unit of their own.

[Note: waiting] A layout changes only while nobody uses the unit. `requires_grad_(True)` on a parameter of an optimizer
group therefore only notes it; the unit is laid out anew when it is next acquired, all of its waiting parameters at
once.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from offload.adoption import abandon, adopt_flat
from offload.build import (
    TRAINABLE,
    Blueprint,
    check_parameter,
    move_buffers,
    open_store,
    parameter_groups,
    parameter_spec,
    placement_request,
)
from offload.errors import GradientError, OffloadError, UnsupportedModelError
from offload.inspection import StateAccess
from offload.layout import BLOCK, Flat, ParameterSpec, Slot, ceil_to, layout_unit
from offload.optimizer import EngineOptimizer, follow
from offload.parameters import ParameterRecord, record_of
from offload.placement import Plan, chunk_for, extend_plan
from offload.planes import SlotQueue
from offload.residency import ResidentFlat, Unit
from offload.state import FlatState
from offload.tiers import Tier
from offload.units import UnitSpec, find_homes

log = logging.getLogger("offload")

Key = tuple[int, int]


@dataclass(slots=True, kw_only=True, eq=False)
class _Arrival:
    """A parameter to be given a place in a unit; `record` is that of one that has a place already."""

    spec: ParameterSpec
    parameter: nn.Parameter
    record: ParameterRecord | None = None


class Growth(StateAccess):
    """The part of an engine that follows changes of the model."""

    module: nn.Module
    optimizer: EngineOptimizer
    lr_scheduler: Any
    _blueprint: Blueprint
    _buffer_bytes: int
    _scaler: Any

    @abstractmethod
    def synchronize(self) -> None:
        """Carries out pending updates."""

    @abstractmethod
    def _make_scaler(self) -> Any:
        """The loss scaler, if anything trainable is fp16."""

    def _prepare_growth(self) -> None:
        self._waiting: dict[int, list[ParameterRecord]] = {}
        self._grouped: tuple[int, set[int]] = (-1, set())
        self._untrained = {r.name for r in self._records.values() if r.watched and not r.slot.trainable}
        self._layout_queue = SlotQueue(self._memory)
        self._residency.lay_out = self._lay_out

    # Thawing

    def unfrozen(self, record: ParameterRecord) -> None:
        """Follows `requires_grad` of a parameter becoming True: its gradients are collected, and if it is in a group of
        the optimizer it gets optimizer state.

        Raises:
            OffloadError: the state format does not hold weights of its dtype.
        """
        if not record.slot.trainable:
            self._check_trainable(record.name, self._state(record).flat.dtype)
        if not record.watched:
            self._binding.watch(record)
        if not record.slot.trainable and id(record.parameter) in self._group_members():
            self._await(record)

    def _check_trainable(self, name: str, dtype: torch.dtype) -> None:
        if dtype not in TRAINABLE or dtype not in self._blueprint.fmt.weight_dtypes:
            raise OffloadError(
                f"{name}: optimizer.state_format = {self._blueprint.fmt.name!r} cannot hold weights of {dtype}; "
                "leave it frozen, or choose another format or dtype at initialize"
            )

    def _group_members(self) -> set[int]:
        groups = self.optimizer.param_groups
        count = sum(len(group["params"]) for group in groups)
        if self._grouped[0] != count:
            self._grouped = (count, {id(p) for group in groups for p in group["params"]})
        return self._grouped[1]

    def _await(self, record: ParameterRecord) -> None:
        waiting = self._waiting.setdefault(record.unit, [])
        if record not in waiting:
            waiting.append(record)
        self._residency.waiting.add(record.unit)

    def _lay_out(self, unit: Unit) -> None:
        """Gives the waiting parameters of a unit that nobody uses their state; the residency's lock is held."""
        records = self._waiting.pop(unit.index, [])
        self._residency.waiting.discard(unit.index)
        thawed = [r for r in records if r.parameter.requires_grad and not r.slot.trainable]
        if thawed:
            for index in range(len(unit.flats)):
                self._states[unit.index, index].settle()
            self._place({unit.index: [self._thaw(record) for record in thawed]}, self._blueprint.specs)

    def _thaw(self, record: ParameterRecord) -> _Arrival:
        flat = self._state(record).flat
        spec = ParameterSpec(
            name=record.name,
            shape=record.slot.shape,
            dtype=flat.dtype,
            trainable=True,
            persistent=flat.persistent,
        )
        return _Arrival(spec=spec, parameter=record.parameter, record=record)

    def _lay_out_idle(self) -> None:
        if not self._waiting:
            return
        with self._residency.lock:
            self._residency.drop_prefetched()
            for index in list(self._waiting):
                unit = self._residency.units[index]
                if not unit.holders:
                    self._lay_out(unit)

    def _record(self, item: Any) -> ParameterRecord:
        record = super()._record(item)
        if self._waiting:
            self._lay_out_idle()
        return record

    def _check_parameters(self) -> None:
        """Refuses parameters put into the model after `initialize`: they would silently not be trained."""
        for name, parameter in self.module.named_parameters():
            record = record_of(parameter)
            if record is None or record.host is not self:
                raise OffloadError(
                    f"{name} is not a parameter of this engine: it was put into the model after offload.initialize "
                    "(by assignment, load_state_dict(assign=True) or a new submodule). Take new modules over with "
                    "engine.adopt(); change values in place with load_state_dict() or engine.gathered(modify=True)"
                )
        self._check_unfrozen()

    def _check_unfrozen(self) -> None:
        """Notices parameters that were unfrozen while they were plain, and takes the gradients that torch kept."""
        for record in self._records.values():
            if record.watched:
                continue
            with torch._C.DisableTorchFunctionSubclass():
                if not record.parameter.requires_grad:
                    continue
                self.unfrozen(record)
                gradient, record.parameter.grad = record.parameter.grad, None
            if gradient is not None:
                self._lay_out_idle()
                self._gradient_arrived(record, gradient)

    @abstractmethod
    def _gradient_arrived(self, record: ParameterRecord, gradient: Tensor) -> None:
        """Takes a gradient in."""

    def _untrained_gradient(self, record: ParameterRecord) -> None:
        """A gradient of a parameter without optimizer state."""
        if id(record.parameter) in self._group_members():
            raise GradientError(
                f"{record.name}: it was unfrozen while its unit was in use, so there is no place for its gradient yet; "
                "unfreeze it outside forward, backward and gathered()"
            )
        if record.name not in self._untrained:
            self._untrained.add(record.name)
            log.warning(
                "%s requires a gradient but is in no parameter group, so it is not trained: "
                "engine.optimizer.add_param_group",
                record.name,
            )

    # Groups and new modules

    def add_group(self, group: Mapping[str, Any]) -> None:
        """What `optimizer.add_param_group` does: parameters of the group that require a gradient are trained from now
        on, those that are new in the model are taken over first, together with everything else that is new.

        Raises:
            ValueError: as torch's, or for a tensor that is no parameter of the model.
            PlanError: there is no room for the state; nothing has changed then.
        """
        self._check("add_param_group was called")
        named = list(self.module.named_parameters())
        made = parameter_groups(self.module, self._blueprint.config, [dict(group)], named)
        if any(self._own(p) is None for p in made[0]["params"]):
            self.adopt(made)
        else:
            self._train_groups(made)

    def _train_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        self._require_rest("add_param_group")
        with self._grouping(groups):
            self._thaw_groups(groups)

    def _thaw_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        for group in groups:
            for parameter in group["params"]:
                record = self._own(parameter)
                if record is not None and parameter.requires_grad and not record.slot.trainable:
                    self.unfrozen(record)
        try:
            self._lay_out_idle()
        except BaseException:
            self._waiting.clear()
            self._residency.waiting.clear()
            raise

    @contextmanager
    def _grouping(self, groups: Sequence[dict[str, Any]]) -> Iterator[None]:
        """Adds groups to the optimizer, and takes them back if the block fails."""
        before = len(self.optimizer.param_groups)
        try:
            for group in groups:
                self.optimizer.append_group(group)
            yield
        except BaseException:
            del self.optimizer.param_groups[before:]
            self._grouped = (-1, set())
            raise
        for group in self.optimizer.param_groups[before:]:
            follow(self.lr_scheduler, group)

    def _own(self, parameter: nn.Parameter) -> ParameterRecord | None:
        record = record_of(parameter)
        return record if record is not None and record.host is self else None

    def _require_rest(self, action: str) -> None:
        self._binding.unwind()
        self._binding.reset()
        self._residency.let_go()
        if busy := self._residency.busy_units():
            raise OffloadError(
                f"{action} while {', '.join(busy[:3])} {'is' if len(busy) == 1 else 'are'} in use: "
                "leave gathered(), and end every forward and backward, before it"
            )

    def adopt(self, param_groups: Iterable[Any] | None = None) -> list[str]:
        """Follows the model as it is now: takes new parameters over, lets go of those that left it, and learns new
        names. Returns the names of the new ones.

        `param_groups` are added to the optimizer; by default the new parameters that require a gradient, without
        weight decay for what `optimizer.no_decay` names. Parameters that left become ordinary ones on the compute
        device, out of the optimizer's groups.

        Raises:
            UnsupportedModelError, ValueError: as `initialize`.
            PlanError: there is no room; nothing has changed then.
        """
        self._check("adopt was called")
        self._refuse_on_ranks("adopt")
        self._require_rest("adopt")
        self.synchronize()
        self._lay_out_idle()
        config, named = self._blueprint.config, list(self.module.named_parameters())
        fresh = [(name, p) for name, p in named if self._own(p) is None]
        for name, parameter in fresh:
            check_parameter(name, parameter)
            if parameter.device.type == "meta":
                raise UnsupportedModelError(f"parameter {name} is on the meta device; build new modules for real")
        groups = self._fresh_groups(param_groups, named, {id(p) for _, p in fresh})
        with self._grouping(groups):
            members = self._group_members()
            specs, arrivals = self._homes(fresh)
            placed = {
                index: [
                    _Arrival(spec=parameter_spec(name, p, config, p.requires_grad and id(p) in members), parameter=p)
                    for name, p in found
                ]
                for index, found in arrivals.items()
            }
            for item in (item for items in placed.values() for item in items if item.spec.trainable):
                self._check_trainable(item.spec.name, item.spec.dtype)
            with self._residency.lock:
                self._place(placed, specs)
        self._buffer_bytes = move_buffers(self.module, self._memory.device.torch_device)
        self._let_go({id(p) for _, p in named})
        self._rename(named)
        self._thaw_groups(groups)
        return [name for name, _ in fresh]

    def _fresh_groups(
        self, param_groups: Iterable[Any] | None, named: list[tuple[str, nn.Parameter]], fresh: set[int]
    ) -> list[dict[str, Any]]:
        if param_groups is not None:
            return parameter_groups(self.module, self._blueprint.config, list(param_groups), named)
        groups = parameter_groups(self.module, self._blueprint.config, None, named)
        for group in groups:
            group["params"] = [p for p in group["params"] if id(p) in fresh and p.requires_grad]
        return [group for group in groups if group["params"]]

    def _homes(
        self, fresh: Sequence[tuple[str, nn.Parameter]]
    ) -> tuple[list[UnitSpec], dict[int, list[tuple[str, nn.Parameter]]]]:
        """All units, new ones last, and the new parameters by unit."""
        config = self._blueprint.config
        wrap = config.units.wrap if config.units.wrap == "auto" else list(config.units.wrap)
        known = self._blueprint.specs
        return find_homes(self.module, known, fresh, wrap)

    # Layout

    def _place(self, arrivals: Mapping[int, Sequence[_Arrival]], specs: list[UnitSpec]) -> None:
        """Gives parameters places in units that nobody uses: plans, makes planes, copies values, then switches over."""
        self._refuse_on_ranks(f"training {next(iter(arrivals.values()))[0].spec.name} from now on" if arrivals else "")
        blueprint, before = self._blueprint, len(self._blueprint.specs)
        layouts = [*blueprint.layouts, *(layout_unit(spec.name, []) for spec in specs[before:])]
        added: list[Key] = []
        for index, items in arrivals.items():
            extra = layout_unit(layouts[index].name, [item.spec for item in items]).flats
            added += [(index, len(layouts[index].flats) + i) for i in range(len(extra))]
            layouts[index] = replace(layouts[index], flats=(*layouts[index].flats, *extra))
        request = placement_request(blueprint.config, specs, blueprint.device, blueprint.prefetch)
        plan = extend_plan(
            blueprint.plan, layouts, added, blueprint.fmt, blueprint.accumulate, request, blueprint.limits
        )
        self._make_room(plan)
        items_by_name = {item.spec.name: item for items in arrivals.values() for item in items}
        states = self._make_states(added, [layouts[u].flats[f] for u, f in added], plan, items_by_name)
        self._states = {**self._states, **states}
        units = self._residency.units
        for spec in specs[before:]:
            units.append(Unit(index=spec.index, name=spec.name, flats=[]))
        blueprint.specs, blueprint.layouts, blueprint.plan = specs, layouts, plan
        for (index, f), state in states.items():
            items = [items_by_name[slot.name] for slot in state.flat.slots]
            self._switch(units[index], f, state, items)
        for spec in specs[before:]:
            own = [units[spec.index], *(units[i] for i in spec.borrows)]
            self._binding.attach(spec.root, own, repeatable=spec.kind != "container")
        for index in {index for index, _ in added}:
            self._binding.laid_out(units[index])
        self._residency.prefetch_limit = plan.total(Tier.DEVICE)
        self._index()

    def _index(self) -> None:
        """Tables by name, after parameters have come or gone."""
        records = {id(r.parameter): r for unit in self._residency.units for r in unit.records}
        ordered = [records[id(p)] for p in self.module.parameters() if id(p) in records]
        known = {id(record) for record in ordered}
        # One that left the module stays known until `adopt` lets go of it.
        ordered += [r for r in records.values() if id(r) not in known]
        self._records = {record.name: record for record in ordered}
        self._trainable = {name: r for name, r in self._records.items() if r.slot.trainable}
        for name in self._trainable:
            self._steps.setdefault(name, 0)
        for spec, unit in zip(self._blueprint.specs, self._residency.units, strict=True):
            spec.parameters = [(record.name, record.parameter) for record in unit.records]
        if self._scaler is None:
            self._scaler = self._make_scaler()

    def _make_room(self, plan: Plan) -> None:
        memory, more = self._memory, plan.total(Tier.NVME) - self._blueprint.plan.total(Tier.NVME)
        if more <= 0:
            return
        if memory.store is None:
            open_store(self._blueprint.config, memory, plan.total(Tier.NVME), None)
        else:
            memory.store.grow(more)

    def _make_states(
        self, keys: Sequence[Key], flats: Sequence[Flat], plan: Plan, items: Mapping[str, _Arrival]
    ) -> dict[Key, FlatState]:
        blueprint = self._blueprint
        states: dict[Key, FlatState] = {}
        try:
            for key, flat in zip(keys, flats, strict=True):
                tiers = plan.flats[key]
                states[key] = FlatState(
                    self._memory,
                    flat,
                    blueprint.fmt,
                    weight_tier=tiers.weight,
                    state_tier=tiers.optimizer,
                    gradient_tier=tiers.gradients,
                    accumulate=blueprint.accumulate,
                    chunk=chunk_for(blueprint.fmt, flat, blueprint.accumulate, plan),
                )
                states[key].create(self._values(items), self._layout_queue)
        except BaseException:
            for state in states.values():
                state.close()
            raise
        return states

    def _values(self, items: Mapping[str, _Arrival]) -> Callable[[Slot, int, int], Tensor]:
        """Values to create planes from; those of a thawed parameter come from where it rests."""

        def values(slot: Slot, start: int, stop: int) -> Tensor:
            item = items[slot.name]
            if item.record is None:
                return item.parameter.detach().reshape(-1)[start:stop].cpu()
            # Not through a staging slot: whoever asks holds one, and there may be no other.
            state, offset = self._state(item.record), item.record.slot.offset
            lo, hi = (offset + start) // BLOCK * BLOCK, ceil_to(offset + stop, BLOCK)
            blocks = torch.empty(hi - lo, dtype=state.flat.dtype)
            state.settle()
            state.weight.read(lo, hi, blocks)
            return blocks[offset + start - lo : offset + stop - lo]

        return values

    def _switch(self, unit: Unit, index: int, state: FlatState, items: Sequence[_Arrival]) -> None:
        """Makes a new flat the home of its parameters."""
        leaving: dict[int, set[str]] = {}
        records = []
        for slot, item in zip(state.flat.slots, items, strict=True):
            record = item.record
            if record is None:
                record = ParameterRecord(
                    name=slot.name, parameter=item.parameter, unit=unit.index, flat=index, slot=slot, host=self
                )
            else:
                leaving.setdefault(record.flat, set()).add(record.name)
                record.flat, record.slot = index, slot
            records.append(record)
        resident = ResidentFlat(flat=state.flat, plane=state.weight, records=records, state=state)
        unit.flats.append(resident)
        adopt_flat(resident, self._memory.device.torch_device)
        for record in records:
            with torch._C.DisableTorchFunctionSubclass():
                wanted = record.parameter.requires_grad
            if wanted and not record.watched:
                self._binding.watch(record)
        for old, names in leaving.items():
            self._leave(unit, old, names)

    def _leave(self, unit: Unit, index: int, names: set[str]) -> None:
        """Takes parameters out of a flat whose others stay where they are."""
        flat = unit.flats[index].flat
        slots = tuple(slot for slot in flat.slots if slot.name not in names)
        if slots:
            end = max(flat.trainable_end, ceil_to(max(slot.end for slot in slots), BLOCK), BLOCK)
            left = replace(flat, slots=slots, padded=min(end, flat.padded))
        else:
            left = replace(flat, slots=(), shared_start=0, trainable_end=0, padded=0)
        unit.flats[index].records = [r for r in unit.flats[index].records if r.flat == index and r.name not in names]
        self._relay(unit, index, left, {})

    def _relay(self, unit: Unit, index: int, flat: Flat, renamed: Mapping[str, str]) -> None:
        blueprint = self._blueprint
        unit.flats[index].flat = flat
        self._states[unit.index, index].relaid(flat, renamed)
        flats = list(blueprint.layouts[unit.index].flats)
        flats[index] = flat
        blueprint.layouts[unit.index] = replace(blueprint.layouts[unit.index], flats=tuple(flats))

    # Parameters that left, and names

    def _let_go(self, present: set[int]) -> None:
        gone = [record for record in self._records.values() if id(record.parameter) not in present]
        if not gone:
            return
        device = self._memory.device.torch_device
        leaving: dict[Key, set[str]] = {}
        for record in gone:
            value = self.read_weight(record).to(device)
            self._binding.unwatch(record)
            abandon(record, value)
            leaving.setdefault((record.unit, record.flat), set()).add(record.name)
            self._steps.pop(record.name, None)
        left = {id(record.parameter) for record in gone}
        for group in self.optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) not in left]
        for (unit, flat), names in leaving.items():
            self._leave(self._residency.units[unit], flat, names)
            self._binding.laid_out(self._residency.units[unit])
        self._grouped = (-1, set())
        self._index()

    def _rename(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Wrapping a module puts a longer name before its parameters; states go by the names that the model has now."""
        renamed: dict[int, str] = {}
        for name, parameter in named:
            record = self._own(parameter)
            if record is not None and record.name != name:
                renamed[id(record)] = name
        if not renamed:
            return
        steps = {id(r): self._steps[r.name] for r in self._records.values() if r.name in self._steps}
        watched = [r for r in self._records.values() if id(r) in renamed and r.watched]
        for record in watched:  # the hooks know the name
            self._binding.unwatch(record)
        for unit in self._residency.units:
            for index, flat in enumerate(unit.flats):
                names = {r.name: renamed[id(r)] for r in flat.records if id(r) in renamed}
                if not names:
                    continue
                slots = {s.name: replace(s, name=names.get(s.name, s.name)) for s in flat.flat.slots}
                for record in flat.records:
                    record.slot = slots[record.name]
                    record.name = record.slot.name
                self._relay(unit, index, replace(flat.flat, slots=tuple(slots.values())), names)
        for record in watched:
            with torch._C.DisableTorchFunctionSubclass():
                wanted = record.parameter.requires_grad
            if wanted:
                self._binding.watch(record)
        self._steps = {}
        self._index()
        self._steps.update({r.name: steps[id(r)] for r in self._records.values() if id(r) in steps})

    def named_full_states(self) -> Iterator[tuple[str, dict[str, Any]]]:
        self._lay_out_idle()
        yield from super().named_full_states()
