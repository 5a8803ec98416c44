"""Which plane of which flat rests on which tier, and whether that fits, before anything large exists.

`auto` fills the device, then the host, then nvme, weights before optimizer states before gradients, in unit order.
Explicit placement is obeyed or refused. Pure arithmetic: budgets and machine limits come in as numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from offload.errors import PlanError
from offload.gradients import planned_bytes
from offload.layout import WHOLE, Division, Flat, UnitLayout, ceil_to
from offload.parallel.kept import GATHER, REDUCTION, SECONDARY, kept_bytes
from offload.state import chunk_granule, staging_bytes_per_chunk, state_specs
from offload.tiers import Tier
from optimizer_cpu.formats import StateFormat
from swap.checksums import BYTES_PER_PAGE
from swap.geometry import PAGE, format_bytes

KINDS = ("parameters", "optimizer", "gradients")
MAX_CHUNK = 1 << 20
MAX_STAGING_SLOTS = 4
AHEAD_BYTES, AHEAD_SLOTS, AHEAD_FROM = 192 << 20, 24, 1 << 20
"""Staging, where states rest in swap files: at most so many bytes and slots of them can be read before their step, if a
slot has so many bytes; smaller ones are read in no time.
"""
STEP_SLOTS = 3
"""Chunks that an optimizer step on the device has there at once: one at work, two read ahead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bytes per tier (None: no limit); `memory_available` is what the machine or a cgroup, as named, still grants.

    `nvme_paths` is for messages.
    """

    device: int | None
    host: int | None
    nvme: int | None
    memory_available: int
    memory_limited_by: str
    nvme_paths: tuple[str, ...] = ()

    def of(self, tier: Tier) -> int | None:
        return {Tier.DEVICE: self.device, Tier.HOST: self.host, Tier.NVME: self.nvme}[tier]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the user asked for: a tier per kind or "auto", buffers, and how units are acquired together.

    `roots` lists, for every root module, the units it leases at once; `held` the units leased during the whole forward.
    `staging` and `chunk` are bytes (of a plane of fp32 for `chunk`), or None for automatic. `rest_on_device`: whether
    automatic placement may use the device. `bounce`: host bytes that a swap store takes at most. `checksum`: whether it
    keeps checksums of everything on nvme in host memory. `division`: what this rank holds of divided planes; `wire`:
    the dtype in which gradients are reduced over ranks, None on a single one; `kept`: what stays of gathered weights
    between forward and backward, as `offload.parallel.kept.after_forward` has it. `taken_at_once`: steps take the
    gradients of a unit as soon as they are final, see [Note: gradients that never rest].
    """

    tiers: Mapping[str, str]
    roots: Sequence[Sequence[int]]
    held: Sequence[int]
    prefetch: int
    staging: int | None
    chunk: int | None
    aliases_host: bool
    device_is_host_memory: bool
    rest_on_device: bool
    bounce: int = 0
    checksum: bool = False
    division: Division = WHOLE
    wire: torch.dtype | None = None
    kept: bool | int = True
    taken_at_once: bool = False


@dataclass(slots=True, kw_only=True)
class FlatPlacement:
    """Tiers of the planes of one flat."""

    weight: Tier
    optimizer: Tier
    gradients: Tier


@dataclass(slots=True, kw_only=True)
class Plan:
    """Tiers per (unit, flat), buffer sizes, and planned bytes by tier and kind. `chunk` counts elements."""

    flats: dict[tuple[int, int], FlatPlacement]
    chunk: int
    slot_bytes: int
    staging: int
    planned: dict[str, dict[str, int]] = field(default_factory=lambda: {str(t): {} for t in Tier})

    def add(self, tier: Tier, kind: str, nbytes: int) -> None:
        if nbytes:
            self.planned[str(tier)][kind] = self.planned[str(tier)].get(kind, 0) + nbytes

    def total(self, tier: Tier) -> int:
        return sum(self.planned[str(tier)].values())


def plan_chunks(
    fmt: StateFormat,
    dtypes: Sequence[torch.dtype],
    accumulate: torch.dtype,
    staging: int | None,
    chunk: int | None,
    host: int | None,
    largest: int = MAX_CHUNK,
    in_files: int = 0,
) -> tuple[int, int, int]:
    """(elements of a chunk, bytes of a staging slot, bytes of all staging). `largest`: elements of the largest flat;
    `in_files`: elements whose states rest in swap files.

    Raises:
        PlanError: the staging budget cannot hold one chunk of the smallest legal size; the message names the minimum.
    """
    smallest = chunk_granule(fmt, dtypes)
    most = ceil_to(min(MAX_CHUNK, max(largest, 1)), smallest)

    def slot(elements: int) -> int:
        return staging_bytes_per_chunk(fmt, dtypes, accumulate, elements)

    # Automatic sizes: four chunks in flight, or more where reads ahead gain by it, within an eighth of the host budget,
    # so that small budgets keep room for planes.
    slots = min(AHEAD_SLOTS, -(-in_files // most)) if slot(most) >= AHEAD_FROM else 0
    ahead = min(AHEAD_BYTES, slots * slot(most))
    room = (
        staging
        if staging is not None
        else max(slot(smallest), min(max(MAX_STAGING_SLOTS * slot(most), ahead), (host or 1 << 62) // 8))
    )
    if slot(smallest) > room:
        raise PlanError(
            f"swap.staging = {format_bytes(room)} cannot hold one chunk of all planes: "
            f"at least {format_bytes(slot(smallest))} ({slot(smallest):,} bytes) are needed"
        )
    if chunk is not None:
        elements = max(smallest, chunk // 4 // smallest * smallest)
        if slot(elements) > room:
            raise PlanError(
                f"swap.chunk = {format_bytes(chunk)} needs {format_bytes(slot(elements))} of staging "
                f"for one chunk of all planes; swap.staging is {format_bytes(room)}: raise it or lower swap.chunk"
            )
    else:
        per_element = slot(smallest) / smallest
        elements = smallest
        for slots in range(MAX_STAGING_SLOTS, 0, -1):
            elements = min(most, int(room / slots / per_element) // smallest * smallest)
            if elements >= smallest:
                break
        elements = max(elements, smallest)
        while slot(elements) > room:
            elements -= smallest
    return elements, slot(elements), room // slot(elements) * slot(elements)


def bytes_of(
    fmt: StateFormat,
    flat: Flat,
    kind: str,
    accumulate: torch.dtype,
    division: Division = WHOLE,
    wire: torch.dtype | None = None,
) -> int:
    """Bytes of one kind of plane of a flat at rest, on the rank of `division`."""
    lo, hi = division.states(flat)
    if kind == "parameters":
        start, stop = division.weights(flat)
        return (stop - start) * flat.itemsize
    if not flat.trainable_end:
        return 0
    if kind == "optimizer":
        return sum(-(-spec.nbytes(hi - lo) // PAGE) * PAGE for spec in state_specs(fmt, flat))
    return _gradient_bytes(flat, accumulate, division, wire, 0, flat.trainable_end)


def _gradient_bytes(
    flat: Flat, accumulate: torch.dtype, division: Division, wire: torch.dtype | None, start: int, stop: int
) -> int:
    """Bytes of the gradients of the elements `[start, stop)`: what the step works on and, where a reduction comes at
    the end of the step, this rank's own before it.
    """
    if wire is None:
        return planned_bytes(flat.dtype, stop - start, accumulate)
    lo, hi = division.states(flat)
    reduced = planned_bytes(wire, max(0, min(hi, stop) - max(lo, start)), accumulate)
    own = planned_bytes(flat.dtype, stop - start, accumulate) if division.stage < 2 else 0
    return reduced + own


class _Rooms:
    """What is left on each tier, and of the memory that tiers share, while planes are placed one after another."""

    def __init__(self, limits: Limits, reserved: Mapping[Tier, int], device_is_host_memory: bool) -> None:
        self.left = {t: None if limits.of(t) is None else (limits.of(t) or 0) - reserved.get(t, 0) for t in Tier}
        self.in_memory = {Tier.HOST, Tier.DEVICE} if device_is_host_memory else {Tier.HOST}
        self.memory = limits.memory_available - sum(reserved.get(t, 0) for t in self.in_memory)

    def take(self, tier: Tier, nbytes: int) -> bool:
        left = self.left[tier]
        if (left is not None and nbytes > left) or (tier in self.in_memory and nbytes > self.memory):
            return False
        self.force(tier, nbytes)
        return True

    def force(self, tier: Tier, nbytes: int) -> None:
        left = self.left[tier]
        if left is not None:
            self.left[tier] = left - nbytes
        if tier in self.in_memory:
            self.memory -= nbytes


def make_plan(
    units: Sequence[UnitLayout], fmt: StateFormat, accumulate: torch.dtype, request: Request, limits: Limits
) -> Plan:
    """Places every plane and checks the result against all limits.

    Raises:
        PlanError: a tier's budget, the machine's memory or a cgroup cannot hold the plan; says by how much, for what,
        and which key to change.
    """
    dtypes = sorted({flat.dtype for unit in units for flat in unit.flats}, key=str) or [torch.float32]
    largest = max((flat.padded for unit in units for flat in unit.flats), default=0)
    # Where placement is automatic, room for states to rest in is worth more than room for early reads.
    in_files = sum(f.trainable_end for u in units for f in u.flats) if request.tiers["optimizer"] == "nvme" else 0
    chunk, slot_bytes, staging = plan_chunks(
        fmt, dtypes, accumulate, request.staging, request.chunk, limits.host, largest, in_files
    )
    persistent = sum(f.nbytes for u in units for f in u.flats if f.persistent)
    weights = sum(f.nbytes for u in units for f in u.flats)
    may_step_on_device = not request.aliases_host and request.tiers["optimizer"] != "host"
    in_step = STEP_SLOTS * slot_bytes if may_step_on_device and request.rest_on_device else 0
    everything_fits = request.rest_on_device and (limits.device is None or weights + in_step <= limits.device)
    wants_device = request.tiers["parameters"] == "device" or (
        request.tiers["parameters"] == "auto" and everything_fits
    )
    gathers = any(request.division.divides_weights(flat) for unit in units for flat in unit.flats)
    lease_room = 0 if wants_device and not gathers else _lease_bytes(units, request, None, request.prefetch)
    bounce = request.bounce if limits.nvme != 0 else 0
    shared = _shared_gradients(units, request, accumulate) if request.tiers["gradients"] in ("auto", "nvme") else 0
    # As if everything went to nvme: 0.15 % of it.
    sizes = {
        (u, f, kind): bytes_of(fmt, flat, kind, accumulate, request.division, request.wire)
        for u, unit in enumerate(units)
        for f, flat in enumerate(unit.flats)
        for kind in KINDS
    }
    checksums = _checksum_bytes(sum(sizes.values())) if request.checksum and limits.nvme != 0 else 0
    reduction = _reduction_bytes(units, request, accumulate)
    landing = _landing_bytes(units, request)
    on_host = staging + bounce + shared + checksums + reduction + landing
    on_device = persistent + lease_room + in_step
    kept = kept_bytes(units, request.division, request.kept)
    on_device, on_host = (on_device + kept, on_host) if wants_device else (on_device, on_host + kept)
    reserved = {Tier.DEVICE: on_device, Tier.HOST: on_host}
    rooms = _Rooms(limits, reserved, request.device_is_host_memory)
    plan = Plan(flats={}, chunk=chunk, slot_bytes=slot_bytes, staging=staging)
    chosen: dict[tuple[int, int, str], Tier] = {}
    # What the user fixed comes first: automatic placement gets the room that is left.
    for kind in sorted(KINDS, key=lambda kind: request.tiers[kind] == "auto"):
        for u, unit in enumerate(units):
            for f, flat in enumerate(unit.flats):
                chosen[u, f, kind] = _choose(flat, kind, sizes[u, f, kind], request, limits, rooms)
    for u, unit in enumerate(units):
        for f, flat in enumerate(unit.flats):
            tiers = [chosen[u, f, kind] for kind in KINDS]
            plan.flats[u, f] = FlatPlacement(weight=tiers[0], optimizer=tiers[1], gradients=tiers[2])
            for kind, tier in zip(KINDS, tiers, strict=True):
                _add_plane(plan, flat, kind, tier, sizes[u, f, kind], request, accumulate)
            if request.division.divides_weights(flat) and not isinstance(request.kept, bool):
                plan.add(Tier.DEVICE if tiers[0] is Tier.DEVICE else Tier.HOST, SECONDARY, flat.nbytes // request.kept)
    plan.add(Tier.HOST, "staging", staging)
    plan.add(Tier.HOST, REDUCTION, reduction)
    plan.add(Tier.HOST, GATHER, landing)
    if plan.total(Tier.NVME):
        plan.add(Tier.HOST, "bounce", request.bounce)
        if request.checksum:
            plan.add(Tier.HOST, "checksums", _checksum_bytes(plan.total(Tier.NVME)))
    plan.add(Tier.DEVICE, "leases", _lease_bytes(units, request, plan, 0))
    if not request.aliases_host and any(p.optimizer is Tier.DEVICE for p in plan.flats.values()):
        plan.add(Tier.DEVICE, "step", STEP_SLOTS * slot_bytes)
    if request.taken_at_once:
        _shed_gradients(plan, limits)
    _check(plan, request, limits, units)
    _add_prefetch(plan, units, request, limits)
    return plan


def extend_plan(
    plan: Plan,
    units: Sequence[UnitLayout],
    added: Sequence[tuple[int, int]],
    fmt: StateFormat,
    accumulate: torch.dtype,
    request: Request,
    limits: Limits,
) -> Plan:
    """`plan` with the flats `added` (unit, flat), which are in `units` already, placed where there is room for them.

    Raises:
        PlanError: as `make_plan`, or if a chunk of a new flat's planes does not fit a staging slot.
    """
    made = copy.deepcopy(plan)
    made.planned[str(Tier.DEVICE)].pop("leases", None)
    base = {tier: made.total(tier) for tier in Tier}
    base[Tier.DEVICE] += _lease_bytes(units, request, made, 0)
    rooms = _Rooms(limits, base, request.device_is_host_memory)
    for u, f in added:
        flat = units[u].flats[f]
        chunk_for(fmt, flat, accumulate, plan)
        tiers = []
        for kind in KINDS:
            nbytes = bytes_of(fmt, flat, kind, accumulate, request.division, request.wire)
            tiers.append(_choose(flat, kind, nbytes, request, limits, rooms))
            _add_plane(made, flat, kind, tiers[-1], nbytes, request, accumulate)
        made.flats[u, f] = FlatPlacement(weight=tiers[0], optimizer=tiers[1], gradients=tiers[2])
    if made.total(Tier.NVME) and not plan.total(Tier.NVME):
        made.add(Tier.HOST, "bounce", request.bounce)
    if request.checksum and made.total(Tier.NVME):
        made.planned[str(Tier.HOST)]["checksums"] = _checksum_bytes(made.total(Tier.NVME))
    stepping = not request.aliases_host and any(p.optimizer is Tier.DEVICE for p in made.flats.values())
    if stepping and "step" not in made.planned[str(Tier.DEVICE)]:
        made.add(Tier.DEVICE, "step", STEP_SLOTS * made.slot_bytes)
    made.add(Tier.DEVICE, "leases", _lease_bytes(units, request, made, 0))
    _check(made, request, limits, units)
    _add_prefetch(made, units, request, limits)
    return made


def chunk_for(fmt: StateFormat, flat: Flat, accumulate: torch.dtype, plan: Plan) -> int:
    """Elements of a chunk of a flat that was not there when the plan was made: the plan's, or fewer to fit a slot.

    Raises:
        PlanError: not even the smallest chunk fits.
    """
    smallest = chunk_granule(fmt, [flat.dtype])
    chunk = max(plan.chunk // smallest, 1) * smallest
    while chunk > smallest and staging_bytes_per_chunk(fmt, [flat.dtype], accumulate, chunk) > plan.slot_bytes:
        chunk -= smallest
    needed = staging_bytes_per_chunk(fmt, [flat.dtype], accumulate, chunk)
    if needed > plan.slot_bytes:
        raise PlanError(
            f"unit {flat.unit}: a chunk of its {flat.dtype} planes needs {format_bytes(needed)} of staging, but a slot "
            f"has {format_bytes(plan.slot_bytes)}: set swap.staging or swap.chunk for it before initialize"
        )
    return chunk


def gathering_bytes(
    units: Sequence[UnitLayout], flats: Mapping[tuple[int, int], FlatPlacement], accumulate: torch.dtype, count: int
) -> int:
    """Host bytes in which gradients for nvme are summed while their unit's `count` micro-batches of them arrive, if
    there is room. They are not planned: without room gradients are added through staging slots.

    Two units' worth are in use at once, and what is given up is kept for the next unit of the same size.
    """
    most: dict[int, int] = {}
    last: set[int] = set()
    for u, unit in enumerate(units):
        sizes: set[int] = set()
        for f, flat in enumerate(unit.flats):
            if flats[u, f].gradients is Tier.NVME and flat.shared_start:
                sizes.add(flat.shared_start * flat.dtype.itemsize)
                if count > 1:
                    sizes.add(flat.shared_start * accumulate.itemsize)
        for size in sizes:
            most[size] = max(most.get(size, 0), 2 if size in last else 1)
        last = sizes
    return sum(size * number for size, number in most.items())


def _checksum_bytes(nvme: int) -> int:
    return -(-nvme // PAGE) * BYTES_PER_PAGE


def _choose(flat: Flat, kind: str, nbytes: int, request: Request, limits: Limits, rooms: _Rooms) -> Tier:
    if kind == "parameters" and flat.persistent:
        return Tier.DEVICE
    wanted = request.tiers[kind]
    if wanted != "auto":
        rooms.force(Tier(wanted), nbytes)
        return Tier(wanted)
    for tier in Tier:
        if (tier is Tier.NVME and limits.nvme == 0) or (tier is Tier.DEVICE and not request.rest_on_device):
            continue
        if rooms.take(tier, nbytes):
            return tier
    # Nothing has room: name the last tier that exists, and let the check say by how much it is exceeded.
    fallback = Tier.HOST if limits.nvme == 0 else Tier.NVME
    rooms.force(fallback, nbytes)
    return fallback


def _add_plane(
    plan: Plan, flat: Flat, kind: str, tier: Tier, nbytes: int, request: Request, accumulate: torch.dtype
) -> None:
    if kind == "gradients" and tier is Tier.NVME and flat.trainable_end:
        on_host = _shared_bytes(flat, request, accumulate)
        plan.add(Tier.HOST, kind, on_host)
        nbytes -= on_host
    plan.add(tier, kind, nbytes)


def _shared_bytes(flat: Flat, request: Request, accumulate: torch.dtype) -> int:
    """Host bytes for the gradients of parameters smaller than a block, which do not go to nvme."""
    return _gradient_bytes(
        flat, accumulate, request.division, request.wire, flat.shared_start, max(flat.shared_start, flat.trainable_end)
    )


def _shared_gradients(units: Sequence[UnitLayout], request: Request, accumulate: torch.dtype) -> int:
    return sum(_shared_bytes(flat, request, accumulate) for unit in units for flat in unit.flats)


def _reduction_bytes(units: Sequence[UnitLayout], request: Request, accumulate: torch.dtype) -> int:
    """Host bytes of units whose gradients are being reduced over ranks: what is sent, what arrives, the sum in fp32."""
    if request.wire is None:
        return 0
    per_unit = []
    for unit in units:
        flats = [flat for flat in unit.flats if flat.trainable_end]
        sent = max(
            (2 * flat.padded * request.wire.itemsize + 4 * flat.padded // request.division.size for flat in flats),
            default=0,
        )
        own = sum(planned_bytes(f.dtype, f.trainable_end, accumulate) for f in flats)
        per_unit.append(sent + (own if request.division.stage >= 2 else 0))
    return sum(sorted(per_unit)[-2:])


def _landing_bytes(units: Sequence[UnitLayout], request: Request) -> int:
    """Host bytes of weights that other ranks send and that cannot arrive in place: the largest flat, one at a time."""
    at_hand = request.division.stage >= 3 or request.tiers["parameters"] in ("device", "host")
    if request.aliases_host and at_hand:
        return 0
    return max((f.nbytes for unit in units for f in unit.flats if request.division.divides(f)), default=0)


def _load_bytes(units: Sequence[UnitLayout], request: Request, plan: Plan | None, index: int) -> int:
    total = 0
    for f, flat in enumerate(units[index].flats):
        known = plan.flats.get((index, f)) if plan else None
        tier = known.weight if known else (Tier.DEVICE if flat.persistent else Tier.NVME)
        elsewhere = tier is Tier.NVME or (tier is Tier.HOST and not request.aliases_host)
        if elsewhere or request.division.divides_weights(flat):
            total += flat.nbytes
    return total


def _lease_bytes(units: Sequence[UnitLayout], request: Request, plan: Plan | None, prefetch: int) -> int:
    """Device bytes for the units that must be resident at once, and for `prefetch` further ones of the largest size."""
    held = sum(_load_bytes(units, request, plan, index) for index in request.held)
    apart = [{i for i in root if i not in request.held} for root in request.roots]
    together = max((sum(_load_bytes(units, request, plan, i) for i in root) for root in apart), default=0)
    each = [_load_bytes(units, request, plan, i) for i in range(len(units))]
    largest = max(each, default=0)
    if request.kept is False:  # all stay up to the end of the forward
        return max(held + together + prefetch * largest, sum(each))
    # The part of a unit that is kept may be on its way to the host when the next one is there.
    leaving = 0 if isinstance(request.kept, bool) or request.aliases_host else largest
    return held + together + prefetch * largest + leaving


def _shed_gradients(plan: Plan, limits: Limits) -> None:
    """[Note: gradients that never rest] An eager step takes the gradients of a unit while they are in memory, so the
    room for all of them on nvme is only for loops other than `train_batch`, and not worth refusing a model for: it is
    what the rest leaves. A loop that needs more meets a BudgetError.
    """
    kinds = plan.planned[str(Tier.NVME)]
    if limits.nvme is not None and "gradients" in kinds:
        over = max(0, plan.total(Tier.NVME) - limits.nvme)
        kinds["gradients"] -= min(over, kinds["gradients"])
        if not kinds["gradients"]:
            del kinds["gradients"]


def _add_prefetch(plan: Plan, units: Sequence[UnitLayout], request: Request, limits: Limits) -> None:
    """Room to load the next units while one computes, as far as the device budget and the memory have it; prefetching
    never insists.
    """
    extra = _lease_bytes(units, request, plan, request.prefetch) - _lease_bytes(units, request, plan, 0)
    room = extra if limits.device is None else max(0, limits.device - plan.total(Tier.DEVICE))
    if request.device_is_host_memory:
        room = min(room, max(0, limits.memory_available - plan.total(Tier.HOST) - plan.total(Tier.DEVICE)))
    plan.add(Tier.DEVICE, "leases", min(extra, room))


def _check(plan: Plan, request: Request, limits: Limits, units: Sequence[UnitLayout]) -> None:
    for tier in Tier:
        limit, total = limits.of(tier), plan.total(tier)
        if tier is Tier.NVME and limit == 0 and total and not limits.nvme_paths:
            raise PlanError(
                f"{_parts(plan, tier)} would rest on nvme, but there is no swap path: set memory.nvme_paths, "
                f"or choose another tier in [placement]"
            )
        if limit is not None and total > limit:
            raise PlanError(
                f"the plan exceeds memory.{tier} by {format_bytes(total - limit)}: it needs {format_bytes(total)} "
                f"({_parts(plan, tier)}) of {format_bytes(limit)}{_where(tier, limits)}; "
                f"{_remedy(tier, plan, limits, request, units)}"
            )
    in_memory = plan.total(Tier.HOST) + (plan.total(Tier.DEVICE) if request.device_is_host_memory else 0)
    if in_memory > limits.memory_available:
        parts = _parts(plan, Tier.HOST)
        if request.device_is_host_memory and plan.total(Tier.DEVICE):
            parts += f"; device: {_parts(plan, Tier.DEVICE)}"
        raise PlanError(
            f"the plan needs {format_bytes(in_memory)} of host memory ({parts}), "
            f"{format_bytes(in_memory - limits.memory_available)} more than {limits.memory_limited_by} has left "
            f"({format_bytes(limits.memory_available)}); {_remedy(Tier.HOST, plan, limits, request, units)}"
        )


def _where(tier: Tier, limits: Limits) -> str:
    return f" in {', '.join(limits.nvme_paths)}" if tier is Tier.NVME and limits.nvme_paths else ""


def _parts(plan: Plan, tier: Tier) -> str:
    return ", ".join(
        f"{kind} {format_bytes(n)}" for kind, n in sorted(plan.planned[str(tier)].items(), key=lambda i: -i[1])
    )


def _remedy(tier: Tier, plan: Plan, limits: Limits, request: Request, units: Sequence[UnitLayout]) -> str:
    if tier is Tier.DEVICE and request.kept is not True:
        return (
            "raise memory.device, or keep less between forward and backward: parallel.reshard_after_forward = true "
            "(nothing), or a larger number of ranks"
        )
    if tier is Tier.DEVICE and plan.planned[str(tier)].get("leases", 0) > (limits.device or 0):
        # What is in use at once does not fit by itself, wherever weights rest. Prefetching is not part of it yet.
        largest = max(units, key=lambda unit: unit.nbytes)
        return (
            "raise memory.device, or use smaller units (units.wrap): parameters elsewhere still compute there; the "
            f"largest unit, {largest.name}, holds {format_bytes(largest.nbytes)}"
        )
    return {
        Tier.DEVICE: "raise memory.device, place parameters on 'host' or 'nvme', or use smaller units (units.wrap)",
        Tier.HOST: "raise memory.host, or place optimizer, gradients or parameters on 'nvme' (with memory.nvme_paths)",
        Tier.NVME: "raise memory.nvme, add a path to memory.nvme_paths, or free disk space",
    }[tier]
