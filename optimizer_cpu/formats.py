"""State formats: which planes hold a shard's optimizer state, and how many bytes they take.

A format is data: names, dtypes and element granularity of its planes. Callers allocate, move and store planes by these
specifications and hand them by name to `optimizer_cpu.kernels`, so a new format needs no change in them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

LOW_PRECISION = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneSpec:
    """One plane of a shard.

    `dtype` is what a buffer of the plane is viewed as. `group` is the number of consecutive shard elements that one
    entry of the plane serves: 1 for element-wise planes, more for scales shared by a group.
    """

    name: str
    dtype: torch.dtype
    group: int = 1

    def numel(self, elements: int) -> int:
        """Entries of the plane for a shard of `elements` elements; the last group may be partial."""
        return -(-elements // self.group)

    def nbytes(self, elements: int) -> int:
        """Bytes of the plane for a shard of `elements` elements."""
        return self.numel(elements) * self.dtype.itemsize

    def slice_of(self, start: int, stop: int) -> slice:
        """Entries of the plane that serve shard elements [start, stop); `start` must be a multiple of `group`."""
        if start % self.group:
            raise ValueError(f"range start {start} of plane {self.name!r} must be a multiple of its group {self.group}")
        return slice(start // self.group, self.numel(stop))


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFormat:
    """A named encoding of (weight, master, exp_avg, exp_avg_sq).

    `weight_dtypes`: dtypes the weight plane may have. `range_multiple`: ranges given to kernels start at multiples of
    this many elements. `plane_rule(weight_dtype)` lists the planes, `weight` first.
    """

    name: str
    weight_dtypes: tuple[torch.dtype, ...]
    range_multiple: int
    plane_rule: Callable[[torch.dtype], tuple[PlaneSpec, ...]]

    def planes(self, weight_dtype: torch.dtype) -> tuple[PlaneSpec, ...]:
        """Planes for a weight plane of `weight_dtype`; ValueError if the format cannot hold such weights."""
        if weight_dtype not in self.weight_dtypes:
            allowed = ", ".join(str(d).removeprefix("torch.") for d in self.weight_dtypes)
            raise ValueError(
                f"state format {self.name!r} cannot hold {str(weight_dtype).removeprefix('torch.')} weights "
                f"(it holds: {allowed}); choose another state_format"
            )
        return self.plane_rule(weight_dtype)

    def state_planes(self, weight_dtype: torch.dtype) -> tuple[PlaneSpec, ...]:
        """The planes that only the optimizer reads: all but `weight`."""
        return self.planes(weight_dtype)[1:]

    def nbytes(self, weight_dtype: torch.dtype, elements: int) -> int:
        """Bytes of all planes of a shard of `elements` elements."""
        return sum(plane.nbytes(elements) for plane in self.planes(weight_dtype))

    def bytes_per_parameter(self, weight_dtype: torch.dtype) -> float:
        """Asymptotic bytes per element over all planes."""
        return sum(plane.dtype.itemsize / plane.group for plane in self.planes(weight_dtype))


def _fp32_planes(weight_dtype: torch.dtype) -> tuple[PlaneSpec, ...]:
    weight = PlaneSpec(name="weight", dtype=weight_dtype)
    moments = (PlaneSpec(name="exp_avg", dtype=torch.float32), PlaneSpec(name="exp_avg_sq", dtype=torch.float32))
    if weight_dtype == torch.float32:
        return (weight, *moments)  # the weight plane is the master
    return (weight, PlaneSpec(name="master", dtype=torch.float32), *moments)


FP32 = StateFormat(
    name="fp32",
    weight_dtypes=(torch.float32, *LOW_PRECISION),
    range_multiple=1,
    plane_rule=_fp32_planes,
)

GROUP = 32
"""Elements that share the scales of `compact`; blocks and parameter alignment are multiples of it."""


def _split_planes(weight_dtype: torch.dtype) -> tuple[PlaneSpec, ...]:
    return (
        PlaneSpec(name="weight", dtype=weight_dtype),
        PlaneSpec(name="remainder", dtype=torch.int16),
        PlaneSpec(name="exp_avg", dtype=torch.float32),
        PlaneSpec(name="exp_avg_sq", dtype=torch.float32),
    )


def _compact_planes(weight_dtype: torch.dtype) -> tuple[PlaneSpec, ...]:
    return (
        PlaneSpec(name="weight", dtype=weight_dtype),
        PlaneSpec(name="remainder", dtype=torch.int8),
        PlaneSpec(name="exp_avg", dtype=torch.int8),
        PlaneSpec(name="exp_avg_sq", dtype=torch.uint8),
        PlaneSpec(name="exp_avg_scale", dtype=torch.bfloat16, group=GROUP),
        PlaneSpec(name="exp_avg_sq_scale", dtype=torch.bfloat16, group=GROUP),
    )


SPLIT = StateFormat(name="split", weight_dtypes=(torch.bfloat16,), range_multiple=1, plane_rule=_split_planes)
COMPACT = StateFormat(name="compact", weight_dtypes=(torch.bfloat16,), range_multiple=GROUP, plane_rule=_compact_planes)

_FORMATS: dict[str, StateFormat] = {fmt.name: fmt for fmt in (FP32, SPLIT, COMPACT)}


def format_names() -> tuple[str, ...]:
    """Names of the known state formats."""
    return tuple(_FORMATS)


def get_format(name: str) -> StateFormat:
    """The state format called `name`; ValueError listing the known ones otherwise."""
    try:
        return _FORMATS[name]
    except KeyError:
        raise ValueError(f"unknown state_format {name!r}; known: {', '.join(_FORMATS)}") from None
