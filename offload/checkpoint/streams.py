"""Weights as streams of ranges: of an engine, of a checkpoint, of other safetensors files."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from offload.checkpoint.boundary import persistent_buffers
from offload.checkpoint.errors import CheckpointSaveError
from offload.checkpoint.export import Exported, Read, Tensors, target_dtype
from offload.checkpoint.load import Loader
from offload.checkpoint.reader import Source
from offload.checkpoint.weights import TensorFiles
from offload.layout import Slot
from offload.planes import Carver, Operand, SlotQueue
from offload.state import FlatState
from optimizer_cpu import kernels

if TYPE_CHECKING:
    from offload.checkpoint.access import CheckpointAccess
    from offload.parallel.cluster import Cluster

_RANGE = 1 << 20
Ask = Callable[[str, torch.dtype, int, int], Tensor]


def engine_tensors(engine: CheckpointAccess, dtype: str | torch.dtype | None, ask: Ask | None = None) -> list[Tensors]:
    """Every parameter once, and the persistent buffers. In fp32 a trained parameter is its master, else its weight.

    `ask(name, dtype, lo, hi)` brings elements of a parameter that other ranks have a part of.
    """
    found = []
    for name, record in engine._records.items():
        state = engine._state(record)
        wanted = target_dtype(dtype, state.flat.dtype)
        if ask is not None and is_divided(state, record.slot, wanted):
            read: Read = partial(_asked, ask, name, wanted)
        else:
            read = partial(_from_state, state, record.slot, engine._step_queue, wanted)
        found.append(Tensors(name, wanted, record.slot.shape, read))
    for name, buffer in persistent_buffers(engine.module).items():
        found.append(Tensors(name, buffer.dtype, tuple(buffer.shape), partial(_from_tensor, buffer)))
    return found


def is_divided(state: FlatState, slot: Slot, dtype: torch.dtype) -> bool:
    """Whether ranks divide among them what an export in `dtype` reads of a parameter."""
    divides = state.division.divides if _takes_master(state, slot, dtype) else state.division.divides_weights
    return divides(state.flat)


def _takes_master(state: FlatState, slot: Slot, dtype: torch.dtype) -> bool:
    return dtype == torch.float32 and state.flat.dtype != dtype and slot.trainable and bool(state.planes)


def _asked(ask: Ask, name: str, dtype: torch.dtype, lo: int, hi: int) -> Iterator[Tensor]:
    for start in range(lo, hi, _RANGE):
        yield ask(name, dtype, start, min(hi, start + _RANGE))


def _from_tensor(tensor: Tensor, lo: int, hi: int) -> Iterator[Tensor]:
    yield tensor.detach().cpu().contiguous().reshape(-1)[lo:hi]


def _from_state(
    state: FlatState, slot: Slot, queue: SlotQueue, dtype: torch.dtype, lo: int, hi: int
) -> Iterator[Tensor]:
    """Elements `[lo, hi)` of a parameter that are here, chunk by chunk; each chunk's staging slot is back before it is
    yielded.
    """
    masters = _takes_master(state, slot, dtype)
    planes = {"weight": state.weight}
    if masters:
        planes = {"master": state.planes["master"]} if "master" in state.planes else {**planes, **state.planes}
    base, last = max(plane.base for plane in planes.values()), min(plane.end for plane in planes.values())
    lo, hi = max(lo + slot.offset, base), min(hi + slot.offset, last)
    for first in range(base + (lo - base) // state.chunk * state.chunk, hi, state.chunk):
        end = min(first + state.chunk, last)
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


def export_together(
    engine: CheckpointAccess, dtype: str | torch.dtype | None, write: Callable[[list[Tensors]], Exported]
) -> Exported:
    """`write(tensors)` on rank 0; the other ranks serve the parts that it asks for until it has ended.

    Raises:
        CheckpointSaveError: on the others, what has failed on rank 0; on rank 0, a read that failed on another one.
    """
    cluster = engine._cluster
    if cluster is None:
        return write(engine_tensors(engine, dtype))
    serving = _Serving(engine, cluster)
    if cluster.ranks.rank:
        target_dtype(dtype, torch.float32)  # what all ranks refuse, none waits for
        return serving.serve()
    try:
        exported = write(engine_tensors(engine, dtype, serving.ask))
    except BaseException as error:
        serving.end(None, " ".join(str(error).split()) or type(error).__name__)
        raise
    serving.end(exported, None)
    return exported


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Elements `[lo, hi)` of a parameter in `dtype`."""

    name: str
    dtype: torch.dtype
    lo: int
    hi: int


@dataclass(frozen=True, slots=True)
class _End:
    exported: Exported | None
    failure: str | None


class _Serving:
    """What rank 0 asks for, range by range, and its shard group brings."""

    def __init__(self, engine: CheckpointAccess, cluster: Cluster) -> None:
        self._engine, self._cluster = engine, cluster

    def _order(self, order: _Wanted | _End | None) -> _Wanted | _End:
        said = self._cluster.all_of("export weights: what rank 0 needs", order)[0]
        assert said is not None
        return said

    def ask(self, name: str, dtype: torch.dtype, lo: int, hi: int) -> Tensor:
        """On rank 0."""
        wanted = _Wanted(name, dtype, lo, hi)
        self._order(wanted)
        whole = self._bring(wanted)
        assert whole is not None
        return whole

    def end(self, exported: Exported | None, failure: str | None) -> None:
        """On rank 0."""
        self._order(_End(exported, failure))

    def serve(self) -> Exported:
        """On the other ranks."""
        while True:
            order = self._order(None)
            if isinstance(order, _End):
                if order.exported is None:
                    raise CheckpointSaveError(f"the export failed on rank 0: {order.failure}")
                return order.exported
            # What fails here is raised on rank 0, which ends the export.
            with contextlib.suppress(CheckpointSaveError):
                self._bring(order)

    def _bring(self, wanted: _Wanted) -> Tensor | None:
        engine, division = self._engine, self._cluster.division
        record = engine._records[wanted.name]
        state, slot = engine._state(record), record.slot
        lengths = []
        for rank in range(division.size):
            lo, hi = division.owned(state.flat, rank)
            first, last = wanted.lo + slot.offset, wanted.hi + slot.offset
            lengths.append(max(0, min(hi, last) - max(lo, first)))
        mine, failure = torch.empty(0, dtype=wanted.dtype), None
        if self._cluster.ranks.replicate_rank == 0:
            try:
                read = _from_state(state, slot, engine._step_queue, wanted.dtype, wanted.lo, wanted.hi)
                parts = list(read) if lengths[division.rank] else []
                mine = torch.cat(parts) if parts else mine
            except Exception as error:
                failure = " ".join(str(error).split()) or type(error).__name__
        failures = self._cluster.all_of("export weights: whether they could be read", failure)
        for rank, text in enumerate(failures):
            if text is not None:
                raise CheckpointSaveError(f"{wanted.name} could not be read on rank {rank}: {text}")
        if self._cluster.ranks.replicate_rank:
            return None
        return self._cluster.ask("export weights: bring them", lambda c: c.collect(mine, lengths, "shard", "reads"))


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
