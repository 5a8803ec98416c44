"""Seconds, bytes and memory of a step: what `offload plan` prints and what a run is compared with.

A step is predicted from its parts: operations timed one by one, the optimizer's kernel timed on this machine, bytes on
measured bandwidths. Within a phase, units follow each other: while one computes, the next one's weights are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from offload.layout import UnitLayout
from offload.placement import Plan, gathering_bytes
from offload.planner.floors import PHASES, WINDOWS, Floor, Rates, Work, binding, disk_seconds, floor_of, side_by_side
from offload.planner.machine import OperationCosts
from offload.planner.shapes import StepShapes
from offload.planner.work import Course, read_ahead, step_work, update_work
from offload.tiers import Tier
from optimizer_cpu.formats import StateFormat

LOADED = 40 << 20
"""Bytes that the libraries take for a model of some size beyond one of none: compiled kernels, arenas of threads."""
HEAP_SLACK = 1.25
"""What the heap takes for a byte of its model: more is lost between blocks that live for different times."""
UNIT_SECONDS = 0.8e-3
"""Hooks, leases and views of one unit in one direction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """What was measured of this machine for this model. `kernel`: seconds an updated element takes."""

    rates: Rates
    costs: OperationCosts
    kernel: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Of one step, in seconds and bytes.

    `phases`: seconds of the windows of the schedule, named after their phases ("forward + optimizer"). `resources`:
    seconds in which each resource works. `peak_rss`: the largest resident memory of the process, from set-up to steps.
    """

    seconds: float
    phases: Mapping[str, float]
    resources: Mapping[str, float]
    binding: str
    floor: Floor
    disk_read: int
    disk_write: int
    workspace: int
    peak_rss: int

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        found = asdict(self)
        found["floor"] = {
            "seconds": self.floor.seconds,
            "binding": self.floor.binding,
            "windows": [
                {"phases": list(names), "resource": resource, "seconds": seconds}
                for names, resource, seconds in self.floor.windows
            ],
            "resources": dict(self.floor.resources),
        }
        found["achieved_over_floor"] = self.floor.seconds / self.seconds if self.seconds else 1.0
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Everything that a prediction depends on. `activations`: "keep", or what waits for backward, from which forward is
    repeated unit by unit: "recompute" on the device, else the tier that holds it.

    `base`: resident bytes of a process that has loaded everything and holds no model.
    """

    units: Sequence[UnitLayout]
    plan: Plan
    fmt: StateFormat
    accumulate: torch.dtype
    course: Course
    shapes: StepShapes
    activations: str
    base: int
    buffers: int = 0
    host_limit: int | None = None

    @property
    def recompute(self) -> bool:
        """Whether forward runs again in backward."""
        return self.activations != "keep"

    def bytes_in_use(self) -> dict[str, dict[str, int]]:
        """What a step takes of each tier by kind. The placement plan keeps room for sums of gradients in any case; one
        micro-batch needs none.
        """
        found = {tier: dict(kinds) for tier, kinds in self.plan.planned.items()}
        host = found[str(Tier.HOST)]
        self._leave_out_gathered(found[str(Tier.NVME)])
        leases = found[str(Tier.DEVICE)]
        if "leases" in leases:
            leases["leases"] = min(leases["leases"], self._leased())
        room = gathering_bytes(self.units, self.plan.flats, self.accumulate, self.course.micro_batches)
        if self.host_limit is not None:
            room = max(0, min(room, self.host_limit - sum(host.values())))
        if room:
            host["gradients"] = host.get("gradients", 0) + room
        if self.course.micro_batches > 1:
            return found
        for u, unit in enumerate(self.units):
            for f, flat in enumerate(unit.flats):
                if flat.dtype == self.accumulate or not flat.trainable_end:
                    continue
                tier = self.plan.flats[u, f].gradients
                large = flat.shared_start if tier is Tier.NVME else flat.trainable_end
                for place, count in ((tier, large), (Tier.HOST, flat.trainable_end - large)):
                    kinds = found[str(place)]
                    if count and "gradients" in kinds:
                        kinds["gradients"] = max(0, kinds["gradients"] - count * self.accumulate.itemsize)
        return found

    def _leave_out_gathered(self, nvme: dict[str, int]) -> None:
        """Takes out of `nvme` the sums and contributions that never get there."""
        for u, unit in enumerate(self.units):
            for f, flat in enumerate(unit.flats):
                if self.plan.flats[u, f].gradients is Tier.NVME and self.course.stays_in_memory(u):
                    one = self.course.micro_batches == 1 or flat.dtype == self.accumulate
                    width = flat.dtype.itemsize + (0 if one else self.accumulate.itemsize)
                    left = nvme.get("gradients", 0) - flat.shared_start * width
                    nvme["gradients"] = max(0, left)  # the placement plan may have left them out already

    def _leased(self) -> int:
        """Bytes of the weights that are on the device at once: of a unit, of the one before, which may be given up
        late, and of the next two, which are loaded meanwhile. The placement plan's room is the bound.
        """
        sizes = []
        for visit in self.course.visits:
            flats = [(u, f, flat) for u in visit for f, flat in enumerate(self.units[u].flats)]
            home = (Tier.DEVICE, Tier.HOST) if self.course.aliases_host else (Tier.DEVICE,)
            sizes.append(sum(flat.nbytes for u, f, flat in flats if self.plan.flats[u, f].weight not in home))
        return max((sum(sizes[max(0, i - 1) : i + 3]) for i in range(len(sizes))), default=0)

    def in_memory(self) -> int:
        """Bytes of the budgets that are host memory, with everything in use."""
        tiers = (Tier.HOST, Tier.DEVICE) if self.course.aliases_host else (Tier.HOST,)
        found = self.bytes_in_use()
        return sum(sum(found[str(tier)].values()) for tier in tiers)

    def peaks(self, workspace: int) -> dict[str, int]:
        """Resident bytes at most: in steps; at set-up, which holds one unit in fp32 beside the rest; and while a
        checkpoint is written, which passes one parameter's master and moments through memory between two steps.
        """
        held = self.in_memory() - self.bytes_in_use()[str(Tier.HOST)].get("gradients", 0)
        if self.course.aliases_host:
            held -= self.bytes_in_use()[str(Tier.DEVICE)].get("leases", 0)
        units = [sum(slot.numel * 4 for flat in unit.flats for slot in flat.slots) for unit in self.units]
        largest = max((slot.numel for unit in self.units for flat in unit.flats for slot in flat.slots), default=0)
        return {
            "step": workspace + self.in_memory(),
            "setup": self.base + self.buffers + held + max(units, default=0),
            "checkpoint": self.base + self.buffers + held + 3 * 4 * largest,
        }


def predict(setting: Setting, speeds: Speeds) -> Prediction:
    """Predicts one step of `setting` at `speeds`."""
    work, seconds = _work(setting, speeds)
    windows: dict[str, float] = {}
    busiest: dict[str, float] = {}
    for names in WINDOWS[setting.course.schedule]:
        together = sum((work[name] for name in names), Work())
        cpu = sum(seconds[name] for name in names)
        disk = disk_seconds(speeds.rates, together.disk_read, together.disk_write)
        link = max(together.to_device, together.from_device) / (speeds.rates.link or float("inf"))
        lead, tail = _lead(setting, speeds, names), cpu / max(1, len(setting.course.visits))
        computed, disk = side_by_side(speeds.rates, cpu, disk)
        # The first unit cannot compute before its bytes have come, and computes last what came last.
        ends = {"compute": lead + computed, "disk": disk and disk + tail, "link": link and link + tail}
        resource, longest = binding(ends)
        if resource == "compute" and "optimizer" in names and 2 * seconds["optimizer"] > cpu:
            resource = "memory"  # the cores mostly wait for it
        windows[" + ".join(names)] = longest
        busiest[resource] = busiest.get(resource, 0.0) + longest
    total = sum((work[name] for name in PHASES), Work())
    floor = floor_of(setting.course.schedule, work, speeds.rates)
    resources = {**floor.resources, "compute": sum(seconds.values())}
    workspace = _workspace(setting)
    return Prediction(
        seconds=sum(windows.values()),
        phases=windows,
        resources=resources,
        binding=binding(busiest)[0],
        floor=floor,
        disk_read=int(total.disk_read),
        disk_write=int(total.disk_write),
        workspace=workspace,
        peak_rss=max(setting.peaks(workspace)[name] for name in ("step", "setup")),
    )


def _work(setting: Setting, speeds: Speeds) -> tuple[dict[str, Work], dict[str, float]]:
    """Work of each phase, and the seconds that the processor spends on it."""
    course, count = setting.course, setting.course.micro_batches
    moved = step_work(setting.units, setting.plan, setting.fmt, setting.accumulate, course)
    forward = speeds.costs.total(setting.shapes.forward) * count
    backward = speeds.costs.total(setting.shapes.backward) * count + (forward if setting.recompute else 0.0)
    overhead = UNIT_SECONDS * len(course.visits) * count
    updated = sum(flat.trainable_end for unit in setting.units for flat in unit.flats)
    kernel = updated * speeds.kernel if speeds.rates.shared_cores else 0.0
    gradients = _gradient_bytes(setting) / speeds.rates.stream
    seconds = {"forward": forward + overhead, "backward": backward + overhead + gradients, "optimizer": kernel}
    if setting.activations == "nvme":
        boundaries = setting.shapes.boundaries * count
        moved["forward"] += Work(disk_write=boundaries)
        moved["backward"] += Work(disk_read=boundaries)
    work = {
        "forward": replace(moved["forward"], compute=forward),
        "backward": replace(moved["backward"], compute=backward),
        "optimizer": moved["optimizer"],
    }
    return work, seconds


def _gradient_bytes(setting: Setting) -> float:
    """Bytes of memory that collecting gradients touches: copied or added once each, and read for the norm."""
    count = setting.course.micro_batches
    total = 0.0
    for unit in setting.units:
        for flat in unit.flats:
            raw, wide = flat.dtype.itemsize, setting.accumulate.itemsize
            added = 0 if count == 1 else 3 * raw + wide + (count - 2) * (raw + 2 * wide)
            total += flat.trainable_end * (2 * raw + added + (raw if count == 1 else wide))
    return total


def _lead(setting: Setting, speeds: Speeds, names: Sequence[str]) -> float:
    """Seconds before the first unit of a window can compute: its own weights have to come first, and where updates run
    beside the forward its whole update has to be carried out.
    """
    first = 0.0
    visits = setting.course.visits
    if not visits:
        return 0.0
    at_hand = setting.course.turning == len(visits) - 1
    for name, visit in (("forward", visits[0]), ("backward", visits[-1])):
        if name not in names or (name == "backward" and at_hand):
            continue
        flats = [(u, f, flat) for u in visit for f, flat in enumerate(setting.units[u].flats)]
        on_disk = [flat for u, f, flat in flats if setting.plan.flats[u, f].weight is Tier.NVME]
        came = disk_seconds(speeds.rates, sum(flat.nbytes for flat in on_disk), 0)
        if name == "forward" and "optimizer" in names:
            plan, course = setting.plan, setting.course
            updates = (update_work(u, setting.units[u], plan, setting.fmt, setting.accumulate, course) for u in visit)
            update = sum(updates, Work())
            early = read_ahead(setting.units, plan, setting.fmt, setting.accumulate, course)
            read = update.disk_read - sum(early.get(u, 0) for u in visit)
            came = max(came, disk_seconds(speeds.rates, read, update.disk_write))
        first += came
    return first


def _workspace(setting: Setting) -> int:
    """Bytes of the process beyond the budgets: what is loaded, activations, autograd's temporaries, heap slack."""
    shapes, course = setting.shapes, setting.course
    heap = int(HEAP_SLACK * shapes.heap)
    held = course.micro_batches if course.layer_major else 1
    if setting.recompute:
        # Boundaries of all units, and one unit's own activations at a time.
        inner = shapes.kept // max(1, len(course.visits))
        boundaries = 0 if setting.activations == "nvme" else held * shapes.boundaries
        alive = boundaries + inner + (heap - shapes.kept)
    else:
        alive = (held - 1) * shapes.kept + heap
    return setting.base + LOADED + setting.buffers + alive
