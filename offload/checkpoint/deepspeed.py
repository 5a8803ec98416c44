"""DeepSpeed ZeRO checkpoints of stages 1 to 3: fp32 weights, moments and steps, by parameter name and element range.

Their files are pickles. `torch.load` reads them with `weights_only`, which runs no code, and with the few classes of
DeepSpeed that such a file names replaced by empty stand-ins; DeepSpeed itself is not needed. Tensors stay in the files
(mapped); only what is asked for is read.

A rank of stage 1 or 2 holds its part of each group's flat vector; the parts one after another are the vector, in which
parameters follow each other. In stage 3 each parameter is cut into equal parts, one a rank, and a rank's parts follow
each other through its flat groups.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offload.checkpoint.errors import CheckpointError, DamagedCheckpointError
from offload.checkpoint.foreign import ForeignParameter

PLANES = ("master", "exp_avg", "exp_avg_sq")
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_00_model_states\.pt")
_OTHER_MODEL_RANKS = re.compile(r".*mp_rank_(?!00)\d\d_.*\.pt")
_NAMED = (
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.utils.tensor_fragment.fragment_address",
)


class _Inert:
    """Stands in for a class of DeepSpeed: keeps what it was made with, does nothing."""

    def __init__(self, *arguments: Any, **_named: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.arguments = ()


_STAND_INS: list[Any] = [(type(f"_Inert{i}", (_Inert,), {}), name) for i, name in enumerate(_NAMED)]


def is_deepspeed(path: Path) -> bool:
    """Whether a directory is a checkpoint of DeepSpeed, or holds some and says which is the latest."""
    if (path / "latest").is_file() and any(path.glob("*/*_model_states.pt")):
        return True
    return any(path.glob("*_optim_states.pt"))


@dataclass(frozen=True, slots=True)
class _Segment:
    """Elements `[start, start + length)` of the vector of a rank and group."""

    rank: int
    group: int
    start: int
    length: int


class DeepSpeedCheckpoint:
    """An open checkpoint directory (or its parent with a file `latest`).

    Raises:
        DamagedCheckpointError: a rank's file is missing, malformed, or holds a class that does not belong there.
        CheckpointError: tensor or expert parallel checkpoints, which are not supported.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.directory = _tagged(Path(path))
        names = sorted(file.name for file in self.directory.iterdir() if file.is_file())
        if others := [
            n for n in names if _OTHER_MODEL_RANKS.fullmatch(n) or n.startswith(("expert_", "layer_", "expp_"))
        ]:
            raise CheckpointError(f"{self.directory}: {others[0]} is of a model- or expert-parallel run, not supported")
        optimizer = {int(m[1]): n for n in names if (m := _OPTIMIZER.fullmatch(n))}
        model = {int(m[1] or 0): n for n in names if (m := _MODEL.fullmatch(n))}
        if sorted(optimizer) != list(range(len(optimizer))) or not optimizer or 0 not in model:
            raise DamagedCheckpointError(
                f"{self.directory}: files of ranks {sorted(optimizer)} of the optimizer and {sorted(model)} of the "
                "model; some are missing"
            )
        self._states = [self._optimizer_state(optimizer[rank]) for rank in range(len(optimizer))]
        self._models = [self._load(model[rank]) for rank in sorted(model)]
        self.world = len(self._states)
        try:
            self._read_layout()
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise DamagedCheckpointError(
                f"{self.directory}: not the layout of a ZeRO checkpoint: {type(error).__name__}: {error}"
            ) from error

    def _load(self, name: str) -> dict[str, Any]:
        path = self.directory / name
        try:
            with torch.serialization.safe_globals(_STAND_INS):
                found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:
            reason = str(error).strip().splitlines()[0]
            raise DamagedCheckpointError(f"{path}: cannot be read: {reason}") from error
        if not isinstance(found, dict):
            raise DamagedCheckpointError(f"{path}: not a checkpoint")
        return found

    def _optimizer_state(self, name: str) -> dict[str, Any]:
        state = self._load(name).get("optimizer_state_dict")
        if not isinstance(state, dict):
            raise DamagedCheckpointError(f"{self.directory / name}: no optimizer state in it")
        return state

    def _read_layout(self) -> None:
        first = self._states[0]
        stage = first["zero_stage"]
        self.stage = int(stage.arguments[0]) if isinstance(stage, _Inert) else int(stage)
        count = first["partition_count"]
        count = max(count) if isinstance(count, (list, tuple)) else count
        if int(count) != self.world:
            raise DamagedCheckpointError(f"{self.directory}: {self.world} ranks' files of a run of {count}")
        self._vectors = [self._vectors_of(state) for state in self._states]
        shapes = self._models[0]["param_shapes"]
        if not isinstance(shapes, (list, tuple)):
            raise DamagedCheckpointError(f"{self.directory}: no param_shapes")
        self._shapes = {name: tuple(shape) for group in shapes for name, shape in group.items()}
        self._segments = self._full_partitions() if self.stage == 3 else self._flat_groups(shapes)
        for name, segments in self._segments.items():
            self._check(name, segments)
        self.step = max((self._steps(segments[0]) for segments in self._segments.values() if segments), default=0)

    def _vectors_of(self, state: Mapping[str, Any]) -> list[dict[str, Any]]:
        """For each group of a rank the flat planes and the step."""
        masters = state["fp32_flat_groups"] if self.stage == 3 else state["single_partition_of_fp32_groups"]
        inner = state["optimizer_state_dict"] if self.stage == 3 else state["base_optimizer_state"]
        states = inner["state"] if isinstance(inner, dict) else dict(enumerate(inner))
        groups = inner.get("param_groups", []) if isinstance(inner, dict) else []
        shared = state.get("base_optimizer_state_step", groups[0].get("step", 0) if groups else 0)
        found = []
        for number, master in enumerate(masters):
            own = states.get(number, {})
            entry = {"master": master, "step": own.get("step", shared)}
            for kind in ("exp_avg", "exp_avg_sq"):
                entry[kind] = own.get(kind)
            found.append(entry)
        return found

    def _flat_groups(self, shapes: Sequence[Mapping[str, Any]]) -> dict[str, list[_Segment]]:
        """Stages 1 and 2: where each parameter lies in the parts of its group's vector."""
        paddings = self._states[0].get("param_alignment_paddings")
        found: dict[str, list[_Segment]] = {}
        for group, named in enumerate(shapes):
            bounds = [0]
            for rank in range(self.world):
                bounds.append(bounds[-1] + int(self._vectors[rank][group]["master"].numel()))
            at = 0
            for number, (name, shape) in enumerate(named.items()):
                end = at + _numel(shape)
                found[name] = [
                    _Segment(rank, group, max(at, bounds[rank]) - bounds[rank], length)
                    for rank in range(self.world)
                    if (length := min(end, bounds[rank + 1]) - max(at, bounds[rank])) > 0
                ]
                at = end + (int(paddings[group][number]) if paddings else 0)
        return found

    def _full_partitions(self) -> dict[str, list[_Segment]]:
        """Stage 3: each parameter's parts on all ranks, through the boundaries of flat groups."""
        bounds = [0]
        for vector in self._vectors[0]:
            bounds.append(bounds[-1] + int(vector["master"].numel()))
        found: dict[str, list[_Segment]] = {}
        at = 0
        for name, shape in self._shapes.items():
            numel = _numel(shape)
            part = -(-numel // self.world)
            segments, left = [], numel
            for rank in range(self.world):
                lo, hi = at, at + min(part, max(0, left))
                left -= part
                for group in range(len(bounds) - 1):
                    start, stop = max(lo, bounds[group]), min(hi, bounds[group + 1])
                    if start < stop:
                        segments.append(_Segment(rank, group, start - bounds[group], stop - start))
            found[name] = segments
            at += part
        return found

    def _check(self, name: str, segments: Sequence[_Segment]) -> None:
        total = 0
        for segment in segments:
            vector = self._vectors[segment.rank][segment.group]
            for plane in PLANES:
                tensor = vector[plane]
                if tensor is None and plane != "master":
                    continue
                if tensor.dim() != 1 or segment.start + segment.length > tensor.numel():
                    raise DamagedCheckpointError(f"{self.directory}: {name} lies beyond the {plane} of its group")
            total += segment.length
        if total != _numel(self._shapes[name]):
            raise DamagedCheckpointError(
                f"{self.directory}: {total:,} of {_numel(self._shapes[name]):,} elements of {name} are there"
            )

    def _steps(self, segment: _Segment) -> int:
        return int(self._vectors[segment.rank][segment.group]["step"])

    def parameters(self) -> list[ForeignParameter]:
        """Everything that was trained, with its moments, and frozen parameters as they are."""
        module = self._models[0].get("module") or {}
        found = []
        for name, segments in self._segments.items():
            own = module.get(name)
            dtype = own.dtype if isinstance(own, Tensor) and own.is_floating_point() else torch.float32
            steps = self._steps(segments[0]) if segments else 0
            found.append(
                ForeignParameter(
                    name=name,
                    shape=self._shapes[name],
                    dtype=dtype,
                    trained=True,
                    steps=steps,
                    read=partial(self._read, segments),
                )
            )
        return [*found, *self._frozen(module)]

    def _read(self, segments: Sequence[_Segment], plane: str, lo: int, hi: int) -> Tensor:
        parts, at = [], 0
        for segment in segments:
            start, stop = max(lo, at), min(hi, at + segment.length)
            if start < stop:
                tensor = self._vectors[segment.rank][segment.group][plane]
                if tensor is None:  # no step was made yet
                    parts.append(torch.zeros(stop - start))
                else:
                    first = segment.start + start - at
                    parts.append(tensor.detach()[first : first + stop - start].float())
            at += segment.length
        return torch.cat(parts) if parts else torch.empty(0)

    def _frozen(self, module: Mapping[str, Any]) -> list[ForeignParameter]:
        first = self._models[0]
        shapes = first.get("frozen_param_shapes") or {}
        fragments = [model.get("frozen_param_fragments") or {} for model in self._models]
        skipped = {*self._segments, *(first.get("buffer_names") or ()), *(first.get("shared_params") or {})}
        found = []
        for name, value in module.items():
            if name in skipped or not isinstance(value, Tensor):
                continue
            shape = tuple(shapes.get(name, value.shape))
            parts = [value]
            if value.numel() != _numel(shape) or name in shapes:
                parts = [fragment[name] for fragment in fragments if name in fragment] or [value]
            if sum(part.numel() for part in parts) < _numel(shape):
                raise DamagedCheckpointError(f"{self.directory}: parts of the frozen parameter {name} are missing")
            read = partial(_whole, [part.detach().reshape(-1) for part in parts])
            found.append(
                ForeignParameter(name=name, shape=shape, dtype=parts[0].dtype, trained=False, steps=0, read=read)
            )
        return found

    def close(self) -> None:
        """Lets the mapped files go. Idempotent."""
        self._states, self._models, self._vectors = [], [], []

    def __enter__(self) -> DeepSpeedCheckpoint:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _whole(parts: Sequence[Tensor], plane: str, lo: int, hi: int) -> Tensor:
    found, at = [], 0
    for part in parts:
        start, stop = max(lo, at), min(hi, at + part.numel())
        if start < stop:
            found.append(part[start - at : stop - at])
        at += part.numel()
    return torch.cat(found) if found else parts[0][:0]


def _numel(shape: Any) -> int:
    return math.prod(int(size) for size in shape)


def _tagged(path: Path) -> Path:
    """The directory with the files: `path`, or the one in it that its file `latest` names."""
    latest = path / "latest"
    if not latest.is_file():
        return path
    tag = latest.read_text(encoding="utf-8", errors="replace")[:200].strip()
    if not tag or Path(tag).name != tag or tag in (".", "..") or not (path / tag).is_dir():
        raise DamagedCheckpointError(f"{latest}: names {tag!r:.80}, which is no directory beside it")
    return path / tag
