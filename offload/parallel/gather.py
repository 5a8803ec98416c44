"""Weights that other ranks hold: gathered into a unit's buffer for each use (stage 3), or after each update into the
plane that every rank keeps (stages 1 and 2).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from offload.layout import Flat
from offload.parallel.channel import Channel
from offload.parallel.collectives import Collectives
from offload.parallel.ranks import Ranks
from offload.planes import Completion, Plane
from offload.residency import ResidentFlat, Unit
from offload.state import FlatState
from offload.tiers import Tier, TierMemory
from swap.devices import Event

CATEGORY = "parameters"


class Gathering:
    """All gathers of one engine, in the order of its calls, which is the same on all ranks."""

    def __init__(self, memory: TierMemory, ranks: Ranks, channel: Channel) -> None:
        self._memory, self._ranks, self._channel = memory, ranks, channel

    def for_use(self, unit: Unit, flat: ResidentFlat) -> Completion:
        """Fills what other ranks hold of the unit's buffer, once this rank's own part is there."""
        assert flat.buffer is not None
        buffer, own = flat.buffer, flat.completion
        allocated = None if self._memory.device.aliases_host else self._memory.device.record()
        job = partial(self._fill, flat.flat, buffer, flat.plane, allocated)
        before = None if own is None else own.wait
        return self._channel.submit(f"gather the weights of {unit.name}", job, before=before)

    def _fill(
        self, flat: Flat, buffer: Tensor, plane: Plane, allocated: Event | None, collectives: Collectives
    ) -> None:
        if self._memory.device.aliases_host or self._ranks.on_device:
            if allocated is not None:
                allocated.wait()
            collectives.all_gather_(buffer, "shard", CATEGORY)
            return
        lo, hi = plane.base, plane.end
        landed = self._memory.host(flat.padded, flat.dtype, "communication", f"weights of {flat.unit}")
        after = () if allocated is None else (allocated,)
        self._memory.copy_out(landed[lo:hi], buffer[lo:hi], after=after).wait()
        collectives.all_gather_(landed, "shard", CATEGORY)
        for start, stop in ((0, lo), (hi, flat.padded)):
            if start < stop:
                self._memory.copy_in(buffer[start:stop], landed[start:stop], after=after).wait()

    def replicate(self, name: str, state: FlatState) -> None:
        """Has the weight plane, of which this rank updates its part, filled with the parts of the others.

        `state.replicating` is what readers of the plane wait for.
        """
        job = partial(self._exchange, state)
        state.replicating = self._channel.submit(f"exchange new weights of {name}", job, before=_at_rest(state))

    def _exchange(self, state: FlatState, collectives: Collectives) -> None:
        flat, plane, memory = state.flat, state.weight, self._memory
        lo, hi = state.division.owned(flat)
        direct = plane.tensor is not None and (plane.on_host or self._ranks.on_device)
        if direct:
            assert plane.tensor is not None
            collectives.all_gather_(plane.tensor, "shard", CATEGORY)
            return
        landed = memory.host(flat.padded, flat.dtype, "communication", f"new weights of {flat.unit}")
        _by_chunks(plane.read, landed, lo, hi, state.chunk)
        collectives.all_gather_(landed, "shard", CATEGORY)
        _by_chunks(plane.write, landed, 0, lo, state.chunk)
        _by_chunks(plane.write, landed, hi, flat.padded, state.chunk)


def _at_rest(state: FlatState) -> Callable[[], None]:
    """Waits until this rank's part is updated, and written where it goes to the disk."""

    def wait() -> None:
        state.wait_update()
        if state.weight.tier is Tier.NVME:
            state.wait_written()

    return wait


def _by_chunks(move: Callable[[int, int, Tensor], None], memory: Tensor, lo: int, hi: int, chunk: int) -> None:
    with torch.inference_mode(False):
        for start in range(lo, hi, chunk):
            stop = min(start + chunk, hi)
            move(start, stop, memory[start:stop])
