"""What a step must cost at least on given bandwidths, phase by phase. Pure arithmetic.

A phase can be no faster than the busiest of its resources:

    t >= max(FLOPs / F + kernel bytes / D, H2D / P, D2H / P, disk)
    disk = max(r / R, w / W) + delta * min(r / R, w / W)

The optimizer's kernel streams through the cores that compute where the device is the CPU, so the two add up there; on
another device they are two resources. What moves between host and disk passes the memory bus beside them; it is far
below D and left out, which can only lower the floor.

Phases of a schedule that run beside each other share resources, so their work is added before the maximum is taken:
`barrier` f + b + o, `deferred` b + (f with o), `eager` f + (b with o), where o of `eager` and of `deferred` reads no
weight twice (an update hands its new weights on).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

PHASES = ("forward", "backward", "optimizer")
WINDOWS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "barrier": (("forward",), ("backward",), ("optimizer",)),
    "deferred": (("backward",), ("forward", "optimizer")),
    "eager": (("forward",), ("backward", "optimizer")),
}
"""What of a step runs side by side, window after window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Bandwidths in bytes per second. `mixing`: delta of the disk, 0 duplex, 1 half-duplex, more if mixing hurts.

    `compute_beside`, `disk_beside`: times as long that each takes while the other works. Floors leave these out: they
    are what resources could do.
    """

    stream: float
    disk_read: float = 0.0
    disk_write: float = 0.0
    mixing: float = 1.0
    link: float = 0.0
    """Between host and a device with memory of its own, each way."""
    shared_cores: bool = True
    """Whether the optimizer's kernel runs on the cores that compute."""
    compute_beside: float = 1.0
    disk_beside: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a phase asks of each resource. `compute` is in seconds, all else in bytes."""

    compute: float = 0.0
    kernel: float = 0.0
    disk_read: float = 0.0
    disk_write: float = 0.0
    to_device: float = 0.0
    from_device: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def scaled(self, factor: float) -> Work:
        """A part of the work, or a multiple."""
        return Work(**{f.name: getattr(self, f.name) * factor for f in fields(self)})


def disk_seconds(rates: Rates, read: float, write: float) -> float:
    """Seconds for `read` and `write` bytes, mixed; infinite where there is no disk to speak of."""
    if not read and not write:
        return 0.0
    if not rates.disk_read or not rates.disk_write:
        return float("inf")
    times = (read / rates.disk_read, write / rates.disk_write)
    # Where mixing is worse than taking turns, turns are what a floor assumes.
    return max(times) + min(1.0, rates.mixing) * min(times)


def side_by_side(rates: Rates, compute: float, disk: float) -> tuple[float, float]:
    """Seconds after which computing and the disk's work, begun together, are done: slowed as long as both run."""
    both = min(compute * rates.compute_beside, disk * rates.disk_beside)
    return compute + both * (1 - 1 / rates.compute_beside), disk + both * (1 - 1 / rates.disk_beside)


def resource_seconds(rates: Rates, work: Work) -> dict[str, float]:
    """Seconds that the work takes on each resource by itself."""
    kernel = work.kernel / rates.stream if work.kernel else 0.0
    link = rates.link or float("inf")
    found = {
        "compute": work.compute + (kernel if rates.shared_cores else 0.0),
        "memory": kernel,
        "disk": disk_seconds(rates, work.disk_read, work.disk_write),
        "host to device": work.to_device / link,
        "device to host": work.from_device / link,
    }
    return found


def binding(seconds: Mapping[str, float]) -> tuple[str, float]:
    """The busiest resource and its seconds."""
    return max(seconds.items(), key=lambda item: item[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """`seconds` in all; for each window its phases, its busiest resource and that resource's seconds; `resources`:
    seconds of each resource over the whole step.
    """

    seconds: float
    windows: tuple[tuple[tuple[str, ...], str, float], ...]
    resources: Mapping[str, float]

    @property
    def binding(self) -> str:
        """The resource that sets the most seconds of the floor."""
        shares: dict[str, float] = {}
        for _, resource, seconds in self.windows:
            shares[resource] = shares.get(resource, 0.0) + seconds
        return binding(shares)[0]


def floor_of(schedule: str, phases: Mapping[str, Work], rates: Rates) -> Floor:
    """The floor of `schedule` for the work of each phase."""
    windows = []
    for names in WINDOWS[schedule]:
        work = sum((phases[name] for name in names), Work())
        resource, seconds = binding(resource_seconds(rates, work))
        windows.append((names, resource, seconds))
    total = sum((phases[name] for name in PHASES), Work())
    return Floor(
        seconds=sum(seconds for _, _, seconds in windows),
        windows=tuple(windows),
        resources=resource_seconds(rates, total),
    )
