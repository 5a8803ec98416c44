"""Host mirrors of parameters on an accelerator: exact-size pinned buffers, copies that overlap the backward pass."""

from __future__ import annotations

import mmap
import weakref
from typing import Any

import torch
from torch import Tensor

_PAGE = mmap.PAGESIZE


def pinned(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised 1-D host tensor, page-locked for `device`: whole pages, not the next power of two.

    RuntimeError naming the bytes and the remedy if the driver refuses to lock them.
    """
    nbytes = -(-max(numel * dtype.itemsize, 1) // _PAGE) * _PAGE
    pages = mmap.mmap(-1, nbytes)
    tensor = torch.frombuffer(pages, dtype=dtype, count=numel) if numel else torch.empty(0, dtype=dtype)
    if device.type == "cuda" and numel:
        cuda: Any = torch.cuda
        runtime = cuda.cudart()
        address = tensor.data_ptr()
        status = int(runtime.cudaHostRegister(address, nbytes, 0))
        if status != 0:
            raise RuntimeError(
                f"cannot page-lock {nbytes} bytes for gradients and weights (CUDA error {status}); raise the memlock "
                "limit (ulimit -l) or the memory of the container"
            )
        weakref.finalize(tensor.untyped_storage(), _unregister, runtime, address, pages)
    return tensor


def _unregister(runtime: Any, address: int, pages: mmap.mmap) -> None:
    del pages  # held until here, so that the pages outlive their registration
    runtime.cudaHostUnregister(address)


def needs_mirror(parameter: Tensor) -> bool:
    """True for parameters that the CPU cannot address."""
    return parameter.device.type != "cpu"


class HostMirror:
    """The gradient and the weight of one accelerator parameter in host memory.

    Gradients are copied as autograd produces them, on a stream of their own; weights are sent back after the step. The
    events say when each copy has ended: a buffer is not touched before its event.
    """

    def __init__(self, parameter: Tensor) -> None:
        device = parameter.device
        self._parameter = parameter
        self._runtime: Any = torch.get_device_module(device)
        self._stream: Any = self._runtime.Stream(device)
        self._weight: Tensor | None = None
        self._grad: Tensor | None = None
        self._copied: tuple[int, int] | None = None  # address and version of the gradient in flight
        self._grad_done: Any = None
        self._weight_done: Any = None
        self._hook: Any = None
        if parameter.requires_grad:
            hooked: Any = parameter
            reference = weakref.ref(self)

            def arrived(owner: Tensor) -> None:
                mirror = reference()
                if mirror is not None and owner.grad is not None and owner.grad.layout == torch.strided:
                    mirror._fetch(owner.grad)

            self._hook = hooked.register_post_accumulate_grad_hook(arrived)

    def _buffer(self) -> Tensor:
        return pinned(self._parameter.numel(), self._parameter.dtype, self._parameter.device)

    def _fetch(self, grad: Tensor) -> None:
        """Start copying `grad` to the host; a later call replaces it (accumulation)."""
        if not grad.is_contiguous() or grad.dtype != self._parameter.dtype:
            return  # the step will name it
        if self._grad is None:
            self._grad = self._buffer()
        # The hook may run on an autograd thread: the producing stream is the current one there.
        self._stream.wait_stream(self._runtime.current_stream(grad.device))
        with self._runtime.stream(self._stream):
            self._grad.copy_(grad.detach().view(-1), non_blocking=True)
            self._grad_done = self._stream.record_event()
        grad.record_stream(self._stream)
        self._copied = (grad.data_ptr(), grad._version)

    def gradient(self, grad: Tensor) -> Tensor:
        """The gradient in host memory, complete; copied again if it was changed since it arrived (clipping)."""
        if self._grad is None or self._copied != (grad.data_ptr(), grad._version):
            self._fetch(grad)
        assert self._grad is not None
        self._grad_done.synchronize()
        self._copied = None
        return self._grad

    def weight(self, *, refresh: bool) -> Tensor:
        """The weight in host memory, in the parameter's shape; `refresh` reads it again from the device."""
        if self._weight is None:
            self._weight, refresh = self._buffer(), True
        if self._weight_done is not None:
            self._weight_done.synchronize()
            self._weight_done = None
        if refresh:
            self._weight.copy_(self._parameter.detach().view(-1))
        return self._weight.view(self._parameter.shape)

    def send(self) -> None:
        """Start copying the stepped weight to the device."""
        assert self._weight is not None
        # Kernels of the last backward may still read the parameter.
        self._stream.wait_stream(self._runtime.current_stream(self._parameter.device))
        with self._runtime.stream(self._stream):
            self._parameter.detach().view(-1).copy_(self._weight, non_blocking=True)
            self._weight_done = self._stream.record_event()

    def finish(self) -> None:
        """Make the device's current stream wait for the weight that was sent."""
        if self._weight_done is not None:
            self._runtime.current_stream(self._parameter.device).wait_event(self._weight_done)

    def close(self) -> None:
        """Wait for copies in flight, remove the hook and release the buffers."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        for event in (self._grad_done, self._weight_done):
            if event is not None:
                event.synchronize()
        self._grad = self._weight = self._grad_done = self._weight_done = self._copied = None
