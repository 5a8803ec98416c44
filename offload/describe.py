"""The placement table: what rests where, and what the run takes from each tier."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offload.layout import UnitLayout
from offload.placement import bytes_of, gathering_bytes
from offload.prefetch import MOST
from offload.schedule.choice import Schedule
from offload.tiers import Tier, TierMemory
from swap.geometry import format_bytes

if TYPE_CHECKING:
    from offload.build import Blueprint


def placement_table(blueprint: Blueprint, memory: TierMemory, schedule: Schedule, order: str) -> str:
    """Units of equal size and placement share a row; below it planned bytes and limits per tier, buffers, and the I/O
    engine.
    """
    rows: list[tuple[str, ...]] = [("units", "count", "parameters", "weights", "optimizer", "gradients")]
    groups: list[tuple[tuple[str, ...], list[str]]] = []
    for index, unit in enumerate(blueprint.layouts):
        if not unit.flats:
            continue
        cells = (f"{sum(s.numel for f in unit.flats for s in f.slots):,}", *_tiers(blueprint, index, unit))
        if groups and groups[-1][0] == cells:
            groups[-1][1].append(unit.name)
        else:
            groups.append((cells, [unit.name]))
    for cells, names in groups:
        label = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1].rsplit('.', 1)[-1]}"
        rows.append((label, str(len(names)), *cells))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]
    for tier in Tier:
        kinds = blueprint.plan.planned[str(tier)]
        if kinds:
            limit = memory.budget.limit(str(tier))
            parts = ", ".join(f"{kind} {format_bytes(n)}" for kind, n in kinds.items())
            of = "" if limit is None else f" of {format_bytes(limit)}"
            lines.append(f"{tier!s:7} {format_bytes(sum(kinds.values()))}{of}: {parts}")
            if tier is Tier.HOST:
                lines[-1] += _gathering(blueprint, memory)
    plan = blueprint.plan
    wanted = blueprint.config.schedule.prefetch_units
    depth = f"by time, at most {MOST} units" if wanted == "auto" else f"{wanted} unit{'s' if wanted != 1 else ''}"
    lines.append(
        f"staging {plan.staging // plan.slot_bytes} x {format_bytes(plan.slot_bytes)} "
        f"({plan.chunk:,} elements a chunk), "
        f"prefetch {depth}"
    )
    lines.append(f"optimizer step: {schedule.name} ({schedule.reason})")
    activations = blueprint.config.placement.activations
    lines.append(f"micro-batches of a step: {order}, activations: {activations}")
    if memory.store is not None:
        direct = (
            "direct"
            if all(memory.store.direct)
            else "buffered"
            if not any(memory.store.direct)
            else "direct on some paths"
        )
        lines.append(f"swap {memory.store.engine}, {direct} I/O, requests of {format_bytes(memory.store.block)}")
    return "\n".join(lines)


def _gathering(blueprint: Blueprint, memory: TierMemory) -> str:
    """What gradients on their way to nvme take beyond the plan."""
    count = blueprint.config.train.micro_batches
    nbytes = gathering_bytes(blueprint.layouts, blueprint.plan.flats, blueprint.accumulate, count)
    limit = memory.budget.limit(str(Tier.HOST))
    if limit is not None:
        nbytes = min(nbytes, limit - blueprint.plan.total(Tier.HOST))
    return f"; in backward up to {format_bytes(nbytes)} more for gradients on their way" if nbytes > 0 else ""


def _tiers(blueprint: Blueprint, index: int, unit: UnitLayout) -> tuple[str, ...]:
    cells = []
    for kind in ("parameters", "optimizer", "gradients"):
        places: dict[str, int] = {}
        for f, flat in enumerate(unit.flats):
            placement = blueprint.plan.flats[index, f]
            tier = {"parameters": placement.weight, "optimizer": placement.optimizer, "gradients": placement.gradients}[
                kind
            ]
            nbytes = bytes_of(blueprint.fmt, flat, kind, blueprint.accumulate, blueprint.division, blueprint.wire)
            if nbytes:
                places[str(tier)] = places.get(str(tier), 0) + nbytes
        cells.append(" + ".join(f"{tier} {format_bytes(n)}" for tier, n in places.items()) or "-")
    return tuple(cells)
