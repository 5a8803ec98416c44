"""From a module and a configuration to everything an engine owns; refuses what cannot work before anything large is
allocated.
"""

from __future__ import annotations

import fnmatch
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.adoption import adopt, orphan
from offload.aliases import check_memory
from offload.checkpoint.weights import WeightSource, values_of
from offload.config import Config
from offload.errors import PlanError, UnsupportedModelError
from offload.initialization import Creator, InitFn, materialise
from offload.layout import WHOLE, Division, ParameterSpec, UnitLayout, layout_unit
from offload.machine import free_disk, host_memory, map_large_blocks_apart, return_freed_memory
from offload.optimizer import default_groups
from offload.parallel.kept import after_forward, check_limit
from offload.parallel.ranks import Ranks
from offload.parallel.replicas import hash_parameters
from offload.parameters import OffloadedParameter, ParameterHost, ParameterRecord
from offload.placement import Limits, Plan, Request, make_plan
from offload.planes import SlotQueue
from offload.recipe import build_param_groups
from offload.residency import ResidentFlat, Unit
from offload.schedule.choice import takes_at_once
from offload.state import FlatState
from offload.tiers import Tier, TierMemory
from offload.units import UnitSpec, split_units
from optimizer_cpu.formats import StateFormat, get_format
from swap.budget import Budget
from swap.devices import Device, create_device
from swap.faults import FaultPlan
from swap.files import check_path, open_swap_file
from swap.geometry import PAGE, format_bytes
from swap.store import SwapStore
from swap.tuning import MOST_DEPTH, tune

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TRAINABLE = (torch.float32, torch.bfloat16, torch.float16)
HOST_SHARE = 0.85
DEVICE_SHARE = 0.9
DISK_SHARE = 0.95
PROBE_FROM = 1 << 30
"""Bytes in swap files from which a drive is worth the seconds of a first probe."""


@dataclass(slots=True, kw_only=True)
class Blueprint:
    """What is decided before anything is allocated."""

    config: Config
    model: nn.Module
    device: Device
    specs: list[UnitSpec]
    layouts: list[UnitLayout]
    fmt: StateFormat
    accumulate: torch.dtype
    plan: Plan
    limits: Limits
    prefetch: int
    groups: list[dict[str, Any]]
    optimized: set[int]
    creator: Creator
    source: WeightSource | None = None
    ranks: Ranks | None = None
    division: Division = WHOLE
    wire: torch.dtype | None = None
    kept: bool | int = True
    hashes: dict[str, int] = field(default_factory=dict)
    """Of first values, by unit, on several ranks."""


def check_model(model: nn.Module) -> None:
    """Refuses by name what cannot be carried.

    Raises:
        UnsupportedModelError: wrapped, compiled or scripted modules, parameter subclasses (DTensor, quantised),
            trainable dtypes without fp32 masters, parameters that belong to another engine.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(f"offload.initialize needs an nn.Module, not {type(model).__name__}")
    for name, module in model.named_modules():
        kind = type(module).__name__
        label = f"{name or '(root)'} ({kind})"
        if kind in (
            "DistributedDataParallel",
            "FullyShardedDataParallel",
            "DataParallel",
            "FlattenParamsWrapper",
        ) or kind.startswith("FSDP"):
            raise UnsupportedModelError(
                f"{label}: already wrapped by another sharding or data-parallel system; pass the bare module"
            )
        if kind == "OptimizedModule":
            raise UnsupportedModelError(
                f"{label}: compiled as a whole; hooks cannot be traced. Compile the forward of each block instead: "
                "block.forward = torch.compile(block.forward)"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedModelError(
                f"{label}: a torch.jit.ScriptModule, whose forward runs without the hooks that bring weights in; pass "
                "the module that it was scripted or traced from"
            )
        for key, parameter in module._parameters.items():
            if parameter is not None:
                check_parameter(f"{name}.{key}" if name else key, parameter)
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type == "meta":
                raise UnsupportedModelError(
                    f"{label}: buffer {key} is on the meta device, and nothing can compute it again; build the model "
                    "under offload.empty_init(), which makes buffers for real, not under torch.device('meta')"
                )


def check_parameter(name: str, parameter: nn.Parameter) -> None:
    if isinstance(parameter, OffloadedParameter):
        raise UnsupportedModelError(
            f"parameter {name} belongs to another engine (open or closed); build the model anew"
        )
    uninitialised = isinstance(parameter, nn.parameter.UninitializedParameter)
    if uninitialised or type(parameter) is not nn.Parameter or type(parameter.data) is not torch.Tensor:
        found = type(parameter).__name__ if type(parameter) is not nn.Parameter else type(parameter.data).__name__
        raise UnsupportedModelError(
            f"parameter {name} is a {found}, not a plain nn.Parameter: "
            "lazy, sharded and quantised parameter classes are not supported"
        )
    if parameter.layout is not torch.strided:
        raise UnsupportedModelError(
            f"parameter {name} has layout {parameter.layout}; only dense parameters are supported"
        )
    if parameter.requires_grad and parameter.dtype not in TRAINABLE:
        raise UnsupportedModelError(
            f"parameter {name} is trainable in {parameter.dtype}; supported are fp32, bf16 and fp16 "
            "(cast it, or set requires_grad=False)"
        )


def check_swap_paths(paths: Sequence[str]) -> None:
    """Refuses paths that cannot hold swap files, before time is spent on the model.

    Raises:
        SwapPathError: a path is missing, not a directory, or not writable.
    """
    for path in paths:
        check_path(Path(path))
        if not os.access(path, os.W_OK | os.X_OK) or free_disk([path]) == 0:
            # Opening one tells why, or that permissions are more generous than they look.
            open_swap_file(Path(path), False).close()


def weight_dtype(name: str, parameter: nn.Parameter, config: Config) -> torch.dtype:
    """The dtype in which a parameter rests and computes: fp32 ones are cast to `precision.compute_dtype` unless
    `precision.keep` names them.
    """
    compute = config.precision.compute_dtype
    if compute == "auto" or parameter.dtype != torch.float32:
        return parameter.dtype
    if any(fnmatch.fnmatchcase(name, pattern) for pattern in config.precision.keep):
        return parameter.dtype
    return DTYPES[compute]


def draw_up(
    model: nn.Module,
    config: Config,
    param_groups: Any,
    init_fn: InitFn | None,
    source: WeightSource | None = None,
    ranks: Ranks | None = None,
) -> Blueprint:
    """Splits, lays out and places the model. Allocates nothing but the device object.

    Closes `ranks` if it fails.
    """
    try:
        return _draw_up(model, config, param_groups, init_fn, source, ranks)
    except BaseException as error:
        if ranks is not None:
            ranks.abandon(error)
        raise


def _draw_up(
    model: nn.Module,
    config: Config,
    param_groups: Any,
    init_fn: InitFn | None,
    source: WeightSource | None,
    ranks: Ranks | None,
) -> Blueprint:
    check_model(model)
    check_memory(model)
    check_swap_paths(config.memory.nvme_paths)
    if config.placement.activations == "nvme" and not config.memory.nvme_paths:
        raise PlanError("placement.activations = 'nvme', but there is no swap path: set memory.nvme_paths")
    fmt = get_format(config.optimizer.state_format)
    specs = split_units(model, config.units.wrap if config.units.wrap == "auto" else list(config.units.wrap))
    named = [item for spec in specs for item in spec.parameters]
    creator = Creator(model, seed=config.seed, init_fn=init_fn)
    groups = parameter_groups(model, config, param_groups, named)
    optimized = {id(p) for group in groups for p in group["params"] if p.requires_grad}
    forgotten = [name for name, p in named if p.requires_grad and id(p) not in optimized]
    if forgotten:
        warnings.warn(
            f"{len(forgotten)} parameters require a gradient but are in no parameter group and will not be trained: "
            f"{', '.join(forgotten[:3])}",
            stacklevel=3,
        )
    division, wire = divide(config, ranks)
    layouts = [_layout(spec, config, optimized, division.size) for spec in specs]
    device = create_device(
        config.device, capacity=_capacity(config), seed=config.seed, index=0 if ranks is None else ranks.local_rank
    )
    try:
        limits = _limits(config, device, 1 if ranks is None else ranks.local_world)
        prefetch = 1 if config.schedule.prefetch_units == "auto" else config.schedule.prefetch_units
        accumulate = DTYPES[config.precision.accumulate_dtype]
        kept = kept_weights(config, division)
        if config.parallel.limit_gathers != "auto":
            check_limit(config.parallel.limit_gathers, layouts, division)
        request = placement_request(config, specs, device, prefetch, division, wire, kept)
        if ranks is None and takes_at_once(config, layouts):
            request = replace(request, taken_at_once=True)
        plan = make_plan(layouts, fmt, accumulate, request, limits)
        _warn_large_units(layouts, limits)  # of a plan that stands: beside its refusal they are noise
    except BaseException:
        device.close()
        raise
    return Blueprint(
        config=config,
        model=model,
        device=device,
        specs=specs,
        layouts=layouts,
        fmt=fmt,
        accumulate=accumulate,
        plan=plan,
        limits=limits,
        prefetch=prefetch,
        groups=groups,
        optimized=optimized,
        creator=creator,
        source=source,
        ranks=ranks,
        division=division,
        wire=wire,
        kept=kept,
    )


def kept_weights(config: Config, division: Division) -> bool | int:
    """What stays of gathered weights between forward and backward; True (nothing) where none are gathered."""
    gathers = division.stage >= 3 and division.size > 1
    return after_forward(config.parallel.reshard_after_forward, division.size) if gathers else True


def divide(config: Config, ranks: Ranks | None) -> tuple[Division, torch.dtype | None]:
    """What this rank holds of every flat, and the dtype in which gradients are reduced."""
    if ranks is None:
        return WHOLE, None
    reduce = config.precision.reduce_dtype
    wire = DTYPES[config.precision.accumulate_dtype if reduce == "auto" else reduce]
    return Division(stage=config.parallel.number, rank=ranks.shard_rank, size=ranks.shard_size), wire


def parameter_groups(
    model: nn.Module, config: Config, param_groups: Any, named: Sequence[tuple[str, nn.Parameter]]
) -> list[dict[str, Any]]:
    """The optimizer's groups: `param_groups` with lists of parameters, or what the configuration asks for.

    Raises:
        ValueError: a group without parameters, or one that holds a tensor that is not in `named`.
    """
    if param_groups is None:
        return build_param_groups(model, config.optimizer) or default_groups(named)
    known = {id(p) for _, p in named}
    groups = [dict(g) if isinstance(g, dict) else {"params": [g]} for g in param_groups]
    for index, group in enumerate(groups):
        if "params" not in group:
            raise ValueError(f"param_groups[{index}] has no 'params'")
        params = [group["params"]] if isinstance(group["params"], torch.Tensor) else list(group["params"])
        group["params"] = [p[1] if isinstance(p, tuple) else p for p in params]
        for p in group["params"]:
            if id(p) not in known:
                raise ValueError(
                    f"param_groups[{index}] holds a tensor of shape {tuple(p.shape)} "
                    "that is not a parameter of the model"
                )
    return groups


def _layout(spec: UnitSpec, config: Config, optimized: set[int], world: int) -> UnitLayout:
    named = [parameter_spec(n, p, config, id(p) in optimized) for n, p in spec.parameters]
    return layout_unit(spec.name, named, world)


def parameter_spec(name: str, parameter: nn.Parameter, config: Config, trainable: bool) -> ParameterSpec:
    """What the layout needs to know of a parameter under this configuration."""
    dtype = weight_dtype(name, parameter, config)
    return ParameterSpec(
        name=name,
        shape=tuple(parameter.shape),
        dtype=dtype,
        trainable=trainable,
        persistent=parameter.numel() * dtype.itemsize < config.units.persistent_below,
    )


def _capacity(config: Config) -> int | None:
    return None if config.memory.device == "auto" else config.memory.device


def _limits(config: Config, device: Device, sharing: int) -> Limits:
    """What the machine and the configuration allow to one of `sharing` processes of this run on this machine."""
    memory = host_memory()
    free, _ = device.memory_info()
    device_limit: int | None = _capacity(config)
    if device_limit is None and device.kind == "cuda":
        device_limit = int(free * DEVICE_SHARE)
    available = memory.available // sharing
    host = int(available * HOST_SHARE) if config.memory.host == "auto" else config.memory.host
    paths = config.memory.nvme_paths
    if not paths:
        nvme = 0
    elif config.memory.nvme == "auto":
        nvme = int(free_disk(paths) * DISK_SHARE) // sharing
    else:
        nvme = config.memory.nvme
    return Limits(
        device=device_limit,
        host=host,
        nvme=nvme,
        memory_available=available,
        memory_limited_by=memory.limited_by,
        nvme_paths=tuple(paths),
    )


def placement_request(
    config: Config,
    specs: Sequence[UnitSpec],
    device: Device,
    prefetch: int,
    division: Division = WHOLE,
    wire: torch.dtype | None = None,
    kept: bool | int = True,
) -> Request:
    placement = config.placement
    return Request(
        tiers={"parameters": placement.parameters, "optimizer": placement.optimizer, "gradients": placement.gradients},
        roots=[[spec.index, *spec.borrows] for spec in specs],
        held=sorted({i for spec in specs if spec.kind == "container" for i in (spec.index, *spec.borrows)}),
        prefetch=prefetch,
        staging=None if config.swap.staging == "auto" else config.swap.staging,
        chunk=None if config.swap.chunk == "auto" else config.swap.chunk,
        aliases_host=device.aliases_host,
        device_is_host_memory=device.kind != "cuda",
        rest_on_device=device.kind == "cuda" or config.memory.device != "auto",
        bounce=(MOST_DEPTH if config.swap.queue_depth == "auto" else config.swap.queue_depth)
        * max(1, len(config.memory.nvme_paths))
        * PAGE,
        checksum=config.swap.checksum,
        division=division,
        wire=wire,
        kept=kept,
    )


def _warn_large_units(layouts: Sequence[UnitLayout], limits: Limits) -> None:
    if limits.device is None:
        return
    for unit in layouts:
        if unit.nbytes > limits.device:
            warnings.warn(
                f"unit {unit.name} holds {format_bytes(unit.nbytes)} of weights, "
                f"more than memory.device = {format_bytes(limits.device)}: "
                "it can only be used where its weights rest; split it (units.wrap) or raise memory.device",
                stacklevel=5,
            )


def open_memory(blueprint: Blueprint, faults: FaultPlan | None) -> TierMemory:
    """The budget and the memory of all tiers; the swap store only if something rests on nvme.

    `faults` goes beneath its engine.
    """
    plan, limits, config = blueprint.plan, blueprint.limits, blueprint.config
    if blueprint.device.kind != "cuda":
        map_large_blocks_apart()  # activations are host memory
    budget = Budget({"device": limits.device, "host": limits.host, "nvme": limits.nvme})
    memory = TierMemory(device=blueprint.device, budget=budget, poison=blueprint.device.kind == "sim")
    memory.spans.recording = config.log.trace
    memory.spans.sample = lambda: {str(tier): budget.used(str(tier)) for tier in Tier}
    try:
        nvme = plan.total(Tier.NVME)
        if nvme or config.placement.activations == "nvme":  # first, since it may refuse a path or lack space on it
            open_store(config, memory, nvme, faults)
        memory.open_staging(plan.staging, plan.slot_bytes)
    except BaseException:
        memory.close()
        raise
    return memory


def open_store(config: Config, memory: TierMemory, nbytes: int, faults: FaultPlan | None) -> None:
    """Opens the swap files that the configuration asks for, `nbytes` in all."""
    swap, budget, spills = config.swap, memory.budget, config.placement.activations == "nvme"
    probe = nbytes >= PROBE_FROM
    tuning = None if faults else tune(config.memory.nvme_paths, engine=swap.engine, probe=probe, budget=budget)
    memory.store = SwapStore(
        config.memory.nvme_paths,
        engine=swap.engine,
        capacity=None if spills else nbytes,
        budget=budget,
        block=swap.block if swap.block != "auto" else tuning.block if tuning else None,
        queue_depth=swap.queue_depth if swap.queue_depth != "auto" else tuning.queue_depth if tuning else None,
        weights=tuning.weights if tuning else None,
        burst=swap.burst if swap.burst != "auto" else tuning.burst if tuning else 0,
        direct=swap.direct,
        timeout=swap.timeout,
        checksum=swap.checksum,
        endurance=None if swap.endurance_tbw is None else int(swap.endurance_tbw * 10**12),
        faults=faults,
    )
    if spills:  # the files grow beyond what is planned, up to memory.nvme
        memory.store.reserve_capacity(nbytes)
    if memory.staging is not None:
        memory.store.register_memory(memory.staging.memory)
    memory.store.observer = memory.spans.transferred if config.log.trace else None


def build_units(
    blueprint: Blueprint, memory: TierMemory, host: ParameterHost
) -> tuple[list[Unit], dict[tuple[int, int], FlatState]]:
    """Takes the model's parameters over, unit by unit: creates those on the meta device, stores all planes, frees the
    originals.
    """
    units: list[Unit] = []
    states: dict[tuple[int, int], FlatState] = {}
    queue = SlotQueue(memory)
    try:
        for spec, layout in zip(blueprint.specs, blueprint.layouts, strict=True):
            parameters = dict(spec.parameters)
            source = blueprint.source
            blueprint.creator.create([p for p in parameters.values() if source is None or not source.has(p)])
            materialise(list(parameters.values()))
            if blueprint.ranks is not None:
                blueprint.hashes[spec.name] = hash_parameters(parameters.values(), source)
            values = values_of(parameters, source)
            unit = Unit(index=spec.index, name=spec.name, flats=[])
            for index, flat in enumerate(layout.flats):
                tiers = blueprint.plan.flats[spec.index, index]
                state = FlatState(
                    memory,
                    flat,
                    blueprint.fmt,
                    weight_tier=tiers.weight,
                    state_tier=tiers.optimizer,
                    gradient_tier=tiers.gradients,
                    accumulate=blueprint.accumulate,
                    chunk=blueprint.plan.chunk,
                    division=blueprint.division,
                    wire=blueprint.wire,
                    local_tier=local_tier(blueprint, tiers.gradients),
                )
                states[spec.index, index] = state
                state.create(values, queue)
                records = [
                    ParameterRecord(
                        name=slot.name,
                        parameter=parameters[slot.name],
                        unit=spec.index,
                        flat=index,
                        slot=slot,
                        host=host,
                    )
                    for slot in flat.slots
                ]
                unit.flats.append(ResidentFlat(flat=flat, plane=state.weight, records=records, state=state))
            units.append(unit)
            adopt(unit, memory.device.torch_device)
            return_freed_memory()
    except BaseException:
        orphan(units, memory.device.torch_device)
        for state in states.values():
            state.close()
        raise
    return units, states


def local_tier(blueprint: Blueprint, rests: Tier) -> Tier:
    """Where a rank's own gradients wait for their reduction: where they rest if that comes at the end of the step, else
    (stages 2 and 3) where they are sent from.
    """
    if blueprint.ranks is None or blueprint.division.stage < 2:
        return rests
    return Tier.DEVICE if blueprint.ranks.on_device else Tier.HOST


def move_buffers(model: nn.Module, device: torch.device) -> int:
    """Buffers live on the compute device; returns their bytes."""
    total = 0
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                if buffer.device != device:
                    module._buffers[name] = buffer.to(device)
                total += buffer.numel() * buffer.element_size()
    return total
