"""The manifest of a checkpoint and the index of each tensor file: what they say, checked before it is believed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from offload.checkpoint.errors import DamagedCheckpointError, IncompleteCheckpointError
from offload.checkpoint.format import (
    DTYPE_NAMES,
    DTYPES,
    FORMAT,
    INDEX_LIMIT,
    MANIFEST_LIMIT,
    VERSION,
    check_depth,
    check_encoding,
    dump_json,
    integer,
    open_regular,
    parse_json,
    read_bounded,
    shape_of,
)
from offload.checkpoint.places import MANIFEST


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFile:
    """A tensor file: its size in bytes, its index and the SHA-256 of that."""

    name: str
    nbytes: int
    index: str
    index_sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedParameter:
    """What was saved of a parameter. `dtype` is the weight's; `encoding` None: frozen, the weight alone; `steps`: its
    optimizer steps so far.
    """

    shape: tuple[int, ...]
    numel: int
    dtype: torch.dtype
    encoding: str | None
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedBuffer:
    """A persistent buffer of the module."""

    shape: tuple[int, ...]
    numel: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Elements `[offset, offset + length)` of a plane of a parameter: tensor `key`, and the CRC-32 of its bytes."""

    key: str
    parameter: str
    plane: str
    offset: int
    length: int
    crc32: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """What a tensor file holds, and the random state of the rank that wrote it (encoded). `own`: `data`, `extra` and
    `buffers` of the rank (encoded) where they differ from rank 0's.
    """

    rank: int
    world: int
    pieces: tuple[Piece, ...]
    rng: Any
    own: Mapping[str, Any] | None = None

    def to_json(self) -> bytes:
        pieces = [[p.key, p.parameter, p.plane, p.offset, p.length, p.crc32] for p in self.pieces]
        values = {
            "format": FORMAT,
            "version": VERSION,
            "rank": self.rank,
            "world": self.world,
            "pieces": pieces,
            "rng": self.rng,
        }
        return dump_json(values if self.own is None else {**values, "own": self.own})


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A complete checkpoint; `groups`, `scheduler`, `scaler`, `data` and `extra` are for `decode_state`."""

    step: int
    world: int
    files: tuple[SavedFile, ...]
    parameters: Mapping[str, SavedParameter]
    buffers: Mapping[str, SavedBuffer]
    groups: list[Any]
    scheduler: Any = None
    scaler: Any = None
    engine: Mapping[str, Any]
    data: Any = None
    extra: Any = None
    config: Mapping[str, Any]
    versions: Mapping[str, Any]
    created: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensor files."""
        return sum(file.nbytes for file in self.files)

    def to_json(self) -> bytes:
        return dump_json(
            {
                "format": FORMAT,
                "version": VERSION,
                "step": self.step,
                "world": self.world,
                "created": self.created,
                "files": [
                    {"name": f.name, "bytes": f.nbytes, "index": f.index, "index_sha256": f.index_sha256}
                    for f in self.files
                ],
                "parameters": {
                    name: {
                        "shape": list(p.shape),
                        "dtype": DTYPE_NAMES[p.dtype],
                        "encoding": p.encoding,
                        "steps": p.steps,
                    }
                    for name, p in self.parameters.items()
                },
                "buffers": {
                    name: {"shape": list(b.shape), "dtype": DTYPE_NAMES[b.dtype]} for name, b in self.buffers.items()
                },
                "groups": self.groups,
                "scheduler": self.scheduler,
                "scaler": self.scaler,
                "engine": dict(self.engine),
                "data": self.data,
                "extra": self.extra,
                "config": dict(self.config),
                "versions": dict(self.versions),
            }
        )


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a checkpoint directory.

    Raises:
        IncompleteCheckpointError: there is none.
        DamagedCheckpointError: it cannot be read or contradicts itself.
    """
    path = directory / MANIFEST
    if not directory.is_dir():
        raise IncompleteCheckpointError(f"{directory}: no such directory")
    if not os.path.lexists(path):
        raise IncompleteCheckpointError(
            f"{directory}: no {MANIFEST}, so its save was cut short or this is no checkpoint; name an older one"
        )
    fd = open_regular(directory, MANIFEST)
    try:
        values = parse_json(read_bounded(fd, path, MANIFEST_LIMIT), path)
    finally:
        os.close(fd)
    _check_version(values, path)
    for name, kind in (("files", list), ("parameters", dict), ("buffers", dict), ("groups", list), ("engine", dict)):
        if not isinstance(values.get(name), kind):
            raise DamagedCheckpointError(f"{path}: {name} is missing or not a {kind.__name__}")
    for name in ("groups", "scheduler", "scaler", "engine", "data", "extra", "config", "versions"):
        check_depth(values.get(name), f"{path}: {name}")
    return Manifest(
        step=integer(values.get("step"), f"{path}: step"),
        world=integer(values.get("world"), f"{path}: world", low=1),
        files=tuple(_file(value, f"{path}: files[{i}]") for i, value in enumerate(values["files"])),
        parameters={name: _parameter(v, f"{path}: parameter {name!r:.80}") for name, v in values["parameters"].items()},
        buffers={name: _buffer(v, f"{path}: buffer {name!r:.80}") for name, v in values["buffers"].items()},
        groups=values["groups"],
        scheduler=values.get("scheduler"),
        scaler=values.get("scaler"),
        engine=values["engine"],
        data=values.get("data"),
        extra=values.get("extra"),
        config=_object(values.get("config"), f"{path}: config"),
        versions=_object(values.get("versions"), f"{path}: versions"),
        created=str(values.get("created", "")),
    )


def _check_version(values: Mapping[str, Any], path: Path) -> None:
    if values.get("format") != FORMAT:
        raise DamagedCheckpointError(f"{path}: format is {values.get('format')!r:.40}, not {FORMAT!r}")
    version = integer(values.get("version"), f"{path}: version", low=1)
    if version > VERSION:
        raise DamagedCheckpointError(
            f"{path}: format version {version}; this release reads up to {VERSION}: use a newer offload"
        )


def _object(value: Any, where: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise DamagedCheckpointError(f"{where}: not an object")
    return value


def _file(value: Any, where: str) -> SavedFile:
    names = ("name", "index", "index_sha256")
    if not isinstance(value, dict) or not all(isinstance(value.get(key), str) for key in names):
        raise DamagedCheckpointError(f"{where}: not a file entry")
    return SavedFile(
        name=value["name"],
        nbytes=integer(value.get("bytes"), where),
        index=value["index"],
        index_sha256=value["index_sha256"],
    )


def _parameter(value: Any, where: str) -> SavedParameter:
    if not isinstance(value, dict):
        raise DamagedCheckpointError(f"{where}: not an object")
    shape, numel = shape_of(value.get("shape"), where)
    encoding, dtype = check_encoding(where, value.get("encoding"), value.get("dtype"))
    steps = integer(value.get("steps"), where)
    return SavedParameter(shape=shape, numel=numel, dtype=dtype, encoding=encoding, steps=steps)


def _buffer(value: Any, where: str) -> SavedBuffer:
    if not isinstance(value, dict) or value.get("dtype") not in DTYPES:
        raise DamagedCheckpointError(f"{where}: not a buffer")
    shape, numel = shape_of(value.get("shape"), where)
    return SavedBuffer(shape=shape, numel=numel, dtype=DTYPES[value["dtype"]])


def read_index(directory: Path, file: SavedFile | str) -> Index:
    """The index of a tensor file; of a `SavedFile` also its checksum is compared."""
    name = file if isinstance(file, str) else file.index
    path = directory / name
    fd = open_regular(directory, name)
    try:
        data = read_bounded(fd, path, INDEX_LIMIT)
    finally:
        os.close(fd)
    if not isinstance(file, str) and hashlib.sha256(data).hexdigest() != file.index_sha256:
        raise DamagedCheckpointError(f"{path}: its SHA-256 is not the one in the manifest: the file has changed")
    values = parse_json(data, path)
    _check_version(values, path)
    for key in ("rng", "own"):
        check_depth(values.get(key), f"{path}: {key}")
    pieces = values.get("pieces")
    if not isinstance(pieces, list):
        raise DamagedCheckpointError(f"{path}: pieces is missing")
    return Index(
        rank=integer(values.get("rank"), f"{path}: rank"),
        world=integer(values.get("world"), f"{path}: world", low=1),
        pieces=tuple(_piece(value, f"{path}: pieces[{i}]") for i, value in enumerate(pieces)),
        rng=values.get("rng"),
        own=_object(values.get("own"), f"{path}: own") or None,
    )


def _piece(value: Any, where: str) -> Piece:
    if not isinstance(value, list) or len(value) != 6 or not all(isinstance(v, str) for v in value[:3]):
        raise DamagedCheckpointError(f"{where}: not a piece")
    offset, length, crc = (integer(v, where) for v in value[3:])
    return Piece(key=value[0], parameter=value[1], plane=value[2], offset=offset, length=length, crc32=crc)
