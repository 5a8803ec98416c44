"""What the memory manager asks of a device: memory, one compute stream, two copy streams, events.

The contract, in three sentences that every implementation keeps and the simulated device checks:

1. ``copy_in`` and ``copy_out`` return at once; the bytes are there when the returned event is done, and computation
   reads them only after ``compute_wait`` (or, on the host, after ``Event.wait``).
2. The caller keeps ``dst`` and ``src`` alive until that event is done and writes neither before. A tensor and the
   event that guards it belong in one object.
3. Copies of one direction run in the order they were issued; across directions only ``after`` orders them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor


class DeviceOutOfMemory(RuntimeError):
    """A buffer does not fit. Carries ``what``, and ``requested``, ``used`` and ``capacity`` in bytes."""

    def __init__(self, kind: str, what: str, requested: int, used: int, capacity: int | None, detail: str = "") -> None:
        self.what = what
        self.requested = requested
        self.used = used
        self.capacity = capacity
        limit = "no set capacity" if capacity is None else f"a capacity of {capacity:,} bytes"
        super().__init__(
            f"out of {kind} device memory: {what or 'a buffer'} needs {requested:,} bytes, {used:,} bytes are in use "
            f"of {limit}{'; ' + detail if detail else ''}; "
            "raise memory.device, or use smaller units or fewer prefetched ones"
        )


class CopyError(RuntimeError):
    """A copy did not happen; the cause is chained. Raised by ``Event.wait``."""


class Event(ABC):
    """Completion of the work issued before it."""

    __slots__ = ("__weakref__",)

    @abstractmethod
    def done(self) -> bool:
        """Whether the work has ended, well or badly. Never blocks."""

    @abstractmethod
    def wait(self, timeout: float | None = None) -> None:
        """Block the calling thread until the work has ended. Signals interrupt it and the GIL is free meanwhile.

        Raises ``TimeoutError`` after ``timeout`` seconds and ``CopyError`` if the copy failed (every time it is asked).
        """


class CompletedEvent(Event):
    """An event of work that had ended when it was recorded."""

    __slots__ = ()

    def done(self) -> bool:
        return True

    def wait(self, timeout: float | None = None) -> None:
        return None


COMPLETED = CompletedEvent()


class Device(ABC):
    """Memory and copy streams of one device. Methods may be called from any thread.

    ``aliases_host`` says that device memory is host memory: callers can compute on host buffers and skip copies.
    """

    kind: str
    torch_device: torch.device
    aliases_host: bool
    capacity: int | None

    @abstractmethod
    def empty(self, nbytes: int, *, what: str = "") -> Tensor:
        """An uninitialised uint8 tensor of shape (nbytes,) with a Storage of its own, aligned to 256 bytes or more.

        The bytes come back when the last view of that Storage dies, wherever it is held. ``what`` names the buffer in
        ``DeviceOutOfMemory``.
        """

    @property
    @abstractmethod
    def used(self) -> int:
        """Bytes of the buffers that are alive, as the device rounds them."""

    @property
    @abstractmethod
    def peak(self) -> int:
        """The largest ``used`` so far, in bytes."""

    @abstractmethod
    def copy_in(self, dst: Tensor, src: Tensor, *, after: Sequence[Event] = ()) -> Event:
        """Copy host ``src`` to device ``dst``, after the given events and the compute work issued so far.

        Both are contiguous with one dtype and element count, else ``ValueError``. The compute work comes first because
        it may still read what ``dst`` held before.
        """

    @abstractmethod
    def copy_out(self, dst: Tensor, src: Tensor, *, after: Sequence[Event] = ()) -> Event:
        """Copy device ``src`` to host ``dst``, after the given events and the compute work issued so far."""

    @abstractmethod
    def record(self) -> Event:
        """An event that is done when the compute work issued so far on the current stream is."""

    @abstractmethod
    def compute_wait(self, event: Event) -> None:
        """Order later compute work of the current stream after ``event``. Blocks the host only where it computes."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until nothing issued so far is still running. Errors of copies stay with their events."""

    @abstractmethod
    def close(self) -> None:
        """Stop the copy streams and give up unused memory; copies that have not run fail. Idempotent.

        Tensors still held elsewhere keep their memory.
        """

    @abstractmethod
    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes, within ``capacity`` where one is set."""

    def host_register(self, ptr: int, nbytes: int) -> None:  # noqa: B027 - only CUDA has page-locking to do
        """Page-lock host memory for asynchronous copies; ``RuntimeError`` if the system refuses."""

    def host_unregister(self, ptr: int) -> None:  # noqa: B027
        """Undo ``host_register`` of the range that begins at ``ptr``."""

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def check_copy(dst: Tensor, src: Tensor) -> int:
    """The bytes to copy, or ``ValueError`` if the two tensors are not contiguous or do not match."""
    for role, tensor in (("dst", dst), ("src", src)):
        if not tensor.is_contiguous():
            raise ValueError(
                f"{role} of a copy must be contiguous, got shape {tuple(tensor.shape)} with strides {tensor.stride()}"
            )
    if dst.dtype != src.dtype or dst.numel() != src.numel():
        raise ValueError(
            f"dst and src of a copy must match, got {dst.numel():,} elements of {dst.dtype} "
            f"and {src.numel():,} of {src.dtype}"
        )
    return src.numel() * src.element_size()


def check_size(nbytes: int, what: str) -> None:
    """``ValueError`` for a negative buffer size."""
    if nbytes < 0:
        raise ValueError(f"the size of {what or 'a buffer'} must not be negative, got {nbytes} bytes")
