"""What autograd saves within a unit's forward: views of unit buffers as handles, everything else handed on.

[Note: saved tensors of the user] Only the innermost pair of saved-tensor hooks runs, so everything that is not a view
of a unit goes on to the pair that was in force outside (activation checkpointing, activation offload). Hooks also
switch off autograd's version check, so packing records the version and unpacking compares it: of the parameter for a
view of its memory (a step, and every other change of its value, counts as a write), of the tensor itself for others. A
packed tensor is detached, since one that holds its own graph would never be freed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from offload.errors import OffloadError
from offload.held import RECORD
from offload.layout import contiguous_strides
from offload.parameters import OffloadedParameter, ParameterRecord
from offload.residency import Residency, Unit

Pack = Callable[[Tensor], Any]
Unpack = Callable[[Any], Tensor]
_internals: Any = torch._C._autograd
_Parameter = nn.Parameter
_made = tuple.__new__  # what a named tuple's own constructor calls, from Python


class Noting(Protocol):
    """Counts what a forward saves."""

    storages: dict[int, int]
    """Bytes of the storages of tensors that are saved and no views of a unit."""


class WeightHandle(NamedTuple):
    """A saved view of a unit's buffer; `record` is the parameter it belongs to, from which `offset` counts: it may be
    laid out elsewhere by the time the view is needed. `whole`: it is all of the parameter, as it is.
    """

    unit: Unit
    record: ParameterRecord
    version: int
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    whole: bool


def view_of(handle: WeightHandle) -> Tensor:
    """The view of its resident unit that a handle stands for."""
    unit, record = handle[0], handle[1]
    flat = unit.flats[record.flat]
    if flat.loaded is not None:
        if handle.whole:
            return flat.loaded.show()[record.position].detach()
        tensor = flat.loaded.tensor
    elif flat.fixed and flat.plane.tensor is not None:
        tensor = flat.plane.tensor
        if handle.whole and type(record.parameter) is OffloadedParameter:
            # Nobody can replace its data now: the parameter is that view.
            with torch._C.DisableTorchFunctionSubclass():
                return record.parameter.detach()
    else:
        raise OffloadError(f"unit {unit.name}: resident without a buffer")
    return tensor.as_strided(handle.shape, handle.stride, record.slot.offset + handle.offset)


class WrittenInPlace(RuntimeError):
    """A tensor that a backward needs was written to."""


def check_version(value: Tensor, version: int) -> Tensor:
    """`value`, if nothing has written to it since it was at `version`; else autograd's own error."""
    if value._version != version:
        raise WrittenInPlace(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{value.type()} {list(value.shape)}] is at version {value._version}; "
            f"expected version {version} instead"
        )
    return value


def top_pair() -> tuple[Pack, Unpack] | None:
    """The pair of saved-tensor hooks in force in this thread."""
    pair: tuple[Pack, Unpack] | None = _internals._top_saved_tensors_default_hooks(True)
    return pair


def all_pairs() -> list[tuple[Pack, Unpack]]:
    """Every pair of this thread, outermost first."""
    pairs = []
    while (pair := top_pair()) is not None:
        pairs.append(pair)
        _internals._pop_saved_tensors_default_hooks()
    pairs.reverse()
    push_pairs(pairs)
    return pairs


def push_pairs(pairs: list[tuple[Pack, Unpack]]) -> None:
    """Puts pairs on top of this thread's."""
    for pair in pairs:
        _internals._push_saved_tensors_default_hooks(*pair)


def pop_hooks(hooks: saved_tensors_hooks) -> None:
    """Takes `hooks` off the stack of saved-tensor hooks, which may have others above it.

    If it is gone, a context of the user was left after an interrupt and took it instead of its own pair, which is then
    on top.
    """
    above: list[Any] = []
    while (top := top_pair()) is not None and top[0] is not hooks.pack_hook:
        above.append(top)
        _internals._pop_saved_tensors_default_hooks()
    if top is None:
        above = above[1:]
    else:
        _internals._pop_saved_tensors_default_hooks()
    push_pairs(above[::-1])


class SavedTensors:
    """Makes the hooks of unit forwards. `resolve` gives the view that a handle stands for."""

    def __init__(self, residency: Residency, resolve: Callable[[WeightHandle], Tensor]) -> None:
        self._residency, self._resolve = residency, resolve
        self._starts: dict[int, list[list[int]]] = {}

    def laid_out(self, unit: Unit) -> None:
        """Takes note of where a unit's parameters are."""
        self._starts[id(unit)] = [[record.slot.offset for record in flat.records] for flat in unit.flats]

    def enter(self, keep: Callable[[Tensor], Any] | None = None, tally: Noting | None = None) -> saved_tensors_hooks:
        """A pair of hooks, in force until `pop_hooks`. `keep` gets what is no view of a unit instead of the pair that
        is in force now, and gives something with a `value()`; `tally` is told of it, and lives until all of it is gone.
        """
        outer = top_pair() if keep is None else None

        # This runs for everything that is saved, twice for each parameter of a model of small ones: no call that can be
        # spared, nothing looked up twice. What is no view of a unit is packed as a plain pair, the cheapest there is:
        # what the outer hooks made of it, or the tensor, detached, with its version where there are none.
        storages, resolve, whole, view = self._residency.storages, self._resolve, self._whole, self._handle
        noted = None if tally is None else tally.storages

        def pack(tensor: Tensor) -> Any:
            try:
                storage = tensor.untyped_storage()
                key = storage._cdata
            except (RuntimeError, NotImplementedError):  # sparse layouts, functional wrappers: no storage
                key = -1
            place = storages.get(key)
            if place is not None:
                handle = whole(tensor, place[0]) if type(tensor) is _Parameter else None
                if handle is None:
                    handle = view(tensor, *place)
                if handle is not None:
                    return handle
            if keep is not None:
                return keep(tensor)
            if noted is not None and key != -1:
                noted[key] = storage.nbytes()
            if outer is not None:
                return outer[0](tensor), -1
            return tensor.detach(), tensor._version

        def unpack(packed: Any, _held: Any = tally) -> Tensor:
            if type(packed) is WeightHandle:
                return resolve(packed)
            if keep is not None:
                return packed.value()  # type: ignore[no-any-return]
            if outer is not None:
                return outer[1](packed[0])
            value, version = packed
            return value if value._version == version else check_version(value, version)

        hooks = saved_tensors_hooks(pack, unpack)
        hooks.__enter__()
        return hooks

    @staticmethod
    def _whole(tensor: Tensor, unit: Unit) -> WeightHandle | None:
        """The handle of an offloaded parameter within its unit's forward, as most of what is saved, if it is where it
        was in the last pass; at another version if a step came between.
        """
        record: ParameterRecord | None = tensor.__dict__.get(RECORD)
        if record is None or record.saved is None:
            return None
        # Its dtype cannot change, nor can it be conjugated, in place.
        known: WeightHandle = record.saved
        _, _, version, offset, shape, stride, _ = known
        if (
            known[0] is not unit
            or tensor.shape != shape
            or tensor.stride() != stride
            or tensor.storage_offset() != record.slot.offset + offset
        ):
            return None
        now = tensor._version + record.replaced
        if version != now:
            known = record.saved = _made(WeightHandle, (unit, record, now, offset, shape, stride, known[6]))
        return known

    def _handle(self, tensor: Tensor, unit: Unit, index: int) -> WeightHandle | None:
        """The handle of a tensor in the memory of a unit's flat `index`; None if it is no view as we know them."""
        flat = unit.flats[index]
        if tensor.dtype != flat.flat.dtype or tensor.is_conj() or tensor.is_neg():
            return None
        shape, stride, offset = tensor.shape, tensor.stride(), int(tensor.storage_offset())
        position = bisect_right(self._starts[id(unit)][index], offset) - 1
        if position < 0:
            return None
        holder = flat.records[position]
        with torch._C.DisableTorchFunctionSubclass():
            version = holder.parameter._version + holder.replaced
        slot = holder.slot
        whole = offset == slot.offset and shape == slot.shape and stride == contiguous_strides(slot.shape)
        found = WeightHandle(unit, holder, version, offset - slot.offset, shape, stride, whole)
        if type(tensor) is _Parameter and tensor.__dict__.get(RECORD) is holder:
            holder.saved = found
        return found
