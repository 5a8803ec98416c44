"""Devices: memory, streams, events and copies behind one protocol, on CUDA, on the CPU, and simulated."""

from __future__ import annotations

import torch

from .cpu import CpuDevice
from .cuda import CudaDevice
from .protocol import COMPLETED, CopyError, Device, DeviceOutOfMemory, Event
from .sim import DEFAULT_DELAY, SimDevice

__all__ = [
    "COMPLETED",
    "CopyError",
    "CpuDevice",
    "CudaDevice",
    "Device",
    "DeviceOutOfMemory",
    "Event",
    "SimDevice",
    "create_device",
]


def create_device(
    kind: str,
    *,
    capacity: int | None = None,
    seed: int = 0,
    delay: float | tuple[float, float] = DEFAULT_DELAY,
    index: int = 0,
) -> Device:
    """The device called ``kind``: ``cuda``, ``cpu``, ``sim``, or ``auto`` (CUDA if there is one, else the CPU).

    ``capacity``: bytes that its buffers may take. ``seed`` and ``delay`` (seconds, see ``SimDevice``) shape the
    simulated streams; ``index`` picks the GPU. ``ValueError`` for an unknown kind, or for CUDA where there is none.
    """
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        return CpuDevice(capacity=capacity)
    if kind == "sim":
        return SimDevice(capacity=capacity, seed=seed, delay=delay)
    if kind == "cuda":
        return CudaDevice(capacity=capacity, index=index)
    raise ValueError(f"device must be one of auto, cuda, cpu, sim, got {kind!r}")
