"""Gradients between backward and step: summed as they arrive, resting on any tier, one flat at a time.

The first contribution to a parameter rests in the dtype it was computed in (`raw` plane); the second converts the sum
to the accumulation dtype (`sum` plane), where later ones are added, in the order of the backward calls. So the numbers
do not depend on the tier. Parameters smaller than a block share pages with others; on nvme their gradients stay on the
host, which costs at most a few blocks a unit. Their first contributions are kept as they come and move together, since
a unit may have very many of them.

Sums of squares are taken block by block of each parameter from the final gradient: on nvme while it passes through
memory, elsewhere on demand.

[Note: gathering] While gradients of one unit arrive, those for nvme are summed in host memory and written in large
pieces when another unit's turn comes (`rest`). Where memory.host has no room for that, or a gradient comes after it
went to rest, each contribution goes through a staging slot instead: read, add, write.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor

from offload.errors import GradientError
from offload.layout import BLOCK, Flat, Slot, ceil_to
from offload.planes import Carver, Completion, Operand, Plane, SlotQueue
from offload.tiers import Tier, TierMemory
from optimizer_cpu import kernels
from optimizer_cpu.formats import PlaneSpec
from swap.errors import BudgetError

_where = attrgetter("slot.offset")


class _Key(enum.Enum):
    """Members are keys that every gradient looks up: they hash by identity, which `Enum` does in Python by name."""

    __hash__ = object.__hash__


class Held(_Key):
    """What is held of one parameter's gradient. Where the two dtypes are equal, sums stay in the raw plane."""

    NOTHING = "nothing"
    RAW = "one contribution in its own dtype"
    SUM = "a sum in the accumulation dtype"


class Place(_Key):
    """Where a gradient is. One whose tier is nvme has three places, for other tiers there is one."""

    REST = "on its tier"
    APART = "on the host, being smaller than a block"
    GATHERING = "on the host, while its unit's gradients arrive"


Where = tuple[Held, Place]
"""Names a plane of one flat's gradients."""

_GATHERED_AT_ONCE = 1
"""Units whose gathered gradients may still be on their way to the disk when another unit begins to gather."""


@dataclass(slots=True, eq=False)
class _Entry:
    """One parameter's gradient; `partials` are the fp64 sums of squares per block, or None until they are known."""

    slot: Slot
    held: Held = Held.NOTHING
    partials: Tensor | None = None
    gathering: bool = False
    """Whether it is in host memory on its way to nvme, see [Note: gathering]."""
    pending: tuple[Completion, Tensor] | None = None  # a copy under way and the device tensor it reads
    late: Tensor | None = None  # a first contribution that has not moved yet


class FlatGradients:
    """Gradients of the trainable parameters of one flat.

    `chunk` is the number of elements moved at a time through staging. `dtype` is that of contributions, by default the
    flat's. Only the elements `[lo, hi)` are held, by default all of `[0, trainable_end)`; contributions are to the
    parts of the parameters that lie within. `from_host`: they come in host memory, unless the tier is the device.
    """

    def __init__(
        self,
        memory: TierMemory,
        flat: Flat,
        tier: Tier,
        *,
        accumulate: torch.dtype,
        chunk: int,
        dtype: torch.dtype | None = None,
        lo: int = 0,
        hi: int | None = None,
        from_host: bool = False,
    ) -> None:
        self.memory, self.tier, self.chunk = memory, tier, chunk
        self._near = memory.device.aliases_host or (from_host and tier is not Tier.DEVICE)
        """Whether contributions come in memory that the CPU can address, or go to the device that they are on."""
        self.lo, self.hi = lo, hi
        self.flat = self._clipped(flat)
        self.raw_spec = PlaneSpec(name="grad", dtype=dtype or flat.dtype)
        self.sum_spec = PlaneSpec(name="grad", dtype=accumulate)
        self._entries = {slot.name: _Entry(slot) for slot in self.flat.slots if slot.trainable}
        self._planes: dict[Where, Plane] = {}
        self._taken = False
        self._late: list[_Entry] = []

    def _clipped(self, flat: Flat) -> Flat:
        return flat if self.hi is None else flat.within(self.lo, self.hi)

    def relaid(self, flat: Flat, renamed: Mapping[str, str]) -> None:
        """Parameters have left the flat, or have other names; what is held of the others stays."""
        flat = self._clipped(flat)
        slots = {slot.name: slot for slot in flat.slots if slot.trainable}
        entries: dict[str, _Entry] = {}
        for name, entry in self._entries.items():
            slot = slots.get(renamed.get(name, name))
            if slot is None:
                self.settle(entry)
            else:
                entry.slot = slot
                entries[slot.name] = entry
        self.flat, self._entries = flat, entries

    # Planes

    def _plane(self, held: Held, place: Place) -> Plane:
        plane = self._planes.get((held, place))
        if plane is None:
            spec = self.raw_spec if held is Held.RAW else self.sum_spec
            base, end = self._span(place)
            tier = self.tier if place is Place.REST else Tier.HOST
            what = f"{self.flat.unit} gradients"
            plane = Plane(self.memory, spec, end, tier, kind="gradients", what=what, zero=False, base=base)
            self._planes[held, place] = plane
        return plane

    def _span(self, place: Place) -> tuple[int, int]:
        """The elements of the planes at `place`: on nvme, parameters smaller than a block are apart."""
        lo, hi = self.lo, self.flat.trainable_end if self.hi is None else self.hi
        if self.tier is not Tier.NVME:
            return lo, hi
        shared = min(max(self.flat.shared_start, lo), hi)
        return (shared, hi) if place is Place.APART else (lo, shared)

    def _place(self, entry: _Entry) -> Place:
        if self.tier is not Tier.NVME:
            return Place.REST
        return Place.APART if entry.slot.small else Place.GATHERING if entry.gathering else Place.REST

    def planes(self) -> list[Plane]:
        """Those that there are."""
        return list(self._planes.values())

    def _locate(self, entry: _Entry, held: Held) -> Plane:
        """The plane of kind `held` that the parameter's gradient is in."""
        return self._plane(held, self._place(entry))

    # Arrival

    def add(self, name: str, gradient: Tensor, queue: SlotQueue) -> None:
        """Adds one contribution: a device tensor of the parameter's shape and dtype."""
        entry = self._entries[name]
        slot, first = entry.slot, entry.held is Held.NOTHING
        if first and not slot.large and slot.numel and gradient.dtype == self.raw_spec.dtype:
            if not self._late:
                self._locate(entry, Held.RAW)  # refused now, if there is no room
            entry.held, entry.partials = Held.RAW, None
            entry.late = gradient.detach() if gradient.requires_grad else gradient
            self._late.append(entry)
            return
        self.settle(entry)
        target = Held.RAW if first or self._one_plane else Held.SUM
        self._put(entry, _flattened(gradient, self.raw_spec.dtype), target, queue)

    @property
    def _one_plane(self) -> bool:
        return self.raw_spec.dtype == self.sum_spec.dtype

    def _put(self, entry: _Entry, gradient: Tensor, target: Held, queue: SlotQueue) -> None:
        """Adds a contiguous 1-D device tensor to what is held; the result rests in the `target` plane."""
        entry.partials = None
        if entry.slot.numel:
            self._gather(entry, target, queue)
            plane = self._locate(entry, target)
            if plane.tier is Tier.NVME:
                self._add_streamed(entry, gradient, target, queue)
            elif plane.tier is Tier.DEVICE or self._near:
                self._add_in_place(entry, gradient, target, 0)
            elif entry.held is Held.NOTHING:
                out = plane.view(*self._range(entry))
                entry.pending = (self.memory.copy_out(out, gradient), gradient)
            else:
                self._add_transferred(entry, gradient, target, queue)
        entry.held = target

    def _gather(self, entry: _Entry, target: Held, queue: SlotQueue) -> None:
        """Decides whether the next contribution is summed in host memory, see [Note: gathering]."""
        if self.tier is not Tier.NVME or entry.slot.small or (entry.held is not Held.NOTHING and not entry.gathering):
            return
        if (target, Place.GATHERING) in self._planes:
            entry.gathering = True
            return
        queue.wait_for_other_writes(_GATHERED_AT_ONCE)
        try:
            self._plane(target, Place.GATHERING)
        except BudgetError:
            if entry.gathering:  # its sum takes more room than what has arrived so far
                self._rest([entry], queue)
            return
        entry.gathering = True

    def rest(self, queue: SlotQueue) -> None:
        """Starts to write what has been gathered; `queue` knows when it is done."""
        gathered = [e for e in self._entries.values() if e.gathering]
        moving = [e for e in gathered if e.held is not Held.NOTHING]
        if moving:
            self._rest(moving, queue)
        if not self._taken and len(moving) == len(gathered):
            for held in (Held.RAW, Held.SUM):
                plane = self._planes.pop((held, Place.GATHERING), None)
                if plane is not None:
                    plane.free()  # writes under way keep the memory
        self._let_go_of_first()

    def _let_go_of_first(self) -> None:
        """Once all are sums, the plane of first contributions is of no use until the next step."""
        held = {entry.held for entry in self._entries.values() if entry.held is not Held.NOTHING}
        if self._taken or self._late or held != {Held.SUM}:
            return
        plane = self._planes.get((Held.RAW, Place.REST))
        if plane is not None and plane.tier is not Tier.NVME:
            del self._planes[Held.RAW, Place.REST]
            plane.free()

    def _rest(self, entries: Sequence[_Entry], queue: SlotQueue) -> None:
        tickets = []
        for held in (Held.RAW, Held.SUM):
            pieces: list[list[int]] = []
            for entry in entries:
                if entry.held is not held:
                    continue
                self.square_sums(entry.slot)
                # The rest of its last block is nobody's.
                lo, hi = entry.slot.offset, ceil_to(entry.slot.end, BLOCK)
                if pieces and pieces[-1][1] == lo:
                    pieces[-1][1] = hi
                else:
                    pieces.append([lo, hi])
            for lo, hi in pieces:
                source = self._plane(held, Place.GATHERING).view(lo, hi)
                tickets.append(self._plane(held, Place.REST).submit_write(lo, hi, source))
        for entry in entries:
            entry.gathering = False
        queue.add_writes(tickets)

    def _range(self, entry: _Entry, start: int = 0, stop: int | None = None) -> tuple[int, int]:
        """The elements `[start, stop)` of the parameter as elements of the flat."""
        offset = entry.slot.offset
        return offset + start, offset + (entry.slot.numel if stop is None else stop)

    def _add_in_place(self, entry: _Entry, gradient: Tensor, target: Held, start: int) -> None:
        """Adds `gradient`, elements from `start` of the parameter on, where the plane can be addressed by whoever holds
        the gradient.
        """
        plane = self._locate(entry, target)
        stop = start + gradient.numel()
        out = plane.view(*self._range(entry, start, stop))
        if entry.held is Held.NOTHING:
            whole = start == 0 and gradient.numel() == entry.slot.numel
            if whole and out.device.type == gradient.device.type == "cpu":
                entry.partials = kernels.copy_square_sums(out, gradient)  # most often there is but one contribution
            else:
                out.copy_(gradient)
            return
        if entry.held is not target:
            before = self._locate(entry, entry.held)
            out.copy_(before.view(*self._range(entry, start, stop)))
        kernels.accumulate_(out, gradient)

    def _add_transferred(self, entry: _Entry, gradient: Tensor, target: Held, queue: SlotQueue) -> None:
        """Adds to a host plane from a device with memory of its own, piece by piece through a staging slot."""
        for start in range(0, gradient.numel(), self.chunk):
            piece = gradient[start : start + self.chunk]
            staging = queue.acquire()
            try:
                landed = Carver(staging).take(piece.numel(), piece.dtype)
                self.memory.copy_out(landed, piece).wait()
                self._add_in_place(entry, landed, target, start)
            finally:
                queue.give_back(staging, [])

    def _add_streamed(self, entry: _Entry, gradient: Tensor, target: Held, queue: SlotQueue) -> None:
        """Adds to an nvme plane piece by piece through a staging slot: read, add, write back; the sums of squares on
        the way.
        """
        slot = entry.slot
        plane = self._locate(entry, target)
        if entry.held is not Held.NOTHING:
            queue.drain()  # what is read below may still be on its way to the disk
        partials = []
        for lo, hi in self.flat.chunks(self.chunk, slot.offset, slot.end):
            staging = queue.acquire()
            after: list[Completion] = []
            try:
                carver = Carver(staging)
                landed = gradient[lo - slot.offset : hi - slot.offset]
                if not self._near:
                    piece, landed = landed, carver.take(hi - lo, gradient.dtype)
                    self.memory.copy_out(landed, piece).wait()
                total = carver.take(hi - lo, plane.spec.dtype)
                if entry.held is Held.NOTHING:
                    total.copy_(landed)
                else:
                    before = self._locate(entry, entry.held)
                    earlier = total if before is plane else carver.take(hi - lo, before.spec.dtype)
                    before.submit_read(lo, hi, earlier).wait()
                    if before is not plane:
                        total.copy_(earlier)
                    kernels.accumulate_(total, landed)
                partials.append(kernels.square_sums(total))
                after.append(plane.submit_write(lo, hi, total))
            finally:
                queue.give_back(staging, after)
        entry.partials = torch.cat(partials)

    def _move_late(self) -> None:
        """Copies first contributions that were kept as they came."""
        late, self._late = self._late, []
        plane = self._locate(late[0], Held.RAW)
        assert plane.tensor is not None
        base = plane.base
        if plane.tier is Tier.DEVICE or self._near:
            _copy_all(plane.tensor, base, late)
        else:
            for run in self._runs(late):
                lo, hi = run[0].slot.offset, run[-1].slot.end
                packed = torch.empty(hi - lo, dtype=self.raw_spec.dtype, device=run[0].late.device)  # type: ignore[union-attr]
                _copy_all(packed, lo, run)
                copied = (self.memory.copy_out(plane.view(lo, hi), packed), packed)
                for entry in run:
                    entry.pending = copied
        for entry in late:
            entry.late = None

    def _runs(self, late: list[_Entry]) -> Iterator[list[_Entry]]:
        """Those that lie side by side together: a copy over all of a run meets no other parameter."""
        place = {name: index for index, name in enumerate(self._entries)}
        run: list[_Entry] = []
        for entry in sorted(late, key=_where):
            if run and place[entry.slot.name] != place[run[-1].slot.name] + 1:
                yield run
                run = []
            run.append(entry)
        if run:
            yield run

    def settle(self, entry: _Entry) -> None:
        """Waits until a first contribution is where it rests."""
        if entry.late is not None:
            self._move_late()
        if entry.pending is not None:
            entry.pending[0].wait()
            entry.pending = None

    # Use

    def held(self, name: str) -> Held:
        entry = self._entries.get(name)
        return Held.NOTHING if entry is None else entry.held

    def settle_all(self) -> None:
        """Waits for every first contribution on its way, which lets go of the device's gradients."""
        if self._late:
            self._move_late()
        for entry in self._entries.values():
            if entry.pending is not None:
                self.settle(entry)

    def square_sums(self, slot: Slot) -> Tensor:
        """fp64 sums of squares per block of the parameter at `slot`, of what is held of its accumulated gradient."""
        entry = self._entries.get(slot.name)
        if entry is None or entry.held is Held.NOTHING or entry.slot.numel == 0:
            return torch.zeros(0, dtype=torch.float64)
        self.settle(entry)
        if entry.partials is None:
            plane = self._locate(entry, entry.held)
            entry.partials = kernels.square_sums(plane.view(*self._range(entry))).cpu()
        return entry.partials

    def sum_squares(self) -> None:
        """Has `square_sums` of every parameter known, as far as the CPU can address the gradients: in one call."""
        self.settle_all()
        entries, parts = [], []
        for entry in self._entries.values():
            if entry.held is Held.NOTHING or entry.partials is not None or entry.slot.numel == 0:
                continue
            plane = self._locate(entry, entry.held)
            if plane.tensor is not None and plane.on_host:
                entries.append(entry)
                parts.append((plane.tensor, entry.slot.offset - plane.base, entry.slot.numel))
        for entry, sums in zip(entries, kernels.square_sums_of(parts), strict=True):
            entry.partials = sums

    def take(self) -> TakenGradients:
        """Hands what has been summed over to a step: from now on no gradient is held here.

        The values rest where they are until the step lets go of them, and before that no new gradient may arrive.
        """
        self.settle_all()
        held = {
            name: (entry.held, self._place(entry))
            for name, entry in self._entries.items()
            if entry.held is not Held.NOTHING
        }
        self._forget(self._entries.values())
        self._taken = True
        return TakenGradients(self, held)

    @staticmethod
    def _forget(entries: Iterable[_Entry]) -> None:
        for entry in entries:
            entry.held, entry.partials, entry.gathering = Held.NOTHING, None, False

    def fill(self, out: Tensor, queue: SlotQueue, *, origin: int = 0) -> None:
        """Copies all that is held to `out`, memory for the flat's elements from `origin` on in any dtype; the rest is
        zero. What is written to nvme must have been waited for.
        """
        self.settle_all()
        out.zero_()
        for entry in self._entries.values():
            if entry.held is Held.NOTHING or entry.slot.numel == 0:
                continue
            plane = self._locate(entry, entry.held)
            if plane.on_host or (plane.tensor is not None and out.device == plane.tensor.device):
                lo, hi = self._range(entry)
                out[lo - origin : hi - origin].copy_(plane.view(lo, hi))
                continue
            for lo, hi in self.flat.chunks(self.chunk, *self._range(entry)):
                staging = queue.acquire()
                try:
                    stop = min(ceil_to(hi, BLOCK), plane.end)
                    piece = Carver(staging).take(stop - lo, plane.spec.dtype)
                    plane.read(lo, stop, piece)
                    out[lo - origin : hi - origin].copy_(piece[: hi - lo])
                finally:
                    queue.give_back(staging, [])

    def part(self, name: str) -> Slot | None:
        """The part of a parameter whose gradient is held here; None if it is elsewhere."""
        entry = self._entries.get(name)
        return None if entry is None else entry.slot

    def names(self) -> list[str]:
        """Parameters of which something is held."""
        return [name for name, entry in self._entries.items() if entry.held is not Held.NOTHING]

    def read(self, name: str, queue: SlotQueue) -> Tensor | None:
        """The accumulated gradient as a new 1-D CPU tensor in the accumulation dtype, or None if none arrived."""
        entry = self._entries[name]
        if entry.held is Held.NOTHING:
            return None
        self.settle(entry)
        queue.drain()
        slot = entry.slot
        out = torch.empty(slot.numel, dtype=self.sum_spec.dtype)
        if slot.numel == 0:
            return out
        plane = self._locate(entry, entry.held)
        landed = torch.empty(slot.numel, dtype=plane.spec.dtype)
        plane.read(*self._range(entry), landed)
        return out.copy_(landed)

    def replace(self, name: str, value: Tensor, queue: SlotQueue) -> None:
        """Makes `value` (the parameter's shape, on the device) the gradient, as if it were the only contribution.

        A value in another dtype than the parameter's rests in the accumulation dtype, as a sum would.
        """
        entry = self._entries[name]
        if value.numel() != entry.slot.numel:
            raise GradientError(f"{name}: a gradient of {value.numel()} elements for a parameter of {entry.slot.numel}")
        self.settle(entry)
        queue.drain()
        entry.held, entry.gathering = Held.NOTHING, False
        raw = self._one_plane or value.dtype == self.raw_spec.dtype
        dtype = (self.raw_spec if raw else self.sum_spec).dtype
        self._put(entry, _flattened(value, dtype), Held.RAW if raw else Held.SUM, queue)

    def drop(self, name: str | None = None) -> None:
        """Forgets one gradient or all, and gives memory back once none is left."""
        dropped = list(self._entries.values()) if name is None else [self._entries[name]]
        self._late = [entry for entry in self._late if entry not in dropped] if name is not None else []
        for entry in dropped:
            entry.late = None
            self.settle(entry)
            self._forget([entry])
        self._shrink()

    def _shrink(self) -> None:
        if not self._taken and all(entry.held is Held.NOTHING for entry in self._entries.values()):
            for key, plane in list(self._planes.items()):
                # Extents are kept: their disk space was promised to this run. The optimizer's thread comes here when an
                # update ends, and backward may call `rest` meanwhile: who takes a plane out is who frees it.
                if plane.tier is not Tier.NVME and self._planes.pop(key, None) is not None:
                    plane.free()

    def close(self) -> None:
        self._late = []
        for plane in self._planes.values():
            plane.free()
        self._planes.clear()


class TakenGradients:
    """The gradients of one flat that a step works on. `release()` when the step is over."""

    def __init__(self, gradients: FlatGradients, held: Mapping[str, Where]) -> None:
        self._gradients, self._held = gradients, held

    def where(self, name: str) -> Where:
        """The plane that the gradient of a parameter is in, of which something is here."""
        return self._held[name]

    def operands(
        self, lo: int, hi: int, planes: Iterable[Where], carver: Carver, *, on_device: bool
    ) -> GradientOperands:
        """What `planes` hold of the elements `[lo, hi)`."""
        return GradientOperands(self._gradients, planes, lo, hi, carver, on_device=on_device)

    def staged(self, planes: Iterable[Where]) -> list[PlaneSpec]:
        """Those of `planes` that a kernel on the host works on copies of."""
        found = [self._gradients._plane(*where) for where in planes]
        return [plane.spec for plane in found if plane.staged]

    def release(self) -> None:
        """Gives the memory back. Idempotent."""
        self._gradients._taken = False
        self._gradients._shrink()


class GradientOperands:
    """The gradients of one chunk, brought to where the kernel runs."""

    def __init__(
        self,
        gradients: FlatGradients,
        planes: Iterable[Where],
        lo: int,
        hi: int,
        carver: Carver,
        *,
        on_device: bool,
    ) -> None:
        self._parts: dict[Where, Operand] = {}
        for kind, place in planes:
            start, stop = gradients._span(place)
            plane = gradients._plane(kind, place)
            part = Operand(plane, max(lo, start), min(hi, stop), carver, on_device=on_device)
            self._parts[kind, place] = part

    @property
    def parts(self) -> list[Operand]:
        return list(self._parts.values())

    def fetch(self) -> None:
        for part in self._parts.values():
            part.fetch()

    def ready(self) -> None:
        for part in self._parts.values():
            part.ready()

    def place(self, where: Where, lo: int) -> tuple[Tensor, int]:
        """The tensor that is this plane, and where in it the flat's element `lo` is."""
        part = self._parts[where]
        return part.tensor, lo - part.lo


def _copy_all(target: Tensor, base: int, entries: list[_Entry]) -> None:
    """Copies the late gradients of `entries` to their places in `target`, which begins at the flat's element `base`."""
    # Those that lie side by side go together: a unit may have very many, and a call for each costs more than its bytes.
    run: list[Tensor] = []
    start = stop = 0
    for entry in sorted(entries, key=_where):
        gradient, slot = entry.late, entry.slot
        assert gradient is not None
        if run and slot.offset != stop:
            torch.cat(run, out=target[start - base : stop - base])
            run = []
        if not run:
            start = slot.offset
        stop = slot.offset + slot.numel
        run.append(gradient if gradient.dim() == 1 else gradient.reshape(-1))
    if run:
        torch.cat(run, out=target[start - base : stop - base])


def _flattened(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.detach().reshape(-1).to(dtype).contiguous()  # a 1-D view may have any stride


def planned_bytes(dtype: torch.dtype, elements: int, accumulate: torch.dtype) -> int:
    """Bytes that the gradients of so many elements may take: one contribution in `dtype` and, where that differs, a
    sum.
    """
    return elements * (dtype.itemsize if dtype == accumulate else dtype.itemsize + accumulate.itemsize)


def norm_factor(norm: float, max_norm: float | None) -> float:
    """min(1, max_norm / (norm + 1e-6)), as `torch.nn.utils.clip_grad_norm_`: 0 for an infinite norm, NaN for NaN; 1
    without a limit.
    """
    if max_norm is None:
        return 1.0
    return min(max_norm / (norm + 1e-6), 1.0) if not math.isnan(norm) else norm
