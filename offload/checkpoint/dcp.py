"""`torch.distributed.checkpoint` directories, read and written in ranges, without a process group.

Their `.metadata` is a pickle. It is read with an unpickler that knows the few classes such a file consists of and
refuses all others; tensors are read as bytes out of the stored archives, so nothing else is ever unpickled.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata

from offload.checkpoint.directory import fsync_directory, write_durably
from offload.checkpoint.errors import CheckpointError, DamagedCheckpointError
from offload.checkpoint.export import Tensors
from offload.checkpoint.foreign import ForeignParameter
from offload.checkpoint.format import MANIFEST_LIMIT, open_regular, read_bounded
from offload.checkpoint.tensorfile import read_into

METADATA = ".metadata"
MOMENTS = ("exp_avg", "exp_avg_sq")
_CHUNK = 32 << 20

_ALLOWED: dict[tuple[str, str], Any] = {
    **{
        ("torch.distributed.checkpoint.metadata", name): getattr(metadata, name)
        for name in (
            "Metadata",
            "MetadataIndex",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    },
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("collections", "OrderedDict"): dict,
    ("pathlib", "PosixPath"): lambda *parts: os.path.join("", *map(str, parts)),
    ("pathlib", "Path"): lambda *parts: os.path.join("", *map(str, parts)),
    ("pathlib._local", "PosixPath"): lambda *parts: os.path.join("", *map(str, parts)),
}


class _Restricted(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"{module}.{name} does not belong into such a file") from None


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A stored rectangle of a tensor: its data begin at byte `start` of `file`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: int
    start: int


class DistributedCheckpoint:
    """An open DCP directory.

    Raises:
        DamagedCheckpointError: it is malformed, or holds what no such checkpoint holds.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self._chunks: dict[str, list[_Chunk]] = {}
        self._files: list[tuple[int, Path]] = []
        try:
            self._metadata = self._read_metadata()
        except BaseException:
            self.close()
            raise

    def _read_metadata(self) -> Any:
        path = self.directory / METADATA
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise DamagedCheckpointError(f"{path}: {error.strerror}; no torch.distributed.checkpoint here") from None
        try:
            data = read_bounded(fd, path, MANIFEST_LIMIT)
        finally:
            os.close(fd)
        try:
            found = _Restricted(io.BytesIO(data)).load()
        except Exception as error:
            raise DamagedCheckpointError(f"{path}: cannot be read: {error}") from None
        if not isinstance(found, metadata.Metadata) or not isinstance(found.state_dict_metadata, dict):
            raise DamagedCheckpointError(f"{path}: not the metadata of a torch.distributed.checkpoint")
        return found

    def tensors(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of every tensor by key."""
        return {
            key: (tuple(value.size), value.properties.dtype)
            for key, value in self._metadata.state_dict_metadata.items()
            if isinstance(value, metadata.TensorStorageMetadata)
        }

    def path_of(self, key: str) -> tuple[Any, ...]:
        """The keys that lead to a tensor in the nested state dict that was saved."""
        planned = self._metadata.planner_data
        path = planned.get(key) if isinstance(planned, dict) else None
        return tuple(path) if isinstance(path, (tuple, list)) else (key,)

    def _open(self, name: str) -> int:
        for number, (_, path) in enumerate(self._files):
            if path.name == name:
                return number
        self._files.append((open_regular(self.directory, name), self.directory / name))
        return len(self._files) - 1

    def _chunks_of(self, key: str) -> list[_Chunk]:
        if key not in self._chunks:
            stored = self._metadata.state_dict_metadata[key]
            storage = self._metadata.storage_data
            chunks = []
            for number, chunk in enumerate(stored.chunks):
                index = metadata.MetadataIndex(key, chunk.offsets, number)
                info = storage.get(index) if isinstance(storage, dict) else None
                if info is None:
                    raise DamagedCheckpointError(f"{self.directory}: {key} at {tuple(chunk.offsets)} is stored nowhere")
                file = self._open(str(info.relative_path))
                nbytes = stored.properties.dtype.itemsize
                for size in chunk.sizes:
                    nbytes *= size
                start = self._data_start(file, int(info.offset), int(info.length), nbytes, key)
                chunks.append(_Chunk(tuple(chunk.offsets), tuple(chunk.sizes), file, start))
            self._chunks[key] = sorted(chunks, key=lambda c: c.offsets)
        return self._chunks[key]

    def _data_start(self, file: int, offset: int, length: int, nbytes: int, key: str) -> int:
        """Where the bytes of a stored tensor begin: in a `torch.save` archive, its one uncompressed data record."""
        fd, path = self._files[file]
        if offset < 0 or length < 0 or offset + length > os.fstat(fd).st_size:
            raise DamagedCheckpointError(f"{path}: {key} at bytes {offset:,} + {length:,} is beyond its end")
        try:
            with zipfile.ZipFile(_Slice(fd, offset, length)) as archive:
                data = [i for i in archive.infolist() if i.filename.split("/")[-2:-1] == ["data"]]
                if len(data) != 1 or data[0].compress_type != zipfile.ZIP_STORED or data[0].file_size < nbytes:
                    raise DamagedCheckpointError(f"{path}: {key} is not stored as one plain record of {nbytes:,} bytes")
                local = os.pread(fd, 30, offset + data[0].header_offset)
                name_length, extra_length = struct.unpack("<HH", local[26:30])
                return int(offset + data[0].header_offset + 30 + name_length + extra_length)
        except (zipfile.BadZipFile, struct.error) as error:
            raise DamagedCheckpointError(f"{path}: {key} is not a saved tensor: {error}") from None

    def read(self, key: str, lo: int, hi: int) -> Tensor:
        """Elements `[lo, hi)` of the flattened tensor, in its dtype.

        Chunks are whole rows, as FSDP and this module store them; others are refused.
        """
        shape, dtype = self.tensors()[key]
        out = torch.empty(hi - lo, dtype=dtype)
        row = 1
        for size in shape[1:]:
            row *= size
        chunks = self._chunks_of(key)
        at, data = lo, out.view(torch.uint8).numpy().data if hi > lo else memoryview(b"")
        starts = [(c.offsets[0] if c.offsets else 0) * row for c in chunks]
        while at < hi:
            number = bisect_right(starts, at) - 1
            chunk = chunks[number] if number >= 0 else None
            if chunk is None or tuple(chunk.sizes[1:]) != shape[1:] or any(chunk.offsets[1:]):
                raise CheckpointError(f"{self.directory}: {key} is stored in pieces that are not whole rows")
            count = (chunk.sizes[0] if chunk.sizes else 1) * row
            stop = min(hi, starts[number] + count)
            if stop <= at:
                raise DamagedCheckpointError(f"{self.directory}: element {at:,} of {key} is stored nowhere")
            fd, path = self._files[chunk.file]
            size = dtype.itemsize
            part = data[(at - lo) * size : (stop - lo) * size]
            read_into(fd, part, chunk.start + (at - starts[number]) * size, path)
            at = stop
        return out

    def close(self) -> None:
        """Closes the files. Idempotent."""
        while self._files:
            os.close(self._files.pop()[0])

    def __enter__(self) -> DistributedCheckpoint:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _Slice(io.RawIOBase):
    """A part of a file as a file."""

    def __init__(self, fd: int, start: int, length: int) -> None:
        self._fd, self._start, self._length, self._at = fd, start, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        left = max(0, self._length - self._at)
        data = os.pread(self._fd, min(len(buffer), left), self._start + self._at)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def read_dcp(checkpoint: DistributedCheckpoint) -> tuple[list[ForeignParameter], int]:
    """(parameters with their moments where there are some, the largest step) of a saved model and optimizer.

    The model is what lies outside "state" of an optimizer; names are those of the innermost keys, as
    `get_model_state_dict` and `get_optimizer_state_dict` give them.
    """
    weights: dict[str, str] = {}
    moments: dict[str, dict[str, str]] = {}
    for key in checkpoint.tensors():
        path = checkpoint.path_of(key)
        if len(path) == 1 and ".state." in f".{key}" and key.rsplit(".", 1)[-1] in (*MOMENTS, "step"):
            head, _, kind = key.rpartition(".")
            moments.setdefault(f".{head}".partition(".state.")[2], {})[kind] = key
        elif len(path) >= 3 and path[-3] == "state" and path[-1] in (*MOMENTS, "step"):
            moments.setdefault(str(path[-2]), {})[str(path[-1])] = key
        elif "param_groups" not in path and "state" not in path[:-1] and "rng" not in str(path[-1]):
            weights[str(path[-1]) if len(path) > 1 else key] = key
    weights = _without_prefix(weights, moments)
    found, last = [], 0
    for name, key in weights.items():
        shape, dtype = checkpoint.tensors()[key]
        own = moments.get(name, {})
        trained = all(kind in own for kind in MOMENTS) and dtype.is_floating_point
        if trained and any(checkpoint.tensors()[own[kind]][0] != shape for kind in MOMENTS):
            raise DamagedCheckpointError(f"{checkpoint.directory}: the moments of {name} are not of its shape")
        steps = _step_of(checkpoint, own.get("step")) if trained else 0
        last = max(last, steps)
        planes = {"master": key, "weight": key, **own}
        found.append(
            ForeignParameter(
                name=name,
                shape=shape,
                dtype=dtype,
                trained=trained,
                steps=steps,
                read=partial(_plane, checkpoint, planes),
            )
        )
    return found, last


def _plane(checkpoint: DistributedCheckpoint, planes: dict[str, str], plane: str, lo: int, hi: int) -> Tensor:
    return checkpoint.read(planes[plane], lo, hi)


def _without_prefix(weights: dict[str, str], moments: dict[str, Any]) -> dict[str, str]:
    """Names as the optimizer has them: a flat key may carry the name under which the model was saved."""
    for prefix in ("model.", "module.", "app.model."):
        if weights and moments and not set(moments) & set(weights):
            stripped = {name.removeprefix(prefix): key for name, key in weights.items()}
            if set(moments) <= set(stripped):
                return stripped
    return weights


def _step_of(checkpoint: DistributedCheckpoint, key: str | None) -> int:
    if key is None:
        return 0
    shape, _ = checkpoint.tensors()[key]
    if shape not in ((), (1,)):
        raise DamagedCheckpointError(f"{checkpoint.directory}: {key} is no step count")
    return int(checkpoint.read(key, 0, 1)[0])


def write_dcp(directory: str | os.PathLike[str], tensors: Sequence[tuple[tuple[str, ...], Tensors]]) -> int:
    """Writes a DCP directory of one rank; each tensor goes under a path of keys, e.g. ("model", name). Returns bytes.

    A tensor is stored in chunks of whole rows of about 32 MiB. `.metadata` comes last.

    Raises:
        CheckpointError: there is one already.
    """
    root = Path(directory)
    if (root / METADATA).exists():
        raise CheckpointError(f"{root}: holds a torch.distributed.checkpoint already; choose another directory")
    root.mkdir(parents=True, exist_ok=True)
    name = "__0_0.distcp"
    described: dict[str, Any] = {}
    planned: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    with open(root / name, "xb") as file:
        for path, tensor in tensors:
            key = ".".join(path)
            chunks: list[metadata.ChunkStorageMetadata] = []
            for offsets, sizes, value in _rows(tensor):
                start = file.tell()
                torch.save(value, file)
                index = metadata.MetadataIndex(key, offsets, len(chunks))
                storage[index] = filesystem._StorageInfo(name, start, file.tell() - start)
                chunks.append(metadata.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            properties = metadata.TensorProperties(dtype=tensor.dtype)
            described[key] = metadata.TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
            planned[key] = tuple(path)
        file.flush()
        os.fsync(file.fileno())
        total = file.tell()
    found = metadata.Metadata(state_dict_metadata=described, planner_data=planned, storage_data=storage)
    found.storage_meta = metadata.StorageMeta(checkpoint_id=str(root))
    write_durably(root / METADATA, pickle.dumps(found))
    fsync_directory(root)
    return total


def _rows(tensor: Tensors) -> Any:
    """(offsets, sizes, values) of consecutive whole rows."""
    if not tensor.shape or not tensor.numel:
        parts = (
            [part for part in tensor.read(0, tensor.numel)] if tensor.numel else [torch.empty(0, dtype=tensor.dtype)]
        )
        yield (0,) * len(tensor.shape), tensor.shape, torch.cat(parts).reshape(tensor.shape).clone()
        return
    row = tensor.numel // tensor.shape[0]
    step = max(1, _CHUNK // max(1, row * tensor.dtype.itemsize))
    for first in range(0, tensor.shape[0], step):
        last = min(first + step, tensor.shape[0])
        value = torch.cat(list(tensor.read(first * row, last * row))).reshape(last - first, *tensor.shape[1:])
        yield (first, *(0 for _ in tensor.shape[1:])), (last - first, *tensor.shape[1:]), value.clone()
