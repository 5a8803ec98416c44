"""The small part of a checkpoint: what an engine says about itself in the manifest, and how it takes it back."""

from __future__ import annotations

import importlib.metadata
import logging
import platform
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from offload.checkpoint.errors import CheckpointError, CheckpointMismatchError, DamagedCheckpointError
from offload.checkpoint.format import decode_state, encode_state
from offload.checkpoint.load import match_groups
from offload.checkpoint.manifest import Manifest, SavedBuffer, SavedFile, SavedParameter
from offload.checkpoint.regions import encoding_of
from optimizer_cpu import AdamWHyper

if TYPE_CHECKING:
    from offload.checkpoint.access import CheckpointAccess

log = logging.getLogger("offload")

_SCALER = ("scale", "good_steps", "left")
_PER_GROUP = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs")


def versions() -> dict[str, str]:
    """Of what wrote a checkpoint."""
    found = {"python": platform.python_version()}
    for name in ("offload", "torch", "numpy", "transformers"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def describe(
    engine: CheckpointAccess, buffers: Mapping[str, Tensor], *, step: int, world: int, data: Any, extra: Any
) -> dict[str, Any]:
    """The keyword arguments of a manifest but its files, as the engine is now.

    Raises:
        CheckpointError: a scheduler, group, `data` or `extra` holds what JSON cannot.
    """
    parameters = {}
    for name, record in engine._records.items():
        state = engine._state(record)
        parameters[name] = SavedParameter(
            shape=record.slot.shape,
            numel=record.slot.numel,
            dtype=state.flat.dtype,
            encoding=encoding_of(state, record.slot),
            steps=engine._steps.get(name, 0),
        )
    names = {id(record.parameter): name for name, record in engine._records.items()}
    groups = []
    for index, group in enumerate(engine.optimizer.param_groups):
        options = {key: value for key, value in group.items() if key != "params"}
        groups.append(
            {
                "parameters": [names[id(p)] for p in group["params"] if id(p) in names],
                "options": encode_state(options, f"param_groups[{index}]"),
            }
        )
    scheduler = engine.lr_scheduler
    scaler = engine._scaler
    return {
        "step": step,
        "world": world,
        "parameters": parameters,
        "buffers": {n: SavedBuffer(shape=tuple(b.shape), numel=b.numel(), dtype=b.dtype) for n, b in buffers.items()},
        "groups": groups,
        "scheduler": None if scheduler is None else _scheduler_state(scheduler),
        "scaler": None if scaler is None else {key: getattr(scaler, key) for key in _SCALER},
        "engine": {
            "steps": engine._step_count,
            "skipped_steps": engine._skipped_steps,
            "seed": engine.config.seed,
            "state_format": engine.config.optimizer.state_format,
        },
        "data": encode_state(data, "data"),
        "extra": encode_state(extra, "extra"),
        "config": encode_state(engine.config.to_dict(), "config"),
        "versions": versions(),
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _scheduler_state(scheduler: Any) -> Any:
    label = f"lr_scheduler {type(scheduler).__name__}"
    if not callable(getattr(scheduler, "state_dict", None)) or not callable(
        getattr(scheduler, "load_state_dict", None)
    ):
        raise CheckpointError(f"{label} has no state_dict() and load_state_dict(), so a checkpoint cannot resume it")
    return {"class": type(scheduler).__name__, "state": encode_state(scheduler.state_dict(), label)}


def make_manifest(described: Mapping[str, Any], files: tuple[SavedFile, ...]) -> Manifest:
    """The manifest of a checkpoint whose files are all written."""
    return Manifest(**described, files=files)


def restore_groups(engine: CheckpointAccess, manifest: Manifest, where: str) -> list[tuple[dict[str, Any], Any]]:
    """For each group of the engine its dict and the options it shall take (None: keep), checked, nothing changed."""
    saved = []
    for index, group in enumerate(manifest.groups):
        if not isinstance(group, dict) or not isinstance(group.get("parameters"), list):
            raise DamagedCheckpointError(f"{where}: groups[{index}] is not a parameter group")
        options = decode_state(group.get("options"), f"{where}: groups[{index}]")
        if not isinstance(options, dict) or "params" in options:
            raise DamagedCheckpointError(f"{where}: groups[{index}] has no options")
        saved.append(([str(name) for name in group["parameters"]], options))
    aliases = engine._aliases()
    saved = [([aliases.get(name, name) for name in names], options) for names, options in saved]
    known = {id(record.parameter): name for name, record in engine._records.items()}
    own = [[known[id(p)] for p in g["params"] if id(p) in known] for g in engine.optimizer.param_groups]
    chosen = match_groups(own, saved, where)
    result = []
    for group, number in zip(engine.optimizer.param_groups, chosen, strict=True):
        options = None if number < 0 else {k: v for k, v in saved[number][1].items() if k in group}
        if options is not None:
            _check_options(options, f"{where}: groups[{number}]")
        result.append((group, options))
    engine._group_order = chosen
    return result


def _check_options(options: Mapping[str, Any], where: str) -> None:
    """Refuses hyperparameters that no step could use."""
    try:
        beta1, beta2 = (float(beta) for beta in options["betas"])
        decay, eps = float(options["weight_decay"]), float(options["eps"])
        AdamWHyper(lr=float(options["lr"]), beta1=beta1, beta2=beta2, eps=eps, weight_decay=decay, step=1)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise DamagedCheckpointError(f"{where}: hyperparameters that no step could use: {error!r}") from None


def restore_scheduler(engine: CheckpointAccess, manifest: Manifest, where: str) -> dict[str, Any] | None:
    """The state for the engine's scheduler, checked against it; None if neither side has one.

    Raises:
        CheckpointMismatchError: one side has a scheduler that the other has not, or another class.
    """
    saved, own = manifest.scheduler, engine.lr_scheduler
    if saved is None:
        if own is not None:
            log.warning("%s: saved without a scheduler; this engine's begins anew", where)
        return None
    name = str(saved.get("class")) if isinstance(saved, dict) else "?"
    mine = None if own is None else type(own).__name__
    if name != mine:
        raise CheckpointMismatchError(
            f"{where}: saved with lr_scheduler {name}, this engine has {mine}; pass the same scheduler, or load with "
            "weights_only=True"
        )
    state = decode_state(saved.get("state"), f"{where}: scheduler")
    if not isinstance(state, dict):
        raise DamagedCheckpointError(f"{where}: scheduler has no state")
    order = engine._group_order
    if len(set(order)) == len(order) and all(number >= 0 for number in order):
        for key in _PER_GROUP:
            values = state.get(key)
            if isinstance(values, list) and len(values) == len(manifest.groups) and max(order) < len(values):
                state[key] = [values[number] for number in order]
    return state


def restore_scaler(engine: CheckpointAccess, manifest: Manifest, where: str) -> None:
    """Sets the loss scale; an engine without one ignores a saved one, and the other way round."""
    saved, scaler = manifest.scaler, engine._scaler
    if scaler is None or saved is None:
        return
    if not isinstance(saved, dict) or not all(isinstance(saved.get(key), (int, float)) for key in _SCALER):
        raise DamagedCheckpointError(f"{where}: scaler is not a loss scale")
    if not scaler.dynamic:
        return
    scaler.scale, scaler.good_steps, scaler.left = float(saved["scale"]), int(saved["good_steps"]), int(saved["left"])
