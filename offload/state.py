"""The planes of one flat and everything that is done to them chunk by chunk: first values, the optimizer's update,
edits, reads.

A chunk brings the planes of a range of elements to where the kernel runs (`Operand`s), so a flat of any size needs one
staging slot. The weight plane always equals the rounding of the master, so it is only written where the format keeps a
separate master.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from offload.gradients import FlatGradients, GradientOperands, Held, TakenGradients, Where
from offload.layout import BLOCK, WHOLE, Division, Flat, Slot, ceil_to
from offload.planes import Carver, Completion, Operand, Plane, SlotQueue, granule
from offload.schedule.ahead import ChunkRead
from offload.telemetry.trace import OPTIMIZER
from offload.tiers import Tier, TierMemory
from optimizer_cpu import AdamWHyper, kernels
from optimizer_cpu.formats import PlaneSpec, StateFormat
from swap.geometry import PAGE
from swap.staging import Slot as StagingSlot
from swap.tickets import Ticket

if TYPE_CHECKING:
    from offload.parallel.channel import Pending

STATES = ("master", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One parameter's part in a step."""

    slot: Slot
    hyper: AdamWHyper


class Run(NamedTuple):
    """The elements `[start, end)` of a flat that a step updates with the same hyperparameters, and the plane that holds
    their gradients.
    """

    start: int
    end: int
    hyper: AdamWHyper
    where: Where


def state_specs(fmt: StateFormat, flat: Flat) -> tuple[PlaneSpec, ...]:
    """The optimizer planes of a flat; none where nothing is trainable."""
    return fmt.state_planes(flat.dtype) if flat.trainable_end else ()


def staging_bytes_per_chunk(
    fmt: StateFormat, dtypes: Sequence[torch.dtype], accumulate: torch.dtype, chunk: int
) -> int:
    """Bytes of a staging slot that holds a chunk of `chunk` elements of every plane, both kinds of gradient and an fp32
    scratch.
    """
    largest = 0
    for dtype in dtypes:
        specs = fmt.planes(dtype) if dtype in fmt.weight_dtypes else (PlaneSpec(name="weight", dtype=dtype),)
        gradients = [PlaneSpec(name="grad", dtype=dtype), PlaneSpec(name="grad", dtype=accumulate)]
        scratch = [PlaneSpec(name="scratch", dtype=torch.float32)]
        # Initialisation and edits need the scratch, the step the gradients; never both.
        sizes = [[*specs, *gradients], [*specs, *scratch]]
        largest = max(largest, *(sum(-(-s.nbytes(chunk) // PAGE) * PAGE for s in group) for group in sizes))
    return largest


def chunk_granule(fmt: StateFormat, dtypes: Sequence[torch.dtype]) -> int:
    """The multiple of elements at which chunks may begin, for all `dtypes` of a model."""
    return max([BLOCK, *(granule(fmt.planes(d)) for d in dtypes if d in fmt.weight_dtypes)])


class FlatState:
    """Weight and optimizer planes and the gradients of one flat, or what `division` gives this rank of them.

    `local` are the gradients of this rank's own backward, `gradients` what the step works on: the same object where
    nothing is reduced over ranks. `wire` is the dtype of reduced gradients; None on a single rank. All elements are
    addressed in the coordinates of the whole flat.

    The kernel runs on the device if the optimizer state rests there (and the device has memory of its own), else on the
    host.
    """

    def __init__(
        self,
        memory: TierMemory,
        flat: Flat,
        fmt: StateFormat,
        *,
        weight_tier: Tier,
        state_tier: Tier,
        gradient_tier: Tier,
        accumulate: torch.dtype,
        chunk: int,
        division: Division = WHOLE,
        wire: torch.dtype | None = None,
        local_tier: Tier | None = None,
    ) -> None:
        self.memory, self.flat, self.fmt, self.chunk = memory, flat, fmt, chunk
        self.division = division
        self.start, self.end = division.states(flat)
        """The elements whose optimizer state is here."""
        self.trainable = any(slot.trainable for slot in flat.slots)  # even if all of them are empty
        spec = (
            fmt.planes(flat.dtype)[0] if flat.dtype in fmt.weight_dtypes else PlaneSpec(name="weight", dtype=flat.dtype)
        )
        base, end = division.weights(flat)
        what = f"{flat.unit} weight"
        self.weight = Plane(memory, spec, end, weight_tier, kind="parameters", what=what, base=base)
        self.planes: dict[str, Plane] = {}
        for state in state_specs(fmt, flat):
            what = f"{flat.unit} {state.name}"
            self.planes[state.name] = Plane(
                memory, state, self.end, state_tier, kind="optimizer", what=what, base=self.start
            )
        self.gradients: FlatGradients | None = None
        self.local: FlatGradients | None = None
        if self.trainable:
            settings: dict[str, Any] = {"accumulate": accumulate, "chunk": chunk}
            self.local = self.gradients = FlatGradients(memory, flat, local_tier or gradient_tier, **settings)
            if wire is not None:
                settings.update(dtype=wire, lo=self.start, hi=self.end, from_host=True)
                self.gradients = FlatGradients(memory, flat, gradient_tier, **settings)
        self.on_device = state_tier is Tier.DEVICE and not memory.device.aliases_host
        self.pending: Completion | None = None
        """The update that a step has decided on and that is not carried out yet."""
        self.replicating: Pending[None] | None = None
        """Other ranks' parts of the weight plane are on their way after an update."""
        self._written: Ticket | None = None
        self.last_chunks: list[tuple[int, int, bool]] = []
        """The chunks of the last step, and whether it read their weights."""
        self.closed = False
        self.before_rewrite: Callable[[int, int], None] | None = None
        """Called with the elements `[lo, hi)` that are about to change; a snapshot saves their old bytes first."""

    def settle(self) -> None:
        """Carries out a pending update and waits until all of it is at rest.

        Raises:
            SwapIOError: a transfer of it failed.
        """
        self.wait_update()
        self.wait_replicated()
        self.wait_written()

    def wait_update(self) -> None:
        """Carries out a pending update. Afterwards the gradients that it used are gone."""
        pending = self.pending
        if pending is not None:
            pending.wait()

    def wait_replicated(self) -> None:
        """Waits until the weight plane holds what other ranks have updated, where it is whole on every rank."""
        replicating = self.replicating
        if replicating is not None:
            replicating.wait()
            if self.replicating is replicating:
                self.replicating = None

    def wait_written(self) -> None:
        """Waits for the writes of the last update, if they are still under way."""
        written = self._written
        if written is not None:
            written.wait()
            if self._written is written:
                self._written = None

    @property
    def writing(self) -> bool:
        """Whether writes of the last update may be under way."""
        return self._written is not None and not self._written.done()

    def note_writes(self, tickets: Sequence[Ticket]) -> None:
        """For the step: these writes have begun, and whatever reads the planes waits for them."""
        if tickets:
            earlier = [self._written] if self._written is not None else []
            self._written = Ticket.gather([*earlier, *tickets])

    def close(self) -> None:
        self.closed = True
        for plane in (self.weight, *self.planes.values()):
            plane.free()
        for gradients in self._all_gradients():
            gradients.close()

    def _all_gradients(self) -> Iterator[FlatGradients]:
        if self.gradients is not None:
            yield self.gradients
        if self.local is not None and self.local is not self.gradients:
            yield self.local

    def drop_gradients(self) -> None:
        """Forgets all gradients, reduced or not."""
        for gradients in self._all_gradients():
            gradients.drop()

    def relaid(self, flat: Flat, renamed: Mapping[str, str]) -> None:
        """Takes note that parameters have left, or have other names; the others are where they were. `flat` has no
        trainable parameter that was not trainable before.
        """
        self.flat, self.weight.end = flat, flat.padded
        if self.gradients is not None:
            self.gradients.relaid(flat, renamed)
        if not flat.slots:
            self.close()

    def _chunks(self, lo: int, hi: int) -> Iterator[tuple[int, int]]:
        """Chunks of the elements whose state is here, whole blocks each, that meet `[lo, hi)`."""
        return self._pieces(lo, hi, self.start, self.end, self.chunk)

    def _weights_alone(self, lo: int, hi: int) -> Iterator[tuple[int, int]]:
        """Chunks of the elements of which only the weight is here, that meet `[lo, hi)`."""
        base, end = self.weight.base, self.weight.end
        frozen = min(max(self.flat.trainable_end, base), end)
        yield from self._pieces(lo, hi, base, max(self.start, base), self.chunk)
        yield from self._pieces(lo, hi, max(self.end, base), frozen, self.chunk)
        yield from self._pieces(lo, hi, frozen, end, self.chunk)

    def _pieces(self, lo: int, hi: int, first: int, last: int, chunk: int) -> Iterator[tuple[int, int]]:
        lo, hi = max(lo, first), min(ceil_to(hi, BLOCK), last)
        # The grid begins where the planes do, so that chunks fall on pages in all of them.
        start = first + (lo - first) // chunk * chunk
        return self.flat.chunks(chunk, start, hi if lo < hi else start)

    def range_here(self, slot: Slot, *, states: bool) -> tuple[int, int]:
        """Which elements of the parameter at `slot` this rank has: of its weight, or of its optimizer states."""
        lo, hi = (self.start, self.end) if states else (self.weight.base, self.weight.end)
        begin = min(max(lo, slot.offset), slot.end)
        return begin - slot.offset, max(begin, min(hi, slot.end)) - slot.offset

    def operands(self, lo: int, hi: int, carver: Carver, *, on_device: bool) -> dict[str, Operand]:
        planes = {"weight": self.weight, **self.planes}
        return {name: Operand(plane, lo, hi, carver, on_device=on_device) for name, plane in planes.items()}

    # First values

    def create(self, values: Callable[[Slot, int, int], Tensor], queue: SlotQueue) -> None:
        """Sets all planes from the parameters' own values, moments zero.

        `values(slot, lo, hi)` gives elements `[lo, hi)` of a flattened parameter, in host memory.
        """
        for lo, hi in self._chunks(0, self.flat.padded):
            staging = queue.acquire()
            after: list[Completion] = []
            try:
                carver = Carver(staging)
                operands = self.operands(lo, hi, carver, on_device=False)
                master = carver.take(hi - lo, torch.float32).zero_()
                for slot, start, stop in _meets(self.flat.slots, lo, hi):
                    master[start - lo : stop - lo].copy_(values(slot, start - slot.offset, stop - slot.offset))
                kernels.load_(self.fmt.name, {name: op.tensor for name, op in operands.items()}, master=master)
                after = _put_back(operands.values())
            finally:
                queue.give_back(staging, after)
        for lo, hi in self._weights_alone(0, self.flat.padded):
            staging = queue.acquire()
            after = []
            try:
                carver = Carver(staging)
                operand = Operand(self.weight, lo, hi, carver, on_device=False)
                master = operand.tensor if lo >= self.flat.trainable_end else carver.take(hi - lo, torch.float32)
                master.zero_()
                for slot, start, stop in _meets(self.flat.slots, lo, hi):
                    part = values(slot, start - slot.offset, stop - slot.offset)
                    master[start - lo : stop - lo].copy_(part)
                self._round_as_elsewhere(operand.tensor, master, carver)
                after = _put_back([operand])
            finally:
                queue.give_back(staging, after)
        queue.drain()

    def _round_as_elsewhere(self, weight: Tensor, master: Tensor, carver: Carver) -> None:
        """Makes `weight` what the rank that has the state makes of `master`: compact ones are not just rounded."""
        if weight is not master:
            specs = state_specs(self.fmt, self.flat)
            planes = {s.name: carver.take(s.numel(weight.numel()), s.dtype) for s in specs}
            kernels.load_(self.fmt.name, {"weight": weight, **planes}, master=master)

    # The step

    def jobs(self, updates: Sequence[Update], gradients: TakenGradients) -> Iterator[ChunkJob]:
        """The chunks that hold a parameter to update, in order."""
        self.last_chunks = []
        runs = list(_runs(updates, gradients, self.start, self.end))
        kept = self._kept(updates)
        begin = 0
        for lo, hi in self._pieces(0, self.flat.padded, self.start, self.end, self._step_chunk(gradients, runs)):
            while begin < len(runs) and runs[begin].end <= lo:
                begin += 1
            end = begin
            while end < len(runs) and runs[end].start < hi:
                end += 1
            if begin < end:
                follows = kept is not None and next(_meets(kept, lo, hi), None) is None
                first = not self.last_chunks
                self.last_chunks.append((lo, hi, not follows))
                yield ChunkJob(self, lo, hi, runs[begin:end], gradients, first=first, weight_follows=follows)

    def _kept(self, updates: Sequence[Update]) -> list[Slot] | None:
        """The parameters whose weights a step leaves alone; None if the weights are what is updated: only a format that
        keeps a whole master apart writes them without having read them.
        """
        if "master" not in self.planes:
            return None
        updated = {update.slot.name for update in updates}
        return [slot for slot in self.flat.slots if slot.name not in updated]

    def _step_chunk(self, gradients: TakenGradients, runs: Sequence[Run]) -> int:
        """Elements of a chunk of a step: as many as a slot holds of what passes through it. Slots have room for a chunk
        of everything, but what rests in host memory stays there; large chunks keep the disk busy while threads wait for
        a processor, and there are fewer of them.
        """
        staging = self.memory.staging
        specs = [plane.spec for plane in (self.weight, *self.planes.values()) if plane.staged]
        specs += gradients.staged({run.where for run in runs})
        if self.on_device or staging is None or not specs:
            return self.chunk
        unit = granule([*specs, self.weight.spec, *(plane.spec for plane in self.planes.values())])
        fit = staging.slot_bytes // sum(spec.nbytes(unit) for spec in specs) * unit
        return max(fit, self.chunk)

    # Edits and reads

    def write(
        self, slot: Slot, queue: SlotQueue, *, weight: Tensor | None = None, planes: dict[str, Tensor] | None = None
    ) -> None:
        """Replaces values of one parameter.

        `weight`: new values in the weight's dtype; where they differ from the rounding of the master the master becomes
        them, elsewhere it keeps its low bits. `planes`: fp32 values for "master", "exp_avg" or "exp_avg_sq", 1-D of the
        parameter's length.
        """
        if slot.numel == 0:
            return
        self.settle()
        if self.before_rewrite is not None:
            self.before_rewrite(slot.offset, slot.end)
        alone = weight if weight is not None else (planes or {}).get("master")
        if alone is not None:
            self._write_weights_alone(slot, queue, alone)
        for lo, hi in self._chunks(slot.offset, slot.end):
            start, stop = max(lo, slot.offset), min(hi, slot.end)
            staging = queue.acquire()
            try:
                carver = Carver(staging)
                operands = self.operands(lo, hi, carver, on_device=False)
                _bring(operands.values())
                tensors = {name: op.tensor for name, op in operands.items()}
                state = kernels.read(self.fmt.name, tensors)
                part = slice(start - slot.offset, stop - slot.offset)
                inside = slice(start - lo, stop - lo)
                values = {
                    "master": state.master.clone(),
                    "exp_avg": state.exp_avg.clone(),
                    "exp_avg_sq": state.exp_avg_sq.clone(),
                }
                if weight is not None:
                    new = weight.reshape(-1)[part]
                    rounded = torch.empty_like(new)
                    kernels.round_weight_(values["master"][inside].clone(), rounded)
                    changed = new.view(_bits(new.dtype)) != rounded.view(_bits(new.dtype))
                    values["master"][inside] = torch.where(changed, new.float(), values["master"][inside])
                for name, value in (planes or {}).items():
                    values[name][inside] = value.reshape(-1)[part]
                kernels.load_(self.fmt.name, tensors, **values)
                for completion in _put_back(operands.values()):
                    completion.wait()
            finally:
                queue.give_back(staging, [])

    def _write_weights_alone(self, slot: Slot, queue: SlotQueue, value: Tensor) -> None:
        for lo, hi in self._weights_alone(slot.offset, slot.end):
            start, stop = max(lo, slot.offset), min(hi, slot.end)
            staging = queue.acquire()
            try:
                carver = Carver(staging)
                operand = Operand(self.weight, lo, hi, carver, on_device=False)
                _bring([operand])
                target = operand.tensor[start - lo : stop - lo]
                new = value.reshape(-1)[start - slot.offset : stop - slot.offset]
                if new.dtype == target.dtype or lo >= self.flat.trainable_end:
                    target.copy_(new)
                else:
                    self._round_as_elsewhere(target, new, carver)
                for completion in _put_back([operand]):
                    completion.wait()
            finally:
                queue.give_back(staging, [])

    def read_weight(self, slot: Slot, queue: SlotQueue, out: Tensor) -> None:
        """Copies the weight of one parameter to the 1-D CPU tensor `out`, as far as it is here."""
        chunks = [*self._weights_alone(slot.offset, slot.end), *self._chunks(slot.offset, slot.end)]
        self._read(slot, queue, [self.weight], lambda tensors: tensors, {"weight": out}, chunks)

    def read_state(self, slot: Slot, queue: SlotQueue, names: Sequence[str] = STATES) -> dict[str, Tensor]:
        """The decoded fp32 `names` of a trainable parameter as new 1-D CPU tensors, filled as far as they are here."""

        def decode(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            state = kernels.read(self.fmt.name, tensors)
            return {name: getattr(state, name) for name in names}

        out = {name: torch.empty(slot.numel, dtype=torch.float32) for name in names}
        chunks = self._chunks(slot.offset, slot.end)
        self._read(slot, queue, [self.weight, *self.planes.values()], decode, out, chunks)
        return out

    def _read(
        self,
        slot: Slot,
        queue: SlotQueue,
        planes: Sequence[Plane],
        decode: Callable[[dict[str, Tensor]], dict[str, Tensor]],
        out: dict[str, Tensor],
        chunks: Iterable[tuple[int, int]],
    ) -> None:
        self.settle()
        queue.drain()
        for lo, hi in chunks:
            start, stop = max(lo, slot.offset), min(hi, slot.end)
            staging = queue.acquire()
            try:
                carver = Carver(staging)
                operands = {plane.spec.name: Operand(plane, lo, hi, carver, on_device=False) for plane in planes}
                _bring(operands.values())
                values = decode({name: op.tensor for name, op in operands.items()})
                for name, target in out.items():
                    target[start - slot.offset : stop - slot.offset].copy_(values[name][start - lo : stop - lo])
            finally:
                queue.give_back(staging, [])


class ChunkJob:
    """One chunk of an optimizer step: start the reads, run the kernel, start the writes. `first`: of its flat."""

    def __init__(
        self,
        state: FlatState,
        lo: int,
        hi: int,
        runs: Sequence[Run],
        gradients: TakenGradients,
        *,
        first: bool,
        weight_follows: bool,
    ) -> None:
        self.state, self.lo, self.hi, self._first = state, lo, hi, first
        self._runs, self._taken = runs, gradients
        self._read: ChunkRead | None = None
        self._gradients: GradientOperands | None = None
        self.weight_follows = weight_follows
        """Whether the weight plane is only written: the format keeps a whole master apart, and every parameter here is
        updated.
        """

    @property
    def key(self) -> tuple[FlatState, int, int]:
        """What it reads."""
        return self.state, self.lo, self.hi

    def start(self, source: StagingSlot | ChunkRead) -> None:
        """Starts to read what the kernel needs into a staging slot, which is the job's from now on; or takes what has
        been read ahead and reads the rest.
        """
        read = source if isinstance(source, ChunkRead) else ChunkRead(self.state, self.lo, self.hi, source)
        self._read = read
        if self._first:  # writes that begin later are of this very step, of chunks that no other one reads
            self.state.wait_written()
        planes = dict.fromkeys(run.where for run in self._runs)
        self._gradients = self._taken.operands(
            self.lo, self.hi, planes, read.carver, on_device=self.state.on_device
        )
        read.fetch(weight=not self.weight_follows)
        self._gradients.fetch()

    def finish(
        self, queue: SlotQueue, grad_scale: float, deliver: Callable[[int, int, Tensor], None] | None = None
    ) -> None:
        """Runs the kernel and starts the writes; the staging slot is given back when they are done.

        `deliver(lo, hi, weight)` gets the new weights of the chunk, in host memory, while they are there.
        """
        assert self._read is not None and self._gradients is not None
        after: list[Completion] = []
        spans = self.state.memory.spans
        operands = self._read.operands
        try:
            self._read.ready()
            self._gradients.ready()
            spans.begin(OPTIMIZER, f"update {self.state.flat.unit}", self)
            if self.state.before_rewrite is not None:
                self.state.before_rewrite(self.lo, self.hi)
            weight = operands["weight"]
            if self.weight_follows and not weight.in_place:
                weight.tensor.zero_()  # the padding between parameters is zero
            planes = {name: operand.tensor for name, operand in operands.items()}
            kernels.steps_(self.state.fmt.name, planes, self._parts(), grad_scale=grad_scale)
            spans.end(self)
            after = _written_together(_put_back(operands.values()))
            self.state.note_writes([c for c in after if isinstance(c, Ticket)])
            if deliver is not None:
                deliver(self.lo, self.hi, weight.on_host)
        finally:
            spans.end(self)
            queue.give_back(self._read.slot, after)
            self._read = None

    def abandon(self, queue: SlotQueue) -> None:
        """Gives the staging slot back without a step, once the reads that fill it have ended."""
        if self._read is None:
            return
        self._read.abandon()
        for operand in self._gradients.parts if self._gradients else ():
            operand.forget()
        queue.give_back(self._read.slot, [])
        self._read = None

    def _parts(self) -> Iterator[tuple[int, int, Tensor, int, AdamWHyper]]:
        """The ranges of `kernels.steps_`, one of each run."""
        assert self._gradients is not None
        for run in self._runs:
            start, stop = max(self.lo, run.start), min(self.hi, run.end)
            plane, first = self._gradients.place(run.where, start)
            yield start - self.lo, stop - start, plane, first, run.hyper


def _runs(updates: Sequence[Update], gradients: TakenGradients, lo: int, hi: int) -> Iterator[Run]:
    """The updates of what is in `[lo, hi)`, in order of their elements; those that lie side by side, with the same
    hyperparameters and gradients in the same plane, are one.

    The kernels' arithmetic is that of an element, or of a group at whose multiples every parameter begins, so a run
    gives the bits that its parts would.
    """
    start = end = 0
    hyper: AdamWHyper | None = None
    where: Where | None = None
    for update in sorted(updates, key=lambda update: update.slot.offset):
        slot = update.slot
        offset, stop = slot.offset, slot.end
        if not slot.numel or offset >= hi or stop <= lo:
            continue
        place = gradients.where(slot.name)
        if offset != end or update.hyper is not hyper or place != where:
            if hyper is not None and where is not None:
                yield Run(start, end, hyper, where)
            start, hyper, where = offset, update.hyper, place
        end = stop
    if hyper is not None and where is not None:
        yield Run(start, end, hyper, where)


def _meets(slots: Sequence[Slot], lo: int, hi: int) -> Iterator[tuple[Slot, int, int]]:
    """The slots that meet `[lo, hi)` with the common range."""
    for slot in slots:
        if slot.numel and slot.offset < hi and lo < slot.end:
            yield slot, max(lo, slot.offset), min(hi, slot.end)


def _bring(operands: Iterable[Operand]) -> None:
    items = list(operands)
    for operand in items:
        operand.fetch()
    for operand in items:
        operand.ready()


def _put_back(operands: Iterable[Operand]) -> list[Completion]:
    completions = [operand.put_back() for operand in operands]
    return [c for c in completions if c is not None]


def _written_together(completions: Sequence[Completion]) -> list[Completion]:
    """The same with one ticket for all."""
    tickets = [c for c in completions if isinstance(c, Ticket)]
    others = [c for c in completions if not isinstance(c, Ticket)]
    return [Ticket.gather(tickets), *others] if tickets else others


def _bits(dtype: torch.dtype) -> torch.dtype:
    return {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]


__all__ = ["ChunkJob", "FlatState", "Held", "Update", "chunk_granule", "staging_bytes_per_chunk", "state_specs"]
