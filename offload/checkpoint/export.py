"""Weights out: safetensors files as `save_pretrained` writes them, streamed, and read back afterwards."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offload.checkpoint.directory import fsync_directory, write_durably
from offload.checkpoint.errors import CheckpointError, CheckpointSaveError, DamagedCheckpointError
from offload.checkpoint.readahead import ReadAhead, aligned, make_pool
from offload.checkpoint.tensorfile import StreamWriter, build_header, read_header
from offload.checkpoint.weights import INDEX, SINGLE
from swap.checksums import crc32
from swap.geometry import format_bytes, parse_bytes

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CARRIED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "preprocessor_config.json",
    "processor_config.json",
    "chat_template.json",
    "chat_template.jinja",
)
"""Files beside weights that belong to a model."""
_RANGE = 1 << 20

Read = Callable[[int, int], Iterable[Tensor]]


@dataclass(frozen=True, slots=True)
class Tensors:
    """One tensor to write: `read(lo, hi)` yields elements `[lo, hi)` in order, in `dtype`."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Read

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What an export wrote: file names and the bytes of their tensors."""

    directory: Path
    files: tuple[str, ...]
    nbytes: int


def export_tensors(
    tensors: Sequence[Tensors],
    directory: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    carried: Iterable[str | os.PathLike[str]] = (),
    configs: Mapping[str, dict[str, Any]] | None = None,
) -> Exported:
    """Writes `tensors` as `model.safetensors`, or as shards of at most `max_shard_size` bytes with an index.

    `carried`: files to copy beside them; a `config.json` names the dtype of the weights afterwards. `configs`: JSON
    files to write by name, carried or not. Every file of weights is read back and compared with what was written before
    any of them gets its final name.

    Raises:
        CheckpointSaveError: the disk is full or the like; nothing of it remains.
        CheckpointError: the directory holds weights already, under names that these would not replace.
    """
    root = Path(directory)
    limit = parse_bytes(max_shard_size)
    if limit < 1:
        raise ValueError(f"max_shard_size = {max_shard_size!r} must be at least one byte")
    shards = _shards(tensors, limit)
    names = (
        [SINGLE]
        if len(shards) == 1
        else [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    )
    temporary = [f"{name}.tmp" for name in names]
    try:
        root.mkdir(parents=True, exist_ok=True)
        _refuse_others(root, {*names, INDEX})
        for shard, name in zip(shards, temporary, strict=True):
            _write_shard(root / name, shard)
        for file in carried:
            _carry(Path(file), root, _common_dtype(t.dtype for t in tensors))
        for name, values in (configs or {}).items():
            write_durably(root / name, _dumped(values))
        for before, after in zip(temporary, names, strict=True):
            os.rename(root / before, root / after)
        total = sum(tensor.nbytes for tensor in tensors)
        if len(shards) > 1:
            weight_map = {t.name: name for shard, name in zip(shards, names, strict=True) for t in shard}
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            write_durably(root / INDEX, json.dumps(index, indent=2).encode() + b"\n")
        elif (root / INDEX).exists():
            (root / INDEX).unlink()
        fsync_directory(root)
    except OSError as error:
        raise CheckpointSaveError(f"{root}: the export failed: {error.strerror or error}") from error
    finally:
        for name in temporary:
            with contextlib.suppress(OSError):
                (root / name).unlink()
    return Exported(directory=root, files=tuple(names), nbytes=total)


def _shards(tensors: Sequence[Tensors], limit: int) -> list[list[Tensors]]:
    shards: list[list[Tensors]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return shards


def _refuse_others(root: Path, own: set[str]) -> None:
    others = sorted(path.name for path in root.glob("*.safetensors") if path.name not in own)
    if others:
        raise CheckpointError(
            f"{root}: holds {', '.join(others[:3])} already, which a reader would take for part of this model; choose "
            "another directory"
        )


def _write_shard(path: Path, shard: Sequence[Tensors]) -> None:
    """Streams one file, then reads it back."""
    header, nbytes = build_header(((t.name, t.dtype, t.shape) for t in shard), {"format": "pt"}, align=8)
    file = StreamWriter(path, len(header) + nbytes)
    try:
        file.write(header)
        sums = {}
        for tensor in shard:
            crc = written = 0
            for part in tensor.read(0, tensor.numel):
                if part.numel():
                    data: memoryview = part.contiguous().view(torch.uint8).numpy().data
                    crc = crc32(data, crc)
                    file.write(data)
                    written += len(data)
            if written != tensor.nbytes:
                raise CheckpointError(f"{tensor.name}: {written:,} bytes instead of {tensor.nbytes:,}")
            sums[tensor.name] = crc
        _verify(file.finish(), path, sums)
    finally:
        file.close()


def _verify(fd: int, path: Path, sums: dict[str, int]) -> None:
    entries, _ = read_header(fd, path)
    buffer = memoryview(bytearray(1 << 22))
    with make_pool() as pool:
        reader = ReadAhead(fd, path, pool, aligned)
        try:
            for name, expected in sums.items():
                entry, crc = entries[name], 0
                for start in range(entry.start, entry.start + entry.nbytes, len(buffer)):
                    part = buffer[: min(len(buffer), entry.start + entry.nbytes - start)]
                    reader.read(part, start)
                    crc = crc32(part, crc)
                if crc != expected:
                    raise DamagedCheckpointError(f"{path}: {name} reads back other bytes than were written")
        finally:
            reader.close()


def _carry(file: Path, root: Path, dtype: str | None) -> None:
    if not file.is_file():
        raise CheckpointError(f"{file}: no such file to carry along")
    if file.resolve() != (root / file.name).resolve():
        shutil.copyfile(file, root / file.name)
    if file.name == "config.json" and dtype is not None:
        _name_dtype(root / file.name, dtype)


def _name_dtype(path: Path, dtype: str) -> None:
    """Has a configuration that names a dtype name this one, which loaders follow."""
    try:
        values = json.loads(path.read_text())
    except ValueError:
        return  # not for us to judge
    keys = [key for key in ("dtype", "torch_dtype") if isinstance(values, dict) and isinstance(values.get(key), str)]
    if any(values[key] != dtype for key in keys):
        write_durably(path, _dumped({**values, **dict.fromkeys(keys, dtype)}))


def _dumped(values: dict[str, Any]) -> bytes:
    return json.dumps(values, indent=2, sort_keys=True).encode() + b"\n"


def _common_dtype(dtypes: Iterable[torch.dtype]) -> str | None:
    """The name of the only floating dtype among these, if there is one."""
    floating = {dtype for dtype in dtypes if dtype.is_floating_point}
    return str(floating.pop()).removeprefix("torch.") if len(floating) == 1 else None


def carried_from(directory: str | os.PathLike[str] | None) -> list[Path]:
    """The files of `CARRIED` that a directory has."""
    if directory is None:
        return []
    root = Path(directory)
    if not root.is_dir():
        raise CheckpointError(f"{root}: no such directory to take configuration and tokenizer files from")
    return [root / name for name in CARRIED if (root / name).is_file()]


def target_dtype(name: str | torch.dtype | None, own: torch.dtype) -> torch.dtype:
    """The dtype to export a tensor in: floating ones as asked for, others as they are."""
    if name is None or not own.is_floating_point:
        return own
    dtype = DTYPES.get(name) if isinstance(name, str) else name
    if dtype is None or not dtype.is_floating_point:
        raise ValueError(f"export dtype = {name!r}: one of {', '.join(DTYPES)}, or None to keep each parameter's own")
    return dtype


def model_configs(model: Any, dtypes: Iterable[torch.dtype]) -> dict[str, dict[str, Any]]:
    """What `save_pretrained` of `transformers` writes beside the weights, by file name; nothing for other models."""
    make = getattr(getattr(model, "config", None), "to_dict", None)
    if make is None:
        return {}
    values: dict[str, Any] = make()
    values["architectures"] = [type(model).__name__]
    dtype = _common_dtype(dtypes)
    if dtype is not None:
        values["dtype"] = dtype
    found = {"config.json": values}
    generation = getattr(model, "generation_config", None)
    if generation is not None and hasattr(generation, "to_diff_dict") and model.can_generate():
        found["generation_config.json"] = generation.to_diff_dict()
    return found


def fits(tensors: Sequence[Tensors], directory: Path, free: int) -> None:
    """CheckpointError, with both figures, unless the tensors fit the disk."""
    needed = sum(tensor.nbytes for tensor in tensors)
    if needed > free:
        raise CheckpointError(
            f"{directory}: {format_bytes(free)} free, but the weights need {format_bytes(needed)}: choose another place"
        )
