"""The CPU as the device: device memory is host memory and every copy is done when it returns."""

from __future__ import annotations

from collections.abc import Sequence

import psutil
import torch
from torch import Tensor

from .arena import HostArena
from .protocol import COMPLETED, Device, Event, check_copy


class CpuDevice(Device):
    """``capacity`` caps the bytes of ``empty``, recycled buffers included; None leaves them to the system."""

    kind = "cpu"
    aliases_host = True

    def __init__(self, *, capacity: int | None = None) -> None:
        self.torch_device = torch.device("cpu")
        self.capacity = capacity
        self._arena = HostArena(self.kind, capacity)

    def empty(self, nbytes: int, *, what: str = "") -> Tensor:
        return self._arena.empty(nbytes, what)

    @property
    def used(self) -> int:
        return self._arena.used

    @property
    def peak(self) -> int:
        return self._arena.peak

    def copy_in(self, dst: Tensor, src: Tensor, *, after: Sequence[Event] = ()) -> Event:
        return self._copy(dst, src, after)

    def copy_out(self, dst: Tensor, src: Tensor, *, after: Sequence[Event] = ()) -> Event:
        return self._copy(dst, src, after)

    def _copy(self, dst: Tensor, src: Tensor, after: Sequence[Event]) -> Event:
        check_copy(dst, src)
        for event in after:
            event.wait()
        # `.data` keeps the move out of autograd's version counters, as a copy on a stream is.
        dst.data.view(-1).copy_(src.data.view(-1))
        return COMPLETED

    def record(self) -> Event:
        return COMPLETED

    def compute_wait(self, event: Event) -> None:
        event.wait()

    def synchronize(self) -> None:
        return None

    def close(self) -> None:
        self._arena.close()

    def memory_info(self) -> tuple[int, int]:
        return host_memory_info(self.capacity, self.used)


def host_memory_info(capacity: int | None, used: int) -> tuple[int, int]:
    """(free, total) bytes of a device that lives in host memory."""
    memory = psutil.virtual_memory()
    available, total = int(memory.available), int(memory.total)
    if capacity is None:
        return available, total
    return min(max(capacity - used, 0), available), capacity
