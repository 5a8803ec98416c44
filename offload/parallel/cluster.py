"""What an engine does together with the engines of other ranks: gathers, reductions, and small exchanges in between."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from offload.layout import BLOCK, Division, Slot, ceil_to
from offload.parallel.channel import Channel
from offload.parallel.collectives import Collectives
from offload.parallel.gather import Gathering
from offload.parallel.kept import GATHER, REDUCTION, SECONDARY
from offload.parallel.ranks import Ranks
from offload.parallel.reduction import Reduction
from offload.parallel.stalls import CHANNELS, READS
from offload.parameters import ParameterRecord
from offload.residency import Phase, Residency, Unit
from offload.state import FlatState
from offload.tiers import TierMemory
from offload.units import UnitSpec

T = TypeVar("T")
Key = tuple[int, int]


class Cluster:
    """This engine among its peers. Three channels, so that what one kind of collective waits for does not hold up the
    others: `gathering`, `reduction`, and small votes.
    """

    def __init__(
        self,
        ranks: Ranks,
        memory: TierMemory,
        residency: Residency,
        states: Mapping[Key, FlatState],
        specs: Sequence[UnitSpec],
        *,
        division: Division,
        wire: torch.dtype,
        kept: bool | int = True,
    ) -> None:
        self.ranks, self.division, self._memory, self._states = ranks, division, memory, states
        self._channels: list[Channel] = []
        self._further: dict[str, Channel] = {}
        try:
            gathers, reductions, self._votes = (self._open(name) for name in ("gather", "reduce", "vote"))
            if not isinstance(kept, bool):
                ranks.divide_shards(SECONDARY, kept)
            self.gathering = Gathering(memory, ranks, gathers, kept=kept)
            units = _in_order_of_reduction(specs, states)
            self._names = {unit.index: unit.name for unit in residency.units}
            scattered = {spec.index for spec in specs if spec.kind == "container"}
            scattered.update(index for spec in specs for index in spec.borrows)
            self.reduction = Reduction(
                memory, ranks, reductions, units, self._names, division=division, wire=wire, scattered=scattered
            )
        except BaseException:
            self.close()
            raise

    def channel(self, name: str) -> Channel:
        """A channel for operations that must not come between those of the others; opened by its first use, which all
        ranks come to.
        """
        if name not in self._further:
            self._further[name] = self._open(name)
        return self._further[name]

    def _open(self, name: str) -> Channel:
        kind = {"gather": GATHER, "reduce": REDUCTION}.get(name, "exchange")
        channel = Channel(
            name,
            self.ranks,
            lambda n, dtype: self._memory.host(n, dtype, kind),
            awaited=name in CHANNELS,
        )
        self._channels.append(channel)
        return channel

    @property
    def divides_weights(self) -> bool:
        return any(state.division.divides_weights(state.flat) for state in self._states.values())

    # Steps

    def backward_ended(self) -> None:
        """The outermost backward of a pass is over."""
        self.reduction.backward_ended()

    def updated(self, units: Iterable[int]) -> None:
        """The step has decided on updates of these units: where weights are whole on every rank, they are exchanged as
        soon as they are updated.
        """
        for index in sorted(units):
            for (unit, _), state in sorted(self._states.items()):
                if (
                    unit == index
                    and state.division.divides(state.flat)
                    and not state.division.divides_weights(state.flat)
                ):
                    self.gathering.replicate(self._names[index], state)

    @contextmanager
    def updating_early(
        self, units: Sequence[Unit], final: Callable[[], bool], update: Callable[[Unit], bool]
    ) -> Iterator[None]:
        """Units are reduced during backward whatever the stage, and updated as soon as they are, unless somebody uses
        their weights. `final`: whether what is reduced now is final; all ranks ask it for the same units.

        Where shards have replicas, the sum over these comes at the end of the step, and so do the updates.
        """
        if self.ranks.replicate_size > 1 and self.division.stage:
            yield
            return
        reduction, by_index = self.reduction, {unit.index: unit for unit in units}

        def reduced(index: int) -> None:
            if not final():
                return
            if by_index[index].phase is Phase.RESTING and reduction.present_in(index) and update(by_index[index]):
                reduction.forget_unit(index)

        before, reduction.early, reduction.on_reduced = reduction.early, True, reduced
        try:
            yield
            reduction.finish()
        finally:
            reduction.early, reduction.on_reduced = before, None

    def finish_exchanges(self) -> None:
        """Carries out the updates whose weights other ranks wait for, before the engine closes."""
        for state in self._states.values():
            if state.replicating is not None:
                state.wait_update()

    # Small exchanges

    def ask(self, what: str, job: Callable[[Collectives], T], *, group: str = "world") -> T:
        """Carries out a collective of small things now, in this rank's `group`; every rank has to come here."""
        return self._votes.submit(what, job, group=group).result()

    def all_of(self, what: str, value: T) -> list[T]:
        """`value` of every rank, by rank; picklable and small."""
        return self.ask(what, lambda collectives: collectives.all_gather_objects(value, "world"))

    # Whole values of what is divided

    def assemble(self, out: Tensor, record: ParameterRecord, *, states: bool) -> None:
        """Fills the elements of a 1-D CPU tensor, a parameter's weight or state, that other ranks hold."""
        state = self._states[record.unit, record.flat]
        divided = state.division.divides(state.flat) if states else state.division.divides_weights(state.flat)
        if not divided or out.numel() == 0:
            return
        parts = [self._part(state, record.slot, rank) for rank in range(self.division.size)]
        size = max(stop - start for start, stop in parts)

        def exchange(collectives: Collectives) -> None:
            everything = torch.empty(size * len(parts), dtype=out.dtype)
            own = everything[self.division.rank * size :][:size]
            start, stop = parts[self.division.rank]
            own[: stop - start].copy_(out[start:stop])
            own[stop - start :].zero_()
            collectives.all_gather_(everything, "shard", "reads")
            for rank, (start, stop) in enumerate(parts):
                out[start:stop].copy_(everything[rank * size :][: stop - start])

        self.ask(f"{READS}{record.name}", exchange, group="shard")

    def _part(self, state: FlatState, slot: Slot, rank: int) -> tuple[int, int]:
        """The elements of a parameter that a rank of the shard group owns."""
        part = slot.within(*self.division.owned(state.flat, rank))
        return (0, 0) if part is None else (part.start, part.start + part.numel)

    def assemble_partials(self, records: Sequence[ParameterRecord], partials: Sequence[Tensor]) -> list[Tensor]:
        """The sums of squares per block of whole parameters, from what each rank has of them."""
        size = self.division.size
        divided = [self.division.divides(self._states[r.unit, r.flat].flat) for r in records]
        lengths = [
            [self._blocks(r, rank) if d else 0 for r, d in zip(records, divided, strict=True)] for rank in range(size)
        ]
        own = [p for p, d in zip(partials, divided, strict=True) if d]
        if not own:
            return list(partials)
        most = max(sum(of_rank) for of_rank in lengths)

        def exchange(collectives: Collectives) -> Tensor:
            everything = torch.zeros(size * most, dtype=torch.float64)
            mine = torch.cat(own)
            everything[self.division.rank * most :][: mine.numel()].copy_(mine)
            collectives.all_gather_(everything, "shard", "norm")
            return everything

        everything = self.ask("exchange the sums of squares of the gradients", exchange, group="shard")
        found: list[list[Tensor]] = [[] for _ in records]
        for rank, of_rank in enumerate(lengths):
            at = rank * most
            for index, count in enumerate(of_rank):
                found[index].append(everything[at : at + count])
                at += count
        return [torch.cat(f) if d else p for f, d, p in zip(found, divided, partials, strict=True)]

    def _blocks(self, record: ParameterRecord, rank: int) -> int:
        start, stop = self._part(self._states[record.unit, record.flat], record.slot, rank)
        return ceil_to(stop - start, BLOCK) // BLOCK

    # Life

    def agree_on_least(self, what: str, value: int) -> int:
        """The smallest of all ranks' values."""
        return min(self.all_of(what, value))

    def bytes_moved(self) -> dict[str, int]:
        """Logical bytes through collectives so far, by category, and the most of gathers that were under way."""
        moved = {f"{category}_communicated_bytes": n for category, n in self.ranks.counters.by_category().items()}
        if self.divides_weights:
            moved["gathers_in_flight_peak_bytes"] = self.gathering.in_flight.peak
        return moved

    def close(self) -> None:
        """Ends the threads. Idempotent; does not wait for a peer beyond the timeout."""
        self.ranks.say_closed()
        for channel in self._channels:
            channel.close()


def _in_order_of_reduction(specs: Sequence[UnitSpec], states: Mapping[Key, FlatState]) -> dict[int, list[FlatState]]:
    """Units with something trainable, in the order in which a backward ends with their gradients, as far as it is known
    beforehand: from the last unit to the first, one with parameters that earlier units use with the first of these,
    parameters of containers at the end.
    """
    first_use = {spec.index: -1 if spec.kind == "container" else spec.index for spec in specs}
    for spec in specs:
        for borrowed in spec.borrows:
            first_use[borrowed] = min(first_use[borrowed], spec.index)
    found = {}
    for index in sorted(first_use, key=lambda index: (-first_use[index], -index)):
        flats = [state for (unit, _), state in sorted(states.items()) if unit == index and state.trainable]
        if flats:
            found[index] = flats
    return found
