"""Pure arithmetic from (names, shapes, dtypes, world size) to offsets in flat buffers.

The unit of everything is a block of 4,096 elements. A parameter of a block or more starts on a block boundary. Smaller
ones share blocks: each starts at a multiple of 64 elements and never crosses a block boundary. A unit has one flat
buffer per (dtype, persistent) pair, padded to world x block elements, so that every shard, chunk and extent is a whole
number of blocks and, for items of 1, 2, 4 or 8 bytes, of 4 KiB pages. Hence no placement, chunk size or world size
changes which elements are grouped together, and a result cannot depend on them.

Within a flat the trainable parameters come first: large, then small, then (from a block boundary) the frozen ones.
Optimizer states and gradients exist for the range `[0, trainable_end)` only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from operator import mul

import torch

BLOCK = 4096
ALIGN = 64


def ceil_to(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


@lru_cache(maxsize=4096)
def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of `shape`, in elements."""
    strides, stride = [], 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(strides))


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSpec:
    """What the layout needs to know of one parameter; `dtype` is the dtype in which the weight rests and computes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    persistent: bool = False

    @property
    def numel(self) -> int:
        return reduce(mul, self.shape, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """The place of one parameter in a flat buffer, or of the part of it that a rank owns; `offset` and `numel` count
    elements. `start` is where the part begins within the parameter, `large` whether the whole parameter fills a block.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    numel: int
    trainable: bool
    start: int = 0
    large: bool = False

    @property
    def end(self) -> int:
        return self.offset + self.numel

    @property
    def small(self) -> bool:
        """Smaller than a block, and so possibly sharing one."""
        return not self.large

    def within(self, lo: int, hi: int) -> Slot | None:
        """The part of it in the flat's elements `[lo, hi)`; None if there is none. An empty parameter is everywhere."""
        if self.numel == 0 or (lo <= self.offset and self.end <= hi):
            return self
        begin, end = max(lo, self.offset), min(hi, self.end)
        if begin >= end:
            return None
        start = self.start + begin - self.offset
        return replace(self, shape=(end - begin,), offset=begin, numel=end - begin, start=start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flat:
    """One flat buffer of a unit. All sizes count elements of `dtype`.

    `shared_start` is where the trainable parameters smaller than a block begin; `trainable_end` is the end, rounded up
    to a block, of what has optimizer state.
    """

    unit: str
    dtype: torch.dtype
    persistent: bool
    slots: tuple[Slot, ...]
    shared_start: int
    trainable_end: int
    padded: int

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.padded * self.itemsize

    def shard(self, rank: int, world: int) -> tuple[int, int]:
        """The element range `[lo, hi)` that `rank` owns: whole blocks, equal for all ranks, possibly all padding.

        Raises:
            ValueError: the flat was laid out for another world size, or `rank` is outside it.
        """
        if not 0 <= rank < world or self.padded % (world * BLOCK):
            raise ValueError(f"unit {self.unit}: no shard {rank} of {world} in a flat of {self.padded} elements")
        size = self.padded // world
        return rank * size, (rank + 1) * size

    def within(self, lo: int, hi: int) -> Flat:
        """The flat with the parts of its parameters that lie in `[lo, hi)`, in the same coordinates."""
        if (lo, hi) == (0, self.padded):
            return self
        parts = (slot.within(lo, hi) for slot in self.slots)
        return replace(self, slots=tuple(part for part in parts if part is not None))

    def chunks(self, size: int, lo: int, hi: int) -> Iterator[tuple[int, int]]:
        """`[lo, hi)` in consecutive ranges of at most `size` elements (a multiple of a block)."""
        for start in range(lo, hi, size):
            yield start, min(start + size, hi)


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Which elements of a flat's planes a rank holds: ZeRO's stages (Rajbhandari et al., 2020) as ranges.

    `rank` of `size` ranks that divide the planes among them: optimizer states from stage 1 on, gradients (once they are
    reduced) with them, weights in stage 3. Persistent flats are whole on every rank. Ranges count elements.
    """

    stage: int = 0
    rank: int = 0
    size: int = 1

    def divides(self, flat: Flat) -> bool:
        """Whether optimizer states and reduced gradients of the flat are divided."""
        return self.size > 1 and self.stage >= 1 and not flat.persistent

    def divides_weights(self, flat: Flat) -> bool:
        return self.stage >= 3 and self.divides(flat)

    def owned(self, flat: Flat, rank: int | None = None) -> tuple[int, int]:
        """What a rank (by default this one) updates and, in stage 3, keeps."""
        if not self.divides(flat):
            return 0, flat.padded
        return flat.shard(self.rank if rank is None else rank, self.size)

    def weights(self, flat: Flat) -> tuple[int, int]:
        """What this rank keeps of the weight plane."""
        return self.owned(flat) if self.divides_weights(flat) else (0, flat.padded)

    def states(self, flat: Flat) -> tuple[int, int]:
        """What this rank keeps of optimizer states and of reduced gradients; may be empty."""
        lo, hi = self.owned(flat)
        return min(lo, flat.trainable_end), min(hi, flat.trainable_end)


WHOLE = Division()


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitLayout:
    """The flats of one unit, persistent ones last."""

    name: str
    flats: tuple[Flat, ...]

    @property
    def nbytes(self) -> int:
        return sum(flat.nbytes for flat in self.flats)


def _place(specs: Iterable[ParameterSpec], start: int, slots: list[Slot]) -> tuple[int, int]:
    """Appends slots for large, then small parameters; returns (where small ones begin, the end rounded to a block)."""
    specs = list(specs)
    cursor = start
    for spec in specs:
        if spec.numel >= BLOCK:
            slots.append(_slot(spec, cursor))
            cursor = ceil_to(cursor + spec.numel, BLOCK)
    shared_start = cursor
    for spec in specs:
        if spec.numel >= BLOCK:
            continue
        if cursor % BLOCK + spec.numel > BLOCK:
            cursor = ceil_to(cursor, BLOCK)
        slots.append(_slot(spec, cursor))
        cursor += ceil_to(spec.numel, ALIGN)
    return shared_start, ceil_to(cursor, BLOCK)


def _slot(spec: ParameterSpec, offset: int) -> Slot:
    return Slot(
        name=spec.name,
        shape=spec.shape,
        offset=offset,
        numel=spec.numel,
        trainable=spec.trainable,
        large=spec.numel >= BLOCK,
    )


def layout_unit(name: str, specs: Iterable[ParameterSpec], world: int = 1) -> UnitLayout:
    """Lays out the parameters of one unit, each in registration order within its class.

    Raises:
        ValueError: `world` is below one, or two parameters share a name.
    """
    if world < 1:
        raise ValueError(f"unit {name}: world size {world} must be at least 1")
    groups: dict[tuple[torch.dtype, bool], list[ParameterSpec]] = {}
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen:
            raise ValueError(f"unit {name}: parameter {spec.name} is listed twice")
        seen.add(spec.name)
        groups.setdefault((spec.dtype, spec.persistent), []).append(spec)
    flats = []
    for (dtype, persistent), members in sorted(groups.items(), key=lambda item: item[0][1]):
        slots: list[Slot] = []
        shared_start, trainable_end = _place((s for s in members if s.trainable), 0, slots)
        _, end = _place((s for s in members if not s.trainable), trainable_end, slots)
        flats.append(
            Flat(
                unit=name,
                dtype=dtype,
                persistent=persistent,
                slots=tuple(slots),
                shared_start=shared_start,
                trainable_end=trainable_end,
                padded=ceil_to(max(end, 1), world * BLOCK),  # even one that holds only empty parameters has an address
            )
        )
    return UnitLayout(name=name, flats=tuple(flats))
