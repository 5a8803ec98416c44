"""Weights as streams of ranges: of an engine, of a checkpoint, of other safetensors files."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from offload.checkpoint.boundary import persistent_buffers
from offload.checkpoint.export import Tensors, target_dtype
from offload.checkpoint.load import Loader
from offload.checkpoint.reader import Source
from offload.checkpoint.weights import TensorFiles
from offload.layout import Slot
from offload.planes import Carver, Operand, SlotQueue
from offload.state import FlatState
from optimizer_cpu import kernels

if TYPE_CHECKING:
    from offload.checkpoint.access import CheckpointAccess

_RANGE = 1 << 20


def engine_tensors(engine: CheckpointAccess, dtype: str | torch.dtype | None) -> list[Tensors]:
    """Every parameter once, and the persistent buffers. In fp32 a trained parameter is its master, else its weight."""
    found = []
    for name, record in engine._records.items():
        state = engine._state(record)
        wanted = target_dtype(dtype, state.flat.dtype)
        read = partial(_from_state, state, record.slot, engine._step_queue, wanted)
        found.append(Tensors(name, wanted, record.slot.shape, read))
    for name, buffer in persistent_buffers(engine.module).items():
        found.append(Tensors(name, buffer.dtype, tuple(buffer.shape), partial(_from_tensor, buffer)))
    return found


def _from_tensor(tensor: Tensor, lo: int, hi: int) -> Iterator[Tensor]:
    yield tensor.detach().cpu().contiguous().reshape(-1)[lo:hi]


def _from_state(
    state: FlatState, slot: Slot, queue: SlotQueue, dtype: torch.dtype, lo: int, hi: int
) -> Iterator[Tensor]:
    """Elements `[lo, hi)` of a parameter chunk by chunk; each chunk's staging slot is back before it is yielded."""
    masters = dtype == torch.float32 and state.flat.dtype != dtype and slot.trainable and bool(state.planes)
    planes = {"weight": state.weight}
    if masters:
        planes = {"master": state.planes["master"]} if "master" in state.planes else {**planes, **state.planes}
    lo, hi = lo + slot.offset, hi + slot.offset
    for first in range(lo // state.chunk * state.chunk, hi, state.chunk):
        end = min(first + state.chunk, *(plane.end for plane in planes.values()))
        start, stop = max(lo, first), min(hi, end)
        staging = queue.acquire()
        try:
            carver = Carver(staging)
            operands = {n: Operand(plane, first, end, carver, on_device=False) for n, plane in planes.items()}
            for operand in operands.values():
                operand.fetch()
            for operand in operands.values():
                operand.ready()
            tensors = {name: operand.tensor for name, operand in operands.items()}
            if masters and "master" not in tensors:
                values = kernels.read(state.fmt.name, tensors).master
            else:
                values = tensors["master" if masters else "weight"]
            part = values[start - first : stop - first].to(dtype, copy=True)
        finally:
            queue.give_back(staging, [])
        yield part


def checkpoint_tensors(source: Source, dtype: str | torch.dtype | None) -> list[Tensors]:
    """Every parameter and buffer of a checkpoint. In fp32 a trained parameter is its master, else its weight."""
    found = []
    loader = Loader(source, {}, None, lambda n: torch.empty(n, dtype=torch.uint8), weights_only=True)
    for name, saved in source.manifest.parameters.items():
        wanted = target_dtype(dtype, saved.dtype)
        found.append(Tensors(name, wanted, saved.shape, partial(_from_source, loader, name, wanted)))
    return [*found, *buffer_tensors(source)]


def buffer_tensors(source: Source) -> list[Tensors]:
    """The persistent buffers of a checkpoint."""
    return [
        Tensors(name, buffer.dtype, buffer.shape, partial(_buffer_of, source, name))
        for name, buffer in source.manifest.buffers.items()
    ]


def _buffer_of(source: Source, name: str, lo: int, hi: int) -> Iterator[Tensor]:
    yield source.read_buffer(name).reshape(-1)[lo:hi]


def _from_source(loader: Loader, name: str, dtype: torch.dtype, lo: int, hi: int) -> Iterator[Tensor]:
    saved = loader.source.manifest.parameters[name]
    for start in range(lo, hi, _RANGE):
        stop = min(hi, start + _RANGE)
        if dtype == torch.float32 and saved.encoding is not None:
            yield loader.decode(name, saved, start, stop)[0]
            continue
        own = torch.empty(stop - start, dtype=saved.dtype)
        loader.read_weight(name, saved, start, stop, own)
        yield own.to(dtype)


def file_tensors(files: TensorFiles, dtype: str | torch.dtype | None) -> list[Tensors]:
    """Every tensor of safetensors files."""
    found = []
    for name in files.names():
        entry = files.entry(name)
        wanted = target_dtype(dtype, entry.dtype)
        found.append(Tensors(name, wanted, entry.shape, partial(_from_files, files, name, wanted)))
    return found


def _from_files(files: TensorFiles, name: str, dtype: torch.dtype, lo: int, hi: int) -> Iterator[Tensor]:
    for start in range(lo, hi, _RANGE):
        yield files.read(name, start, min(hi, start + _RANGE)).to(dtype)
