"""Gradients summed over ranks, unit by unit: each rank gets the sum of the part that it updates.

[Note: windows] In a window every trainable unit is reduced exactly once, in one order on all ranks, whether or not this
rank has gradients for it: ranks may have different unused parameters. In stages 0 and 1 there is one window a step, at
its end. In stages 2 and 3 there is one for every backward outside `no_sync`: a unit is reduced when the gradients of
a unit that comes later in that order begin to arrive, the rest when the backward ends. Gradients that come for a unit
that is reduced already (it is used in a place that the order does not know of, or both within and outside of reentrant
checkpointing) are reduced once more at the end, and from then on the order is the one in which rank 0 saw the last
gradients of units.

[Note: numbers] What is sent is the sum of this rank's own contributions, rounded to the wire dtype. The sum over ranks
is taken in fp32 in rank order, divided by the number of ranks, and rounded to the wire dtype in all stages alike. With
replicas of shards (hybrid) there are two such sums, the second one once a step; also of what no rank divides, such as
persistent parameters, so that which these are changes no bits.

[Note: same step] Operations are named after the step that they belong to, so that gradients of different steps are
never added: a rank that has had no backward since the last step takes part in a window at its end even so, and one
that had more of them than others, where each is a window, is found out. With a window go the values of the last step,
such as learning rates, and sums of what the program has written to weights, states and gradients since the last window:
ranks that update with different ones would drift apart without a sign, or lose what one has written to the part of
another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from offload.errors import GradientError
from offload.layout import Division, Flat
from offload.parallel.alike import check_alike
from offload.parallel.channel import Channel, Pending
from offload.parallel.collectives import Collectives
from offload.parallel.kept import REDUCTION
from offload.parallel.ranks import Ranks
from offload.parameters import ParameterRecord
from offload.planes import SlotQueue
from offload.state import FlatState
from offload.tiers import Tier, TierMemory
from swap.checksums import crc32

AT_ONCE = 2
"""Units whose gradients may be on their way to other ranks when those of a further one begin to arrive."""
CATEGORY = "gradients"


class Reduction:
    """All reductions of one engine. `units`: the states of each unit's flats, by unit index, in the order of reduction;
    `names`: of units, for messages; `scattered`: units that a model uses in several places, so that their gradients say
    nothing about those of others.
    """

    def __init__(
        self,
        memory: TierMemory,
        ranks: Ranks,
        channel: Channel,
        units: Mapping[int, Sequence[FlatState]],
        names: Mapping[int, str],
        *,
        division: Division,
        wire: torch.dtype,
        scattered: Collection[int] = (),
    ) -> None:
        self._memory, self._ranks, self._channel = memory, ranks, channel
        self._units, self._names, self._division, self._wire = units, names, division, wire
        self._scattered = frozenset(scattered)
        self._order: list[int] = []
        self._place: dict[int, int] = {}
        self._use_order(list(units))
        self._next = 0
        self._late: set[int] = set()
        self._seen: dict[int, None] = {}  # units in the order of the last gradients of this window
        self._better: list[int] | None = None
        self._queue = SlotQueue(memory)
        self._under_way: deque[tuple[int, Pending[None]]] = deque()
        self._present: dict[int, set[str]] = {}
        self._unsent = False
        self._windows = 0  # of this step that have ended
        self._apart: set[int] = set()  # units that are reduced, but not yet over replicas
        self._closed = False  # whether reductions of a window that has ended may be under way
        self.syncing = True
        """Whether a backward that runs now ends with a window, see [Note: windows]."""
        self.holding = False
        """Whether the backwards that run belong to one window, which ends with the last of them."""
        self.early = division.stage >= 2
        """Whether units are reduced during backward."""
        self.settle_local: Callable[[], None] = lambda: None
        """Waits until this rank's own gradients are where they rest: a reduction reads them from another thread."""
        self.step: Callable[[], int] = lambda: 0
        """Steps so far."""
        self.last_step: Mapping[str, object] = {}
        """What the last step was made with, the same on all ranks; by name."""
        self.written: dict[str, int] = {}
        """CRC-32 of what the program has written, by what it is; the same on all ranks."""
        self.on_reduced: Callable[[int], None] | None = None
        """Called with the index of a unit whose gradients are final, in order."""

    def _use_order(self, order: list[int]) -> None:
        self._order = order
        self._place = {index: place for place, index in enumerate(order)}

    # During backward

    def before_arrival(self) -> None:
        """A gradient is about to be added to the local ones, where those of an earlier window must be gone."""
        if self._closed:
            self._wait_for_all()

    def _wait_for_all(self) -> None:
        while self._under_way:
            self._under_way.popleft()[1].wait()
        self._closed = False

    def arrived(self, index: int, name: str) -> None:
        """A gradient of parameter `name` of unit `index` has been added to the local ones.

        Raises:
            GradientError: the unit has been reduced in this window, and updated.
        """
        self._seen.pop(index, None)
        self._seen[index] = None
        if not (self.syncing and self.early):
            return
        if self._place[index] < self._next:
            if self.on_reduced is not None:
                raise GradientError(
                    f"{name}: a gradient arrived after its unit was reduced over ranks and updated during backward; "
                    "set schedule.optimizer_step = 'deferred'"
                )
            self._late.add(index)
            return
        if index not in self._scattered:
            self._send_until(self._place[index])
        while len(self._under_way) > AT_ONCE:
            self._wait_for_one()

    def backward_ended(self) -> None:
        """The outermost backward of a pass over the model is over."""
        if self.holding:
            return
        if self.syncing and self.early:
            self._close_window()
        else:
            self._unsent = True

    # At the end of the step

    def finish(self, *, on_all_ranks: bool = False) -> None:
        """Reduces what is not reduced yet and waits for all of it. `on_all_ranks`: other ranks come here too, and may
        have gradients where this one has none.
        """
        if self._unsent or self._next or (on_all_ranks and not self._windows):
            self._close_window()
            self._unsent = False
        while self._under_way:
            self._wait_for_one()
        self._closed = False
        if self._better is not None:
            better, self._better = self._better, None
            self._use_order(better)

    def across_replicas(self) -> None:
        """The second sum of hybrid sharding, over the groups that hold the same shards, of what was reduced since the
        last one.
        """
        if not self._two_sums:
            return
        for index in self._order:
            states = self._units[index]
            if index in self._apart and self._present.get(index):
                job = partial(self._sum_replicas, index, states)
                what = f"sum the gradients of {self._names[index]} over replicas in step {self.step()}"
                self._under_way.append((index, self._channel.submit(what, job, group="replicate")))
        self._wait_for_all()
        self._apart.clear()

    def held(self) -> bool:
        """Whether this rank has gradients, its own or reduced ones."""
        self._wait_for_all()
        local = (state.local for states in self._units.values() for state in states if state.local is not None)
        return bool(self.present()) or any(gradients.names() for gradients in local)

    @property
    def _two_sums(self) -> bool:
        division = self._division
        return division.stage > 0 and division.size > 1 and self._ranks.replicate_size > 1

    def present(self) -> set[str]:
        """Parameters for which any rank has had a gradient, of those that are reduced."""
        return {name for names in self._present.values() for name in names}

    def present_in(self, index: int) -> set[str]:
        """The same, of one unit."""
        return self._present.get(index, set())

    def note(self, index: int, name: str, *, present: bool) -> None:
        """A reduced gradient was set, or forgotten, on all ranks."""
        names = self._present.setdefault(index, set())
        names.add(name) if present else names.discard(name)

    def put(self, record: ParameterRecord, state: FlatState, value: Tensor) -> None:
        """Makes `value` (the parameter's shape, on the device) its reduced gradient, as far as it rests here."""
        assert state.gradients is not None
        part = state.gradients.part(record.name)
        if part is not None:
            own = value.reshape(-1)[part.start : part.start + part.numel]
            if state.gradients.tier is not Tier.DEVICE:
                own = own.cpu()
            state.gradients.replace(record.name, own, self._queue)
            state.gradients.rest(self._queue)
            self._queue.drain()
        self.note(record.unit, record.name, present=True)

    def note_written(self, what: str, value: Tensor | None) -> None:
        """The program has given `what` the value, a CPU tensor or None, on all ranks."""
        data = (
            b"" if value is None or not value.numel() else value.contiguous().reshape(-1).view(torch.uint8).numpy().data
        )
        self.written[what] = crc32(data, self.written.get(what, 1))

    def forget(self) -> None:
        """All gradients are dropped: what is under way is waited for."""
        self._wait_for_all()
        self._next, self._unsent, self._late, self._seen = 0, False, set(), {}
        self._windows = 0
        self._apart.clear()
        self._present.clear()

    def forget_unit(self, index: int) -> None:
        """The gradients of one unit have been used."""
        self._present.pop(index, None)

    # One unit

    def _close_window(self) -> None:
        self.settle_local()
        self._send_until(len(self._order))
        late, seen = sorted(self._late), list(self._seen)
        written, self.written = self.written, {}
        job = partial(self._reduce_late, late, seen, dict(self.last_step), written)
        pending = self._channel.submit(f"reduce late gradients in step {self.step()}", job)
        self._under_way.append((-1, pending))
        self._windows += 1
        self._closed = True
        self._next, self._late, self._seen = 0, set(), {}

    def _reduce_late(
        self,
        late: list[int],
        seen: list[int],
        last: Mapping[str, object],
        written: Mapping[str, int],
        collectives: Collectives,
    ) -> None:
        everybody = collectives.all_gather_objects((late, seen, last, written), "world")
        check_alike([of_rank[2] for of_rank in everybody], "the last step was made with different values")
        check_alike([of_rank[3] for of_rank in everybody], "ranks have not written the same (by CRC-32) to")
        again = sorted({index for of_rank in everybody for index in of_rank[0]})
        for index in again:
            self._reduce(index, collectives)
        if again:
            first = [index for index in everybody[0][1] if index in self._units]
            self._better = [*first, *(index for index in self._units if index not in first)]

    def _send_until(self, place: int) -> None:
        if self._next < place:
            self.settle_local()
        while self._next < place:
            index = self._order[self._next]
            self._next += 1
            job = partial(self._reduce, index)
            what = f"reduce the gradients of {self._names[index]} in step {self.step()}"
            pending = self._channel.submit(what, job)
            self._under_way.append((index, pending))

    def _wait_for_one(self) -> None:
        index, pending = self._under_way.popleft()
        pending.wait()
        if self.on_reduced is not None and index >= 0:
            self.on_reduced(index)

    def _reduce(self, index: int, collectives: Collectives) -> None:
        """On the channel's thread: sums the gradients of a unit and stores this rank's part."""
        states = [state for state in self._units[index] if state.local is not None]
        own = [state.local.names() for state in states if state.local is not None]
        held = collectives.all_gather_objects(own, "world")
        for place, state in enumerate(states):
            names = {name for of_rank in held for name in of_rank[place]}
            if names:
                self._reduce_flat(state, names, collectives)
                self._apart.add(index)
                self._present.setdefault(index, set()).update(names)

    def _reduce_flat(self, state: FlatState, names: set[str], collectives: Collectives) -> None:
        assert state.local is not None and state.gradients is not None
        flat, division = state.flat, state.division
        device = self._ranks.on_device
        send = self._buffer(flat)
        state.local.fill(send, self._queue)
        state.local.drop()
        if division.divides(flat):
            part = collectives.reduce_scatter(send, "shard", CATEGORY).mul_(1.0 / division.size)
            start = division.owned(flat)[0]
        else:
            group = "shard" if self._two_sums else "world"
            part = collectives.all_reduce(send, group, CATEGORY, scale=1.0 / len(self._ranks.members(group)))
            start = 0
        del send
        self._store(state, part.to(self._wire), start, names, replace=False, on_device=device)

    def _buffer(self, flat: Flat) -> Tensor:
        if self._ranks.on_device:
            return self._memory.on_device(flat.padded, self._wire, REDUCTION, f"gradients of {flat.unit}")
        return self._memory.host(flat.padded, self._wire, REDUCTION, f"gradients of {flat.unit}")

    def _store(
        self, state: FlatState, part: Tensor, start: int, names: set[str], *, replace: bool, on_device: bool
    ) -> None:
        gradients, memory = state.gradients, self._memory
        assert gradients is not None
        state.wait_update()  # of an earlier step, which uses what rested here
        if gradients.tier is Tier.DEVICE and not memory.device.aliases_host and not on_device:
            landed = memory.on_device(part.numel(), part.dtype, REDUCTION, f"gradients of {state.flat.unit}")
            memory.copy_in(landed, part).wait()
            part = landed
        for slot in gradients.flat.slots:
            if slot.trainable and slot.name in names:
                value = part[slot.offset - start : slot.end - start].view(slot.shape)
                if replace:
                    gradients.replace(slot.name, value, self._queue)
                else:
                    gradients.add(slot.name, value, self._queue)
        gradients.settle_all()
        gradients.rest(self._queue)
        self._queue.drain()

    def _sum_replicas(self, index: int, states: Sequence[FlatState], collectives: Collectives) -> None:
        for state in states:
            assert state.gradients is not None
            names = {slot.name for slot in state.flat.slots} & self._present[index]
            start, stop = state.division.owned(state.flat)
            if not names:
                continue
            send = self._memory.host(stop - start, self._wire, REDUCTION, f"gradients of {state.flat.unit}")
            state.gradients.fill(send, self._queue, origin=start)
            scale = 1.0 / self._ranks.replicate_size
            part = collectives.all_reduce(send, "replicate", CATEGORY, scale=scale)
            self._store(state, part.to(self._wire), start, names, replace=True, on_device=False)
