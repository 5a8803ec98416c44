"""Checkpoints made of other systems' values: parameter by parameter, range by range."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offload.checkpoint.content import versions
from offload.checkpoint.directory import (
    check_space,
    commit,
    fsync_directory,
    remove_checkpoint,
    saved_files,
)
from offload.checkpoint.errors import CheckpointError
from offload.checkpoint.format import index_file, rank_file, step_name, stored_planes
from offload.checkpoint.manifest import Index, Manifest, Piece, SavedParameter
from offload.checkpoint.places import is_complete
from offload.checkpoint.tensorfile import allocate, build_header, write_all
from swap.checksums import crc32

_RANGE = 1 << 20

ReadPlane = Callable[[str, int, int], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignParameter:
    """A parameter of another system. `trained`: it has a master and moments in fp32, read as "master", "exp_avg" and
    "exp_avg_sq"; else "weight" in `dtype`. `read(plane, lo, hi)` gives elements of the flattened parameter.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool
    steps: int
    read: ReadPlane

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def encoding(self) -> str | None:
        return "fp32" if self.trained else None


def write_foreign(
    directory: str | os.PathLike[str], parameters: Sequence[ForeignParameter], *, step: int, origin: str
) -> Path:
    """Writes `directory/step-<step>/` and returns it. Parameter groups, schedules and random states are not part of it:
    an engine that loads it keeps its own.

    Raises:
        CheckpointError: no parameter, no room, or there is such a checkpoint already.
    """
    root = Path(directory)
    target = root / step_name(step)
    if not parameters:
        raise CheckpointError(f"{origin}: no parameter in it")
    if is_complete(target):
        raise CheckpointError(f"{target}: holds a checkpoint already; choose another directory")
    name = rank_file(0, 1)
    pieces = list(_pieces(parameters))
    header, nbytes = build_header(
        ((_key(p, plane, lo), dtype, (hi - lo,)) for p, plane, dtype, lo, hi in pieces), {"format": "pt"}
    )
    check_space(root, len(header) + nbytes, "the checkpoint")
    target.mkdir(parents=True, exist_ok=True)
    try:
        fd = os.open(target / name, os.O_CREAT | os.O_TRUNC | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            index = _write(fd, header, nbytes, pieces)
        finally:
            os.close(fd)
        (target / index_file(name)).write_bytes(index.to_json())
        fsync_directory(target)
        commit(target, _manifest(parameters, step, origin, target, name))
    except BaseException:
        remove_checkpoint(target)
        raise
    return target


_Item = tuple[ForeignParameter, str, torch.dtype, int, int]


def _pieces(parameters: Sequence[ForeignParameter]) -> Iterator[_Item]:
    for parameter in parameters:
        for spec in stored_planes(parameter.encoding, parameter.dtype):
            for lo in range(0, parameter.numel, _RANGE):
                yield parameter, spec.name, spec.dtype, lo, min(lo + _RANGE, parameter.numel)


def _key(parameter: ForeignParameter, plane: str, lo: int) -> str:
    return f"{plane}/{lo}/{parameter.name}"


def _write(fd: int, header: bytes, nbytes: int, items: Sequence[_Item]) -> Index:
    allocate(fd, len(header) + nbytes)
    write_all(fd, memoryview(header), 0)
    at, pieces = len(header), []
    for parameter, plane, dtype, lo, hi in items:
        value = parameter.read(plane, lo, hi).to(dtype).contiguous().reshape(-1)
        if value.numel() != hi - lo:
            raise CheckpointError(f"{parameter.name} {plane}: {value.numel():,} elements instead of {hi - lo:,}")
        data: memoryview = value.view(torch.uint8).numpy().data
        write_all(fd, data, at)
        os.posix_fadvise(fd, at, len(data), os.POSIX_FADV_DONTNEED)
        at += len(data)
        pieces.append(
            Piece(
                key=_key(parameter, plane, lo),
                parameter=parameter.name,
                plane=plane,
                offset=lo,
                length=hi - lo,
                crc32=crc32(data),
            )
        )
    os.fsync(fd)
    return Index(rank=0, world=1, pieces=tuple(pieces), rng=None)


def _manifest(parameters: Sequence[ForeignParameter], step: int, origin: str, target: Path, name: str) -> Manifest:
    saved: dict[str, Any] = {
        p.name: SavedParameter(shape=p.shape, numel=p.numel, dtype=p.dtype, encoding=p.encoding, steps=p.steps)
        for p in parameters
    }
    return Manifest(
        step=step,
        world=1,
        files=saved_files(target, [name]),
        parameters=saved,
        buffers={},
        groups=[],
        engine={"steps": step, "skipped_steps": 0},
        config={},
        versions={**versions(), "converted_from": origin},
    )
