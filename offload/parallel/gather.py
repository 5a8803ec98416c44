"""Weights that other ranks hold: gathered into a unit's buffer for each use (stage 3), or after each update into the
plane that every rank keeps (stages 1 and 2). Where a unit is used again in its backward, what `kept` says stays until
then, and fewer ranks take part in the second gather, or none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from offload.layout import Flat
from offload.parallel.channel import Channel
from offload.parallel.collectives import Collectives
from offload.parallel.flight import InFlight
from offload.parallel.kept import GATHER, SECONDARY, Copying, KeptShard, shard_of
from offload.parallel.ranks import Ranks
from offload.parallel.stalls import GATHERS
from offload.planes import Completion, Plane
from offload.residency import ResidentFlat, Unit
from offload.state import FlatState
from offload.tiers import Tier, TierMemory
from swap.devices import Event

CATEGORY = "parameters"
AGAIN = "parameters_again"
"""Gathers among the neighbours that keep a unit's weights from forward to backward."""


class Gathering:
    """All gathers of one engine, in the order of its calls, which is the same on all ranks.

    `kept`: False (all of a unit's weights, from forward to backward), True (nothing), or the number of neighbours among
    which they stay divided. `limit`: bytes that may be on their way at a time.
    """

    def __init__(
        self, memory: TierMemory, ranks: Ranks, channel: Channel, *, kept: bool | int = True, limit: int = 1 << 62
    ) -> None:
        self._memory, self._ranks, self._channel = memory, ranks, channel
        self.kept = kept
        self.in_flight = InFlight(limit)
        self._copying: Copying | None = None

    @property
    def keeps_whole(self) -> bool:
        return self.kept is False

    @property
    def keeps_shards(self) -> bool:
        return not isinstance(self.kept, bool)

    def fits(self, unit: Unit) -> bool:
        """Whether the unit's gathers may begin without waiting for others."""
        return self.in_flight.fits(sum(flat.flat.nbytes for flat in unit.flats if flat.divided))

    def for_use(self, unit: Unit, flat: ResidentFlat) -> Completion:
        """Fills what other ranks hold of the unit's buffer, once this rank's own part is there."""
        assert flat.buffer is not None
        buffer, own, kept = flat.buffer, flat.completion, flat.kept
        self.in_flight.make_room(buffer.nbytes)
        allocated = None if self._memory.device.aliases_host else self._memory.device.record()
        what = f"{GATHERS}{unit.name}"
        if kept is None:
            job = partial(self._fill, flat.flat, buffer, flat.plane, allocated)
            before = None if own is None else own.wait
            pending = self._channel.submit(what, job, before=before, group="shard")
        else:
            job = partial(self._fill_again, flat.flat, buffer, kept, allocated)
            before = None if kept.copying is None else kept.copying.wait
            pending = self._channel.submit(f"{what} again", job, before=before, group=SECONDARY)
        return self.in_flight.begin(pending, buffer.nbytes)

    def _fill(
        self, flat: Flat, buffer: Tensor, plane: Plane, allocated: Event | None, collectives: Collectives
    ) -> None:
        if self._memory.device.aliases_host or self._ranks.on_device:
            if allocated is not None:
                allocated.wait()
            collectives.all_gather_(buffer, "shard", CATEGORY)
            return
        lo, hi = plane.base, plane.end
        landed = self._memory.host(flat.padded, flat.dtype, GATHER, f"weights of {flat.unit}")
        after = () if allocated is None else (allocated,)
        self._memory.copy_out(landed[lo:hi], buffer[lo:hi], after=after).wait()
        collectives.all_gather_(landed, "shard", CATEGORY)
        for start, stop in ((0, lo), (hi, flat.padded)):
            if start < stop:
                self._memory.copy_in(buffer[start:stop], landed[start:stop], after=after).wait()

    # Between forward and backward

    def keep_shard(self, flat: ResidentFlat, version: int) -> KeptShard:
        """A forward is over, and the unit's buffer about to go: begins to copy the part that this rank keeps. At most
        one buffer waits for that.
        """
        buffer, memory = flat.buffer, self._memory
        assert buffer is not None and not isinstance(self.kept, bool)
        lo, hi = shard_of(flat.flat, self._ranks.shard_rank, self.kept)
        near = flat.plane.tier is Tier.DEVICE
        with torch.inference_mode(False):
            make = memory.on_device if near else memory.host
            kept = make(hi - lo, buffer.dtype, SECONDARY, f"kept weights of {flat.flat.unit}")
            copying = None
            if near or memory.device.aliases_host:
                kept.copy_(buffer[lo:hi])
            else:
                if self._copying is not None:
                    self._copying.wait()
                copied = memory.copy_out(kept, buffer[lo:hi], after=(memory.device.record(),))
                copying = self._copying = Copying(copied, buffer)
        return KeptShard(tensor=kept, lo=lo, hi=hi, version=version, copying=copying)

    def _fill_again(
        self, flat: Flat, buffer: Tensor, kept: KeptShard, allocated: Event | None, collectives: Collectives
    ) -> None:
        memory, lo, hi = self._memory, kept.lo, kept.hi
        after = () if allocated is None else (allocated,)
        if memory.device.aliases_host or self._ranks.on_device:
            if allocated is not None:
                allocated.wait()
            if kept.tensor.device == buffer.device:
                buffer[lo:hi].copy_(kept.tensor)
            else:
                memory.copy_in(buffer[lo:hi], kept.tensor, after=after).wait()
            collectives.all_gather_(buffer, SECONDARY, AGAIN)
            return
        landed = memory.host(flat.padded, flat.dtype, GATHER, f"weights of {flat.unit}")
        if kept.tensor.device == landed.device:
            landed[lo:hi].copy_(kept.tensor)
        else:
            memory.copy_out(landed[lo:hi], kept.tensor, after=after).wait()
        collectives.all_gather_(landed, SECONDARY, AGAIN)
        memory.copy_in(buffer, landed, after=after).wait()

    def replicate(self, name: str, state: FlatState) -> None:
        """Has the weight plane, of which this rank updates its part, filled with the parts of the others.

        `state.replicating` is what readers of the plane wait for.
        """
        job = partial(self._exchange, state)
        what = f"exchange new weights of {name}"
        state.replicating = self._channel.submit(what, job, before=_at_rest(state), group="shard")

    def _exchange(self, state: FlatState, collectives: Collectives) -> None:
        flat, plane, memory = state.flat, state.weight, self._memory
        lo, hi = state.division.owned(flat)
        direct = plane.tensor is not None and (plane.on_host or self._ranks.on_device)
        if direct:
            assert plane.tensor is not None
            collectives.all_gather_(plane.tensor, "shard", CATEGORY)
            return
        landed = memory.host(flat.padded, flat.dtype, GATHER, f"new weights of {flat.unit}")
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
