"""What can be found wrong with a run of the command before torch is loaded: paths, and settings that no model of the
command can have.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from offload.checkpoint.places import resolve_resume, why_not_writable
from offload.config import Config, ConfigError
from offload.text_files import find_files
from swap.errors import SwapPathError
from swap.files import open_swap_file


def check(config: Config, *, saves: bool = False, resume: str | None = None) -> None:
    """Refuses what cannot be run. `saves`: whether checkpoints will be written; `resume`: what the command was given.

    Raises:
        ConfigError: a line for each problem.
    """
    problems = [*_swap_paths(config), *_formats(config), *_files(config)]
    settings = config.checkpoint
    if saves and settings.directory is not None and (settings.interval is not None or settings.on_signal):
        problems += unwritable(Path(settings.directory))
    if resume not in (None, "auto"):
        try:
            resolve_resume(resume, Path(resume))
        except ConfigError as error:
            problems += error.problems
    if config.model.factory is not None and os.getcwd() not in sys.path:
        # A factory beside the configuration is the usual case, and a console script does not look there by itself.
        sys.path.insert(0, os.getcwd())
    if problems:
        raise ConfigError(problems)


def unwritable(directory: Path) -> list[str]:
    """The problem with a directory in which no checkpoint could be saved."""
    reason = why_not_writable(directory)
    return [] if reason is None else [f"checkpoint.directory = {str(directory)!r}: {reason}; choose another directory"]


def _swap_paths(config: Config) -> list[str]:
    problems = []
    for path in config.memory.nvme_paths:
        try:
            open_swap_file(Path(path), False).close()
        except SwapPathError as error:
            problems.append(" ".join(str(error).split()))
    return problems


def _formats(config: Config) -> list[str]:
    # The command's own models are made in fp32 and cast; a factory's may be in bf16 already.
    form, compute = config.optimizer.state_format, config.precision.compute_dtype
    if form == "fp32" or compute == "bf16" or config.model.factory is not None:
        return []
    return [
        f"optimizer.state_format = {form!r} holds masters of weights that compute in bf16, not with "
        f"precision.compute_dtype = {compute!r}: set compute_dtype to 'bf16', or state_format to 'fp32'"
    ]


def _files(config: Config) -> list[str]:
    problems = []
    weights = config.model.weights
    if weights is not None and not os.path.lexists(weights):
        problems.append(f"model.weights = {weights!r}: no such file or directory")
    if config.data.files:
        try:
            find_files(config.data.files)
        except ValueError as error:
            problems.append(str(error))
    return problems
