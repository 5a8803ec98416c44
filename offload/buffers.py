"""Device buffers of flats while their units are loaded, with the views that parameters show of them.

A buffer is one Storage. As a rule each load makes a new one, and its bytes come back when the last view of it dies. To
make a buffer and its views costs more than to fill them where parameters are many and small, so while other units are
being loaded ahead, the buffer of a unit that comes to rest waits for a unit that is laid out alike.

[Note: nobody else] Only a buffer of which nobody but us has a view may be filled with other weights: the Storage's own
count of its users says so. The views that we keep never leave: parameters and graphs get tensors of their own over the
same memory, each of which counts, as does an array and a transfer. Who has the Storage's Python object does not count
there, so those are counted by Python. Other processes do not count: to share a Storage with them puts other memory into
it, which shows. Only on the CPU, where nothing that no count shows, such as a copy stream, works on memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from offload.layout import Slot, contiguous_strides
from offload.tiers import TierMemory

Place = tuple[tuple[int, ...], tuple[int, ...], int]
"""Shape, strides and offset in elements of one parameter's data."""

_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


class Layout:
    """Where the parameters of a flat lie in its buffer. Equal ones are one object per `Buffers`."""

    __slots__ = ("dtype", "nbytes", "numel", "places")

    def __init__(self, numel: int, dtype: torch.dtype, places: tuple[Place, ...]) -> None:
        self.numel, self.dtype, self.places = numel, dtype, places
        self.nbytes = numel * dtype.itemsize


class Loaded:
    """A buffer, and views of it, one for each parameter: not to be handed out, see [Note: nobody else]."""

    __slots__ = ("_address", "_addresses", "_alone", "_storage", "layout", "tensor", "views")

    def __init__(self, tensor: Tensor, layout: Layout) -> None:
        """`tensor`: new, known to nobody else."""
        self.tensor, self.layout = tensor, layout
        self._storage: int = tensor.untyped_storage()._cdata
        self._address = tensor.data_ptr()
        self._alone = (0 if _count is None else _count(self._storage), self._references())
        self.views: list[Tensor] = []
        """Of each parameter's place, in the order of the layout, once `show` has made them."""
        self._addresses: list[int] = []

    def show(self) -> list[Tensor]:
        """The views, made if there are none."""
        if not self.views:
            tensor, places = self.tensor, self.layout.places
            base = tensor.storage_offset()
            with torch.inference_mode(False), torch.no_grad():
                # A view as autograd sees it would hold the tensor that it was made from as well.
                made = [tensor.as_strided(shape, strides, base + start).data for shape, strides, start in places]
            self._addresses = [view.data_ptr() for view in made]
            self.views = made
        return self.views

    @property
    def addresses(self) -> list[int]:
        """Where the views begin in memory, as `data_ptr()` says it."""
        self.show()
        return self._addresses

    @property
    def alone(self) -> bool:
        """Whether nobody else has a view of the buffer; False if that is not known."""
        if _count is None or self.tensor.data_ptr() != self._address:
            return False
        return (_count(self._storage) - len(self.views), self._references()) == self._alone

    def _references(self) -> int:
        """To the Storage's Python object."""
        return sys.getrefcount(self.tensor.untyped_storage())


class Buffers:
    """Buffers of units that are loaded, and those that wait for the next one. Its user has a lock."""

    def __init__(self, memory: TierMemory) -> None:
        self._memory = memory
        self._layouts: dict[Any, Layout] = {}
        self._idle: list[Loaded] = []
        self._keeps = memory.device.kind == "cpu" and _count is not None

    def layout(self, numel: int, dtype: torch.dtype, slots: Sequence[Slot]) -> Layout:
        """The layout of a buffer of `numel` elements that has parameters at `slots`."""
        key = numel, dtype, tuple((slot.shape, contiguous_strides(slot.shape), slot.offset) for slot in slots)
        found = self._layouts.get(key)
        if found is None:
            found = self._layouts[key] = Layout(*key)
        return found

    def take(self, layout: Layout, what: str) -> Loaded:
        """A buffer whose contents are undefined. Nothing waits beside a new one: what loads take is what it would be
        if every one made its own.

        Raises:
            BudgetError, DeviceOutOfMemory: memory.device has no room for it.
        """
        index = next((i for i, loaded in enumerate(self._idle) if loaded.layout is layout), None)
        if index is not None:
            return self._idle.pop(index)
        self._idle.clear()
        return Loaded(self._memory.on_device(layout.numel, layout.dtype, "leases", what), layout)

    def give_back(self, loaded: Loaded) -> None:
        """Keeps a buffer for the next one to take, if it may be."""
        if self._keeps and loaded.alone:
            self._idle.append(loaded)

    def drop(self) -> bool:
        """Lets go of the buffers that wait; False if there are none."""
        had = bool(self._idle)
        self._idle.clear()
        return had

    @property
    def idle_bytes(self) -> int:
        """Bytes of the device that buffers which wait take."""
        return sum(loaded.layout.nbytes for loaded in self._idle) if self._idle else 0
