"""What is kept of gathered weights between a unit's forward and its backward: nothing, all of them, or a larger shard.

With a shard of 1/m (ZeRO++'s secondary partition, Wang et al., 2023; FSDP2's `reshard_after_forward=m`), each of m
neighbours keeps the m-th part of every unit that its forward has gathered, and the backward gathers among these m.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from offload.layout import Division, Flat, UnitLayout
from offload.planes import Completion

SECONDARY = "secondary"
"""The group of ranks, and the kind of memory."""
GATHER, REDUCTION = "gather", "reduction"
"""Kinds of memory: weights and gradients on their way between ranks."""


def after_forward(wanted: bool | int, shard_size: int) -> bool | int:
    """`parallel.reshard_after_forward` for `shard_size` ranks that divide weights: True, False, or a divisor between.

    Raises:
        ValueError: a number that does not divide them.
    """
    if isinstance(wanted, bool):
        return wanted
    if shard_size % wanted:
        divisors = ", ".join(str(n) for n in range(1, shard_size + 1) if shard_size % n == 0)
        raise ValueError(
            f"parallel.reshard_after_forward = {wanted}: must be true, false or a divisor of the number of ranks that "
            f"divide weights, which is {shard_size} ({divisors})"
        )
    if wanted == 1:
        return False
    return True if wanted == shard_size else wanted


class Copying:
    """A copy from a buffer that may go when it has ended."""

    def __init__(self, copied: Completion, source: Tensor) -> None:
        self._copied: Completion | None = copied
        self._source: Tensor | None = source

    def wait(self, timeout: float | None = None) -> None:
        """Idempotent."""
        copied = self._copied
        if copied is not None:
            copied.wait(timeout)
        self._copied = self._source = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeptShard:
    """The elements `[lo, hi)` of a flat's weights as they were at `version`, once `copying` has ended."""

    tensor: Tensor
    lo: int
    hi: int
    version: int
    copying: Copying | None = None


def shard_of(flat: Flat, rank: int, size: int) -> tuple[int, int]:
    """The elements that the `rank`-th of `size` neighbours keeps."""
    return flat.shard(rank % size, size)


def kept_bytes(units: Sequence[UnitLayout], division: Division, kept: bool | int) -> int:
    """Bytes of the shards of all units at the end of a forward."""
    if isinstance(kept, bool):
        return 0
    return sum(f.nbytes // kept for unit in units for f in unit.flats if division.divides_weights(f))


def check_limit(limit: int, units: Sequence[UnitLayout], division: Division) -> None:
    """Refuses a limit that no gather of the largest unit fits.

    Raises:
        ValueError: names that unit.
    """
    gathered = [(f.nbytes, unit.name) for unit in units for f in unit.flats if division.divides_weights(f)]
    most, name = max(gathered, default=(0, ""))
    if most > limit:
        raise ValueError(
            f"parallel.limit_gathers = {limit}: unit {name} gathers {most} bytes at once; must be at least that, or "
            "'auto' (or use smaller units: units.wrap)"
        )
