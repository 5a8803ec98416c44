"""One view of every kind of saved state that this package reads: parameters by name, planes in ranges."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from offload.checkpoint.dcp import METADATA, DistributedCheckpoint, read_dcp
from offload.checkpoint.deepspeed import DeepSpeedCheckpoint, is_deepspeed
from offload.checkpoint.export import Tensors, carried_from, target_dtype
from offload.checkpoint.foreign import ForeignParameter
from offload.checkpoint.load import Loader
from offload.checkpoint.manifest import SavedParameter
from offload.checkpoint.places import RECORDS, checkpoints_in, find_checkpoint, is_complete, step_directories
from offload.checkpoint.reader import Source
from offload.checkpoint.streams import buffer_tensors
from offload.checkpoint.weights import TensorFiles
from optimizer_cpu import kernels

_RANGE = 1 << 20

Opened = tuple[list[ForeignParameter], int, list[Tensors], list[Path]]


def own_checkpoint(path: Path) -> Path | None:
    """The checkpoint of ours that `path` names: itself, or the newest complete one of a directory of several or of a
    run; None for what is none of these.

    Raises:
        IncompleteCheckpointError: one of these without a complete checkpoint.
    """
    root = checkpoints_in(path)
    ours = is_complete(root) or step_directories(root) or (root / RECORDS).is_file()
    return find_checkpoint(root) if ours else None


def open_any(path: Path, stack: ExitStack) -> Opened:
    """(parameters, step, buffers, files to carry along) of a saved state of any known kind; `stack` closes it.

    Raises:
        CheckpointError: none of them, or damaged.
    """
    if path.is_dir():
        if (ours := own_checkpoint(path)) is not None:
            return _own(ours, stack)
        if (path / METADATA).exists():
            parameters, step = read_dcp(stack.enter_context(DistributedCheckpoint(path)))
            return parameters, step, [], []
        if is_deepspeed(path):
            checkpoint = stack.enter_context(DeepSpeedCheckpoint(path))
            return checkpoint.parameters(), checkpoint.step, [], []
    files = stack.enter_context(TensorFiles(path))
    found = []
    for name in files.names():
        entry = files.entry(name)
        read = partial(_from_files, files, name)
        found.append(
            ForeignParameter(name=name, shape=entry.shape, dtype=entry.dtype, trained=False, steps=0, read=read)
        )
    return found, 0, [], carried_from(path if path.is_dir() else path.parent)


def _from_files(files: TensorFiles, name: str, plane: str, lo: int, hi: int) -> Tensor:
    return files.read(name, lo, hi)


def _own(path: Path, stack: ExitStack) -> Opened:
    source = stack.enter_context(Source(path))
    loader = Loader(source, {}, None, lambda n: torch.empty(n, dtype=torch.uint8), weights_only=False)
    found = []
    for name, saved in source.manifest.parameters.items():
        found.append(
            ForeignParameter(
                name=name,
                shape=saved.shape,
                dtype=saved.dtype,
                trained=saved.encoding is not None,
                steps=saved.steps,
                read=partial(_from_source, loader, name, saved),
            )
        )
    return found, source.manifest.step, buffer_tensors(source), []


def _from_source(loader: Loader, name: str, saved: SavedParameter, plane: str, lo: int, hi: int) -> Tensor:
    if plane == "weight":
        out = torch.empty(hi - lo, dtype=saved.dtype)
        loader.read_weight(name, saved, lo, hi, out)
        return out
    if saved.encoding == "fp32":
        out = torch.empty(hi - lo)
        loader.source.read(name, plane, lo, hi, out)
        return out
    master, exp_avg, exp_avg_sq = loader.decode(name, saved, lo, hi)
    value = {"master": master, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}[plane]
    assert value is not None
    return value


def weights_of(parameters: Iterable[ForeignParameter], dtype: str | None) -> list[Tensors]:
    """The weights as tensors to export: in fp32 the master of a trained parameter, else its weight."""
    found = []
    for parameter in parameters:
        wanted = target_dtype(dtype, parameter.dtype)
        found.append(Tensors(parameter.name, wanted, parameter.shape, partial(_weight, parameter, wanted)))
    return found


def _weight(parameter: ForeignParameter, dtype: torch.dtype, lo: int, hi: int) -> Iterator[Tensor]:
    for start in range(lo, hi, _RANGE):
        stop = min(hi, start + _RANGE)
        if not parameter.trained:
            yield parameter.read("weight", start, stop).to(dtype)
            continue
        master = parameter.read("master", start, stop).float()
        if dtype != torch.float32:
            rounded = torch.empty(master.numel(), dtype=parameter.dtype)
            kernels.round_weight_(master.clone(), rounded)
            yield rounded.to(dtype)
        else:
            yield master.clone()


def dcp_tensors(parameter: ForeignParameter) -> list[tuple[tuple[str, ...], Tensors]]:
    """A parameter as `get_model_state_dict` and `get_optimizer_state_dict` of torch name it; trained ones in fp32."""
    name, shape = parameter.name, parameter.shape
    if not parameter.trained:
        return [(("model", name), Tensors(name, parameter.dtype, shape, partial(_plane, parameter, "weight")))]
    items: list[tuple[tuple[str, ...], Tensors]] = [
        (("model", name), Tensors(name, torch.float32, shape, partial(_plane, parameter, "master")))
    ]
    for kind in ("exp_avg", "exp_avg_sq"):
        path = ("optim", "state", name, kind)
        items.append((path, Tensors(name, torch.float32, shape, partial(_plane, parameter, kind))))
    step = partial(_step, parameter)
    items.append((("optim", "state", name, "step"), Tensors(name, torch.float32, (), step)))
    return items


def _plane(parameter: ForeignParameter, plane: str, lo: int, hi: int) -> Iterator[Tensor]:
    for start in range(lo, hi, _RANGE):
        yield parameter.read(plane, start, min(hi, start + _RANGE)).clone()


def _step(parameter: ForeignParameter, lo: int, hi: int) -> Iterator[Tensor]:
    yield torch.tensor([float(parameter.steps)])
