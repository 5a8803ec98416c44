"""Names, limits and encodings of the checkpoint format (docs/checkpoint_format.md), and JSON that may come from
anywhere.
"""

from __future__ import annotations

import base64
import json
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offload.checkpoint.errors import CheckpointError, DamagedCheckpointError
from optimizer_cpu.formats import PlaneSpec, format_names, get_format
from swap.geometry import format_bytes

FORMAT = "offload-checkpoint"
VERSION = 1

PIECE_LIMIT = 64 << 20
"""Bytes of the largest piece: what a reader must be able to hold."""
MANIFEST_LIMIT, INDEX_LIMIT, HEADER_LIMIT = 64 << 20, 256 << 20, 100_000_000
_NUMBER_LIMIT = 1 << 62
_STATE_TENSOR_LIMIT = 1 << 20
_DEEPEST_STATE, _DEEPEST_JSON = 30, 100
"""Levels of nesting that a state may have, and the JSON that is written for it."""

_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}")

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.complex64: "C64",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def step_name(step: int) -> str:
    """The directory of a step."""
    return f"step-{step:08d}"


def rank_file(rank: int, world: int, generation: int = 0) -> str:
    """The tensor file of a rank; `generation` counts replacements of a checkpoint in place."""
    suffix = f"-g{generation}" if generation else ""
    return f"rank-{rank:05d}-of-{world:05d}{suffix}.safetensors"


def index_file(name: str) -> str:
    """The index that belongs to a tensor file."""
    return name.removesuffix(".safetensors") + ".index.json"


def stored_planes(encoding: str | None, dtype: torch.dtype) -> tuple[PlaneSpec, ...]:
    """The planes that a checkpoint holds of a parameter whose weight is of `dtype`.

    `encoding` None: a frozen one, its weight alone. "fp32": master and moments; the weight is the rounding of the
    master. "split" and "compact": the codes of the format as they are.
    """
    if encoding is None:
        return (PlaneSpec(name="weight", dtype=dtype),)
    if encoding == "fp32":
        return tuple(PlaneSpec(name=name, dtype=torch.float32) for name in ("master", "exp_avg", "exp_avg_sq"))
    return get_format(encoding).planes(dtype)


def check_encoding(where: str, encoding: object, dtype: object) -> tuple[str | None, torch.dtype]:
    """The encoding and dtype of a manifest's parameter, or DamagedCheckpointError."""
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise DamagedCheckpointError(f"{where}: unknown dtype {dtype!r:.40}")
    if encoding is not None:
        if not isinstance(encoding, str) or encoding not in format_names():
            raise DamagedCheckpointError(f"{where}: unknown encoding {encoding!r:.40}")
        try:
            stored_planes(encoding, DTYPES[dtype])
        except ValueError as error:
            raise DamagedCheckpointError(f"{where}: {error}") from None
        if not DTYPES[dtype].is_floating_point:
            raise DamagedCheckpointError(f"{where}: optimizer state for a {dtype} parameter")
    return encoding, DTYPES[dtype]


def open_regular(directory: Path, name: str, flags: int = os.O_RDONLY) -> int:
    """A descriptor of the regular file `name` in `directory` itself; no path, link, pipe or device gets through.

    Raises:
        DamagedCheckpointError: the name is not a plain file name, or there is no such regular file.
    """
    if not isinstance(name, str) or not _FILE_NAME.fullmatch(name):
        raise DamagedCheckpointError(f"{directory}: {name!r:.80} is not the name of a file in a checkpoint")
    path = directory / name
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise DamagedCheckpointError(f"{path}: missing, though the checkpoint says that it is complete") from None
    except OSError as error:
        raise DamagedCheckpointError(f"{path}: cannot be opened: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise DamagedCheckpointError(f"{path}: not a regular file")
    return fd


def read_bounded(fd: int, path: Path, limit: int) -> bytes:
    """All bytes of a small file; refused if it is larger than `limit` bytes."""
    size = os.fstat(fd).st_size
    if size > limit:
        raise DamagedCheckpointError(f"{path}: {format_bytes(size)}, more than the {format_bytes(limit)} allowed")
    parts = []
    left = size
    while left:
        part = os.read(fd, min(left, 1 << 24))
        if not part:
            raise DamagedCheckpointError(f"{path}: became shorter while it was read")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def parse_json(data: bytes, where: Path | str) -> dict[str, Any]:
    """The object in `data`. Deep nesting, duplicate keys, non-finite numbers and anything but UTF-8 are refused."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_constant)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise DamagedCheckpointError(f"{where}: not valid JSON: {reason}") from None
    if not isinstance(value, dict):
        raise DamagedCheckpointError(f"{where}: not a JSON object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def dump_json(value: Any) -> bytes:
    """Bytes of strict JSON."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=False).encode("utf-8")


def integer(value: object, where: str, *, low: int = 0) -> int:
    """`value` if it is an integer from `low` to 2^62, else DamagedCheckpointError."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value < _NUMBER_LIMIT:
        raise DamagedCheckpointError(f"{where}: {value!r:.40} is not an integer of at least {low}")
    return value


def shape_of(value: object, where: str) -> tuple[tuple[int, ...], int]:
    """(shape, number of elements) of a JSON list, or DamagedCheckpointError."""
    if not isinstance(value, list) or len(value) > 64:
        raise DamagedCheckpointError(f"{where}: {value!r:.40} is not a shape")
    shape = tuple(integer(size, where) for size in value)
    numel = math.prod(shape)
    if numel >= _NUMBER_LIMIT:
        raise DamagedCheckpointError(f"{where}: {numel:,} elements")
    return shape, numel


# States of schedulers and generators: Python values that JSON lacks are written as {"$kind": ...}.


def check_depth(value: Any, where: str) -> None:
    """Refuses JSON that is nested so deeply that walking through it could exhaust the stack.

    Raises:
        DamagedCheckpointError: more than 100 levels.
    """
    level = [value]
    for _ in range(_DEEPEST_JSON):
        level = [
            item
            for outer in level
            if isinstance(outer, (list, dict))
            for item in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return
    raise DamagedCheckpointError(f"{where}: nested more than {_DEEPEST_JSON} levels deep")


def encode_state(value: Any, where: str, *, limit: int = _STATE_TENSOR_LIMIT, depth: int = 0) -> Any:
    """`value` as JSON: None, booleans, numbers, strings, lists, dicts, tuples, bytes, Counters and tensors of at most
    `limit` bytes; `depth` levels deep already.

    Raises:
        CheckpointError: anything else, or more than 30 levels; `where` names it.
    """
    if depth > _DEEPEST_STATE:
        raise CheckpointError(f"{where:.200}: nested more than {_DEEPEST_STATE} levels deep, or within itself")
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, Tensor):
        return _encode_tensor(value, where, limit)
    if isinstance(value, (list, tuple)):
        items = [encode_state(item, f"{where}[{i}]", limit=limit, depth=depth + 1) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, dict):
        kind = "$counter" if isinstance(value, Counter) else "$dict"
        if kind == "$dict" and all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {k: encode_state(v, f"{where}.{k}", limit=limit, depth=depth + 1) for k, v in value.items()}
        keys = [encode_state(k, where, depth=depth + 1) for k in value]
        values = [encode_state(v, f"{where}[{k!r}]", limit=limit, depth=depth + 1) for k, v in value.items()]
        return {kind: [list(pair) for pair in zip(keys, values, strict=True)]}
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # numpy scalars
        return encode_state(value.item(), where)
    raise CheckpointError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot hold: only "
        "None, booleans, numbers, strings, bytes, lists, tuples, dicts and small tensors"
    )


def _encode_tensor(value: Tensor, where: str, limit: int) -> Any:
    if value.numel() * value.element_size() > limit or value.dtype not in DTYPE_NAMES:
        raise CheckpointError(
            f"{where} is a {value.dtype} tensor of {value.numel():,} elements; a state may hold tensors of up to "
            f"{format_bytes(limit)}"
        )
    flat = value.detach().cpu().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return {"$tensor": [DTYPE_NAMES[value.dtype], list(value.shape), base64.b64encode(data).decode()]}


def decode_state(value: Any, where: str) -> Any:
    """The value that `encode_state` wrote; DamagedCheckpointError for anything it does not write."""
    if isinstance(value, list):
        return [decode_state(item, where) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        (key, inner), *_ = value.items()
        if key.startswith("$"):
            try:
                return _decode_tagged(key, inner, where)
            except (ValueError, TypeError, KeyError) as error:
                if isinstance(error, CheckpointError):
                    raise
                raise DamagedCheckpointError(f"{where}: a {key} that cannot be read: {error}") from None
    return {key: decode_state(item, where) for key, item in value.items()}


def _decode_tagged(key: str, inner: Any, where: str) -> Any:
    if key == "$float":
        return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[inner]
    if key == "$bytes":
        return base64.b64decode(inner, validate=True)
    if key == "$tuple":
        return tuple(decode_state(item, where) for item in _items(inner, where))
    if key in ("$dict", "$counter"):
        pairs = {decode_state(k, where): decode_state(v, where) for k, v in _items(inner, where)}
        return Counter(pairs) if key == "$counter" else pairs
    if key == "$tensor":
        name, shape, data = inner
        size, numel = shape_of(shape, where)
        raw = base64.b64decode(data, validate=True)
        if len(raw) != numel * DTYPES[name].itemsize:
            raise ValueError(f"{len(raw)} bytes for a tensor of {numel} elements")
        if not raw:
            return torch.empty(size, dtype=DTYPES[name])
        return torch.frombuffer(bytearray(raw), dtype=DTYPES[name]).view(size)
    raise DamagedCheckpointError(f"{where}: unknown kind {key!r:.40}")


def _items(value: Any, where: str) -> Iterable[Any]:
    if not isinstance(value, list):
        raise DamagedCheckpointError(f"{where}: not a list")
    return value
