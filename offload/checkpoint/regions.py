"""What a rank saves, as regions of its file: a chunk of a flat with all planes that a checkpoint needs of it.

A region is a whole number of pages and lies in the file in one piece, so that regions can be written in any order; its
pieces are ranges of single parameters, so that nothing in the file depends on flats, shards or tiers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.checkpoint.format import stored_planes
from offload.layout import BLOCK, Flat, Slot, ceil_to
from offload.planes import Plane, granule
from offload.state import FlatState
from offload.tiers import Tier
from optimizer_cpu.formats import PlaneSpec
from swap.geometry import PAGE, align_up
from swap.tickets import Ticket

CHUNK = 1 << 20
"""Elements of a region at most: a multiple of the granule of every plane."""
SMALLEST_CHUNK = 1 << 17
PAD = "pad"

Key = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One piece: elements `[offset, offset + length)` of a plane of `slot`, at byte `at` of its region."""

    slot: Slot
    spec: PlaneSpec
    offset: int
    length: int
    at: int

    @property
    def nbytes(self) -> int:
        return self.spec.nbytes(self.length)

    @property
    def key(self) -> str:
        """Its name in the file."""
        return f"{self.spec.name}/{self.offset}/{self.slot.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Elements `[lo, hi)` of flat `key`, at byte `start` of the data; `used` bytes and a pad to whole pages."""

    key: Key
    lo: int
    hi: int
    parts: tuple[Part, ...]
    start: int
    used: int

    @property
    def nbytes(self) -> int:
        return align_up(self.used, PAGE)


def encoding_of(state: FlatState, slot: Slot) -> str | None:
    """How a checkpoint holds a parameter: the state format, or None for a frozen one."""
    return state.fmt.name if slot.trainable and state.planes else None


def plane_of(state: FlatState, name: str) -> Plane:
    """The plane that holds what a checkpoint calls `name`."""
    if name == "weight" or (name == "master" and "master" not in state.planes):
        return state.weight
    return state.planes[name]


def shard_range(flat: Flat, rank: int, world: int) -> tuple[int, int]:
    """The elements that `rank` of `world` owns, whatever world the flat was padded for: the same blocks as
    `Flat.shard`, less what is beyond the flat's own end.
    """
    return _part(0, flat.padded, rank, world)


def saved_range(state: FlatState, rank: int, world: int) -> tuple[int, int]:
    """The elements of a flat that `rank` of `world` writes: of what a shard group divides each replica a part of the
    rank's shard, of what is whole on every rank a part of everything.
    """
    division = state.division
    if not division.divides(state.flat):
        return shard_range(state.flat, rank, world)
    replica, shard = divmod(rank, division.size)
    lo, hi = division.owned(state.flat, shard)
    return _part(lo, hi, replica, world // division.size)


def _part(lo: int, hi: int, index: int, count: int) -> tuple[int, int]:
    size = ceil_to(hi - lo, count * BLOCK) // count
    return min(lo + index * size, hi), min(lo + (index + 1) * size, hi)


def make_regions(states: Mapping[Key, FlatState], rank: int, world: int, chunk: int = CHUNK) -> list[Region]:
    """The regions of a rank's file, in file order."""
    regions: list[Region] = []
    start = 0
    for key in sorted(states):
        state = states[key]
        lo, hi = saved_range(state, rank, world)
        for first in range(lo, hi, chunk):
            region = _region(state, key, first, min(hi, first + chunk), start)
            if region is not None:
                regions.append(region)
                start += region.nbytes
    return regions


def _region(state: FlatState, key: Key, lo: int, hi: int, start: int) -> Region | None:
    wanted: list[tuple[PlaneSpec, Slot, int, int]] = []
    for slot in state.flat.slots:
        begin, end = max(lo, slot.offset), min(hi, slot.end)
        if begin < end:
            for spec in stored_planes(encoding_of(state, slot), state.flat.dtype):
                wanted.append((spec, slot, begin - slot.offset, end - begin))
    if not wanted:
        return None
    order = {spec.name: i for i, (spec, *_) in enumerate(wanted)}
    # Wide items first, so that every piece is aligned for its dtype; planes together, so that a plane is one copy.
    wanted.sort(key=lambda item: (-item[0].dtype.itemsize, order[item[0].name]))
    parts, at = [], 0
    for spec, slot, offset, length in wanted:
        parts.append(Part(slot=slot, spec=spec, offset=offset, length=length, at=at))
        at += spec.nbytes(length)
    return Region(key=key, lo=lo, hi=hi, parts=tuple(parts), start=start, used=at)


def scratch_bytes(chunk: int) -> int:
    """Bytes in which one plane of a region is read, at bounds widened to granules."""
    return (chunk + 2 * SMALLEST_CHUNK) * 8


def fill(state: FlatState, region: Region, out: Tensor, scratch: Tensor) -> None:
    """Copies the bytes of a region to `out` (uint8, page-aligned, `region.nbytes`); reads of swap files go through
    `scratch`.
    """
    by_plane: dict[str, list[Part]] = {}
    for part in region.parts:
        by_plane.setdefault(part.spec.name, []).append(part)
    tickets: list[Ticket] = []
    for name, parts in by_plane.items():
        plane = plane_of(state, name)
        ticket = _directly(plane, parts, out)
        if ticket is not None:
            tickets.append(ticket)
        else:
            lo = min(p.slot.offset + p.offset for p in parts)
            hi = max(p.slot.offset + p.offset + p.length for p in parts)
            begin, data = _bring(plane, lo, hi, scratch)
            for part in parts:
                position = part.slot.offset + part.offset - begin
                source = data[plane.spec.slice_of(position, position + part.length)]
                out[part.at : part.at + part.nbytes].copy_(source.view(torch.uint8))
    out[region.used :].zero_()
    for ticket in tickets:
        ticket.wait()


def _directly(plane: Plane, parts: list[Part], out: Tensor) -> Ticket | None:
    """Starts to read a plane of a swap file straight to its place, if it is one piece between page bounds."""
    if plane.tier is not Tier.NVME or len(parts) != 1:
        return None
    part = parts[0]
    lo = part.slot.offset + part.offset
    hi = lo + part.length
    step = granule([plane.spec])
    if (lo - plane.base) % step or ((hi - plane.base) % step and hi != plane.end) or part.at % PAGE:
        return None
    return plane.submit_read(lo, hi, out[part.at : part.at + part.nbytes].view(plane.spec.dtype))


def _bring(plane: Plane, lo: int, hi: int, scratch: Tensor) -> tuple[int, Tensor]:
    """(first element, entries from it on) of a plane, in place or in `scratch`."""
    if plane.on_host:
        step = max(1, plane.spec.group)
        begin = lo // step * step
        return begin, plane.view(begin, hi)
    # Pages of a swap file are counted from where the plane begins.
    step, base = granule([plane.spec]), plane.base
    begin, end = base + (lo - base) // step * step, min(base + ceil_to(hi - base, step), plane.end)
    data = scratch[: plane.nbytes(begin, end)].view(plane.spec.dtype)
    plane.read(begin, end, data)
    return begin, data


def tensors_of(regions: list[Region]) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
    """Name, dtype and shape of every tensor of the file, in order; pads fill regions up to whole pages."""
    for number, region in enumerate(regions):
        for part in region.parts:
            yield part.key, part.spec.dtype, (part.spec.numel(part.length),)
        pad = region.nbytes - region.used
        if pad:
            yield f"{PAD}/{number}", torch.uint8, (pad,)
