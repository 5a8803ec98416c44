"""Bytes that a step moves, from where every plane rests. Pure arithmetic over a plan.

Weights that rest where they cannot be computed on are brought for every visit of a unit: in forward and in backward,
once for each micro-batch, or once a step if micro-batches run layer by layer; the last one of a forward stays for the
backward. The first visit after an update that runs beside it (`deferred`, `eager`) gets the new weights from that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from offload.layout import Flat, UnitLayout
from offload.placement import Plan
from offload.planner.floors import Work
from offload.state import state_specs
from offload.tiers import Tier
from optimizer_cpu.formats import PlaneSpec, StateFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """How a step runs. `visits`: for every root that a forward calls, the units that it leases. `last`: those of the
    root that a forward leaves last (by default, of the last visit), which stay for the backward.
    """

    schedule: str
    layer_major: bool
    micro_batches: int
    visits: Sequence[Sequence[int]]
    aliases_host: bool
    last: Sequence[int] = ()

    @property
    def turning(self) -> int:
        """Which visit a forward leaves last: its units are on the device when the backward begins."""
        last = list(self.last or self.visits[-1]) if self.visits else []
        return max((i for i, visit in enumerate(self.visits) if list(visit) == last), default=-1)

    def stays_in_memory(self, unit: int) -> bool:
        """Whether gradients of `unit` that are placed on nvme never go there.

        They are gathered in host memory and written when another unit's turn comes: not where an update takes them at
        once, and not those of the unit whose turn is last.
        """
        if self.micro_batches > 1 and not self.layer_major:
            return False
        return self.schedule == "eager" or (bool(self.visits) and unit == self.visits[0][0])

    @property
    def passes(self) -> int:
        """Visits of a unit in a step, each way."""
        return 1 if self.layer_major else self.micro_batches


def step_work(
    units: Sequence[UnitLayout], plan: Plan, fmt: StateFormat, accumulate: torch.dtype, course: Course
) -> dict[str, Work]:
    """The bytes of each phase; `compute` is left at zero."""
    forward = backward = optimizer = Work()
    updated: set[int] = set()
    for position, visit in enumerate(course.visits):
        back = 0 if position == course.turning else course.passes
        for u in visit:
            for f, flat in enumerate(units[u].flats):
                work = _load(flat, plan.flats[u, f].weight, course)
                given = 0.0 if u in updated else _handed_on(flat, course)
                forward += work.scaled(course.passes - given)
                backward += work.scaled(back)
            updated.add(u)
    for u, unit in enumerate(units):
        for f, flat in enumerate(unit.flats):
            if not flat.trainable_end:
                continue
            backward += _gradient_work(flat, _parked(plan, u, f, course), accumulate, course)
        optimizer += update_work(u, unit, plan, fmt, accumulate, course)
    early = Work(disk_read=sum(read_ahead(units, plan, fmt, accumulate, course).values()))
    backward, optimizer = backward + early, optimizer + early.scaled(-1)
    return {"forward": forward, "backward": backward, "optimizer": optimizer}


def update_work(
    index: int, unit: UnitLayout, plan: Plan, fmt: StateFormat, accumulate: torch.dtype, course: Course
) -> Work:
    """The bytes of one unit's update."""
    work = Work()
    for f, flat in enumerate(unit.flats):
        if flat.trainable_end:
            places, parked = plan.flats[index, f], _parked(plan, index, f, course)
            work += _update_work(flat, fmt, places.weight, places.optimizer, parked, accumulate, course)
    return work


def read_ahead(
    units: Sequence[UnitLayout], plan: Plan, fmt: StateFormat, accumulate: torch.dtype, course: Course
) -> dict[int, int]:
    """The bytes of each unit's update that are read while backward runs: the chunks of the first units, as many as
    there are staging slots but two.
    """
    found: dict[int, int] = {}
    left = plan.staging // plan.slot_bytes - 2 if plan.slot_bytes else 0
    if course.schedule == "eager":
        return found
    for u, unit in enumerate(units):
        for f, flat in enumerate(unit.flats):
            places = plan.flats[u, f]
            if left <= 0 or not flat.trainable_end or places.optimizer is not Tier.NVME:
                continue
            parked = _parked(plan, u, f, course)
            moved = _update_work(flat, fmt, places.weight, places.optimizer, parked, accumulate, course)
            *_, final = _gradient_sizes(flat, accumulate, course)
            gradients = _large(flat, parked) * final if parked is Tier.NVME else 0
            # A chunk is as large as its slot has room for what passes through it, in either direction.
            passing = max(moved.disk_read, moved.disk_write + gradients)
            chunks = min(left, -(-int(passing) // plan.slot_bytes))
            left -= chunks
            part = min(1.0, chunks * plan.slot_bytes / passing)
            found[u] = found.get(u, 0) + int(part * (moved.disk_read - gradients))
    return found


def _parked(plan: Plan, index: int, f: int, course: Course) -> Tier:
    """Where an update finds gradients."""
    tier = plan.flats[index, f].gradients
    return Tier.HOST if tier is Tier.NVME and course.stays_in_memory(index) else tier


def _load(flat: Flat, tier: Tier, course: Course) -> Work:
    if tier is Tier.NVME:
        return Work(disk_read=flat.nbytes, to_device=0 if course.aliases_host else flat.nbytes)
    if tier is Tier.HOST and not course.aliases_host:
        return Work(to_device=flat.nbytes)
    return Work()


def _handed_on(flat: Flat, course: Course) -> float:
    """The part of the first load after an update that the update saves."""
    if course.schedule == "barrier":
        return 0.0
    return flat.trainable_end / flat.padded if flat.padded else 0.0


def _gradient_sizes(flat: Flat, accumulate: torch.dtype, course: Course) -> tuple[int, int, int]:
    """(raw, sum, what the optimizer reads), in bytes of one element."""
    raw = flat.dtype.itemsize
    total = raw if flat.dtype == accumulate else accumulate.itemsize
    return raw, total, raw if course.micro_batches == 1 else total


def _large(flat: Flat, tier: Tier) -> int:
    """Elements whose gradients rest on `tier`: small parameters' stay on the host."""
    return flat.shared_start if tier is Tier.NVME else flat.trainable_end


def _gradient_work(flat: Flat, tier: Tier, accumulate: torch.dtype, course: Course) -> Work:
    raw, total, final = _gradient_sizes(flat, accumulate, course)
    count = _large(flat, tier)
    out = 0 if course.aliases_host or tier is Tier.DEVICE else flat.trainable_end * raw * course.micro_batches
    if tier is not Tier.NVME:
        return Work(from_device=out)
    if course.layer_major or course.micro_batches == 1:
        return Work(disk_write=count * final, from_device=out)
    # Each contribution after the first reads what is held and writes the sum.
    read = raw + (course.micro_batches - 2) * total
    return Work(disk_read=count * read, disk_write=count * (raw + (course.micro_batches - 1) * total), from_device=out)


def _update_work(
    flat: Flat, fmt: StateFormat, weight: Tier, state: Tier, gradient: Tier, accumulate: torch.dtype, course: Course
) -> Work:
    count = flat.trainable_end
    specs = state_specs(fmt, flat)
    states = sum(spec.nbytes(count) for spec in specs)
    weights = PlaneSpec(name="weight", dtype=flat.dtype).nbytes(count)
    weight_read = 0 if any(spec.name == "master" for spec in specs) else weights
    *_, final = _gradient_sizes(flat, accumulate, course)
    gradients = _large(flat, gradient) * final if gradient is Tier.NVME else 0
    on_device = state is Tier.DEVICE and not course.aliases_host
    work = Work(
        disk_read=(states if state is Tier.NVME else 0) + (weight_read if weight is Tier.NVME else 0) + gradients,
        disk_write=(states if state is Tier.NVME else 0) + (weights if weight is Tier.NVME else 0),
        kernel=0 if on_device else 2 * states + weights + weight_read + count * final,
    )
    if course.aliases_host:
        return work
    crossing = weight is Tier.DEVICE
    if not on_device and crossing:
        work += Work(to_device=weights, from_device=weight_read)
    return work
