"""Weights from safetensors files as `transformers` writes them: one, or several with an index; read range by range.

Nothing is mapped and no tensor is held: a chunk of the model asks for the elements it needs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from offload.checkpoint.errors import CheckpointError, CheckpointMismatchError, DamagedCheckpointError
from offload.checkpoint.format import MANIFEST_LIMIT, open_regular, parse_json, read_bounded
from offload.checkpoint.places import checkpoints_in, is_complete, step_directories
from offload.checkpoint.tensorfile import Entry, read_header, read_into

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_RANGE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Where `initialize` takes weights from: a safetensors file, or a directory with one or with an index of several.

    `missing`: "refuse", or "init" to give what the files lack their initial values. `extra`: "refuse", or "ignore".
    Names may differ from the model's by its `base_model_prefix`, as in `transformers`.
    """

    path: str | os.PathLike[str]
    missing: str = "refuse"
    extra: str = "refuse"

    def __post_init__(self) -> None:
        for option, value, allowed in (
            ("missing", self.missing, ("refuse", "init")),
            ("extra", self.extra, ("refuse", "ignore")),
        ):
            if value not in allowed:
                raise ValueError(f"Weights: {option} = {value!r}; it is {' or '.join(map(repr, allowed))}")


class TensorFiles:
    """Open safetensors files as one collection of tensors by name.

    Raises:
        DamagedCheckpointError: a file or the index is missing, malformed, or lacks a tensor that the index promises.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.metadata: dict[str, str] = {}
        self._files: list[tuple[int, Path]] = []
        self._tensors: dict[str, tuple[int, Entry]] = {}
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        if self.path.is_dir():
            directory, names, index = self.path, *_names_in(self.path)
        else:
            # A named file may be a link, as those in caches of models are.
            resolved = self.path.resolve()
            directory, names, index = resolved.parent, [resolved.name], None
        for name in names:
            file = directory / name
            resolved = file.resolve()
            fd = open_regular(resolved.parent, resolved.name)
            self._files.append((fd, file))
            entries, metadata = read_header(fd, file)
            self.metadata |= metadata
            for tensor, entry in entries.items():
                if index is not None and index.get(tensor) != name:
                    raise DamagedCheckpointError(f"{file}: tensor {tensor!r:.80} is not where {INDEX} says")
                self._tensors[tensor] = len(self._files) - 1, entry
        if index is not None and (lost := sorted(set(index) - set(self._tensors))):
            raise DamagedCheckpointError(
                f"{directory / INDEX}: promises {len(lost)} tensors that no file has: {', '.join(lost[:5])}"
            )

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def names(self) -> list[str]:
        """All tensors."""
        return list(self._tensors)

    def entry(self, name: str) -> Entry:
        """Dtype, shape and size of a tensor."""
        return self._tensors[name][1]

    def read(self, name: str, lo: int, hi: int) -> Tensor:
        """Elements `[lo, hi)` of the flattened tensor, in its dtype."""
        number, entry = self._tensors[name]
        fd, path = self._files[number]
        out = torch.empty(hi - lo, dtype=entry.dtype)
        if hi > lo:
            size = entry.dtype.itemsize
            read_into(fd, out.view(torch.uint8).numpy().data, entry.start + lo * size, path)
            # What was read is not needed again: it leaves the page cache to others.
            os.posix_fadvise(fd, entry.start + lo * size, (hi - lo) * size, os.POSIX_FADV_DONTNEED)
        return out

    def close(self) -> None:
        """Closes the files. Idempotent."""
        while self._files:
            os.close(self._files.pop()[0])

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _names_in(directory: Path) -> tuple[list[str], dict[str, str] | None]:
    """(file names, tensor -> file name if there is an index)."""
    if os.path.lexists(directory / INDEX):
        resolved = (directory / INDEX).resolve()
        fd = open_regular(resolved.parent, resolved.name)
        try:
            values = parse_json(read_bounded(fd, directory / INDEX, MANIFEST_LIMIT), directory / INDEX)
        finally:
            os.close(fd)
        index = values.get("weight_map")
        if not isinstance(index, dict) or not all(isinstance(v, str) for v in index.values()):
            raise DamagedCheckpointError(f"{directory / INDEX}: no weight_map of tensors to files")
        names = sorted(set(index.values()))
        for name in names:
            if Path(name).name != name or name in (".", ".."):
                raise DamagedCheckpointError(f"{directory / INDEX}: {name!r:.80} is not the name of a file beside it")
        return names, index
    if (directory / SINGLE).exists():
        return [SINGLE], None
    found = sorted(path.name for path in directory.glob("*.safetensors"))
    if len(found) == 1:
        return found, None
    if found:
        raise DamagedCheckpointError(
            f"{directory}: {len(found)} .safetensors files, but no {INDEX} that says what is in which; name one of them"
        )
    hint = ""
    if is_complete(directory) or step_directories(checkpoints_in(directory)):
        hint = f": it holds a checkpoint of ours; offload convert {directory} TARGET makes weights of it"
    raise DamagedCheckpointError(f"{directory}: no .safetensors file in it{hint}")


class WeightSource:
    """Weights of a model's parameters from files: checked as a whole first, then read range by range.

    Raises:
        CheckpointMismatchError: parameters that are missing, extra or of another shape, listed.
    """

    def __init__(self, weights: Weights, model: nn.Module) -> None:
        self.files = TensorFiles(weights.path)
        try:
            self._tensor_of = self._match(weights, model)
        except BaseException:
            self.files.close()
            raise

    def _match(self, weights: Weights, model: nn.Module) -> dict[int, str]:
        """id of parameter -> tensor; buffers are filled at once."""
        prefix = getattr(model, "base_model_prefix", "")
        names: dict[int, list[str]] = {}
        parameters: dict[int, nn.Parameter] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
            parameters[id(parameter)] = parameter
        found, missing, reshaped, used = dict[int, str](), list[str](), list[str](), set[str]()
        for key, aliases in names.items():
            candidates = [c for alias in aliases for c in _variants(alias, prefix)]
            present = [c for c in candidates if c in self.files]
            used.update(present)
            if not present:
                missing.append(aliases[0])
                continue
            entry, shape = self.files.entry(present[0]), tuple(parameters[key].shape)
            if entry.shape != shape or entry.dtype.is_floating_point != parameters[key].is_floating_point():
                reshaped.append(f"{present[0]} (file {list(entry.shape)} {entry.dtype}, model {list(shape)})")
                continue
            found[key] = present[0]
        buffers = self._buffers(model, prefix, used, reshaped)
        extra = [name for name in self.files.names() if name not in used]
        problems = []
        if missing and weights.missing == "refuse":
            problems.append(f"{len(missing)} missing (missing='init' accepts it): {', '.join(missing[:20])}")
        if extra and weights.extra == "refuse":
            problems.append(f"{len(extra)} extra (extra='ignore' accepts it): {', '.join(extra[:20])}")
        if reshaped:
            problems.append(f"{len(reshaped)} of another shape or kind: {', '.join(reshaped[:20])}")
        if problems:
            raise CheckpointMismatchError(f"{self.files.path} does not fit the model: {'; '.join(problems)}")
        for buffer, name in buffers:
            with torch.no_grad():
                buffer.copy_(self.files.read(name, 0, buffer.numel()).view(buffer.shape))
        return found

    def _buffers(self, model: nn.Module, prefix: str, used: set[str], reshaped: list[str]) -> list[tuple[Tensor, str]]:
        found = []
        for name, buffer in model.named_buffers():
            for candidate in _variants(name, prefix):
                if candidate in self.files and candidate not in used:
                    used.add(candidate)
                    if self.files.entry(candidate).shape == tuple(buffer.shape):
                        found.append((buffer, candidate))
                    else:
                        reshaped.append(candidate)
                    break
        return found

    def has(self, parameter: nn.Parameter) -> bool:
        """Whether the files have a value for it."""
        return id(parameter) in self._tensor_of

    def read(self, parameter: nn.Parameter, lo: int, hi: int) -> Tensor:
        """Elements `[lo, hi)` of the flattened parameter as a CPU tensor of the file's dtype."""
        return self.files.read(self._tensor_of[id(parameter)], lo, hi)

    def close(self) -> None:
        self.files.close()


def _variants(name: str, prefix: str) -> list[str]:
    """Names under which `transformers` may have saved a parameter: with and without the prefix of the base model."""
    if not prefix:
        return [name]
    stripped = name.removeprefix(f"{prefix}.")
    return [name, stripped] if stripped != name else [name, f"{prefix}.{name}"]


def open_weights(weights: Any, model: nn.Module) -> WeightSource | None:
    """What `initialize(weights=...)` means: a path or a `Weights`; None for None."""
    if weights is None:
        return None
    if not isinstance(weights, Weights):
        weights = Weights(path=weights)
    if not os.path.exists(weights.path):
        raise CheckpointError(f"weights = {os.fspath(weights.path)!r}: no such file or directory")
    return WeightSource(weights, model)


Values = Callable[[Any, int, int], Tensor]


def values_of(parameters: Mapping[str, nn.Parameter], source: WeightSource | None) -> Values:
    """For `FlatState.create`: elements `[lo, hi)` of the parameter of a slot, from the files where they have it."""

    def values(slot: Any, lo: int, hi: int) -> Tensor:
        parameter = parameters[slot.name]
        if source is not None and source.has(parameter):
            return source.read(parameter, lo, hi)
        return parameter.detach().reshape(-1)[lo:hi].cpu()

    return values
