"""What sections of the configuration do not allow each other, found without torch: problems as complete lines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offload.models.config import llama_config
from swap.geometry import format_bytes

if TYPE_CHECKING:
    from offload.config.schema import Config, ModelConfig


def of_model(model: ModelConfig, context: int = 1) -> list[str]:
    """What is wrong with the sizes of the model, for samples of `context` tokens."""
    if model.factory is not None:
        return []
    try:
        llama_config(model.preset, model.overrides(), context=context)
    except ValueError as error:
        return [str(error)]
    return []


def across(config: Config) -> list[str]:
    """What is wrong between sections that are right by themselves."""
    return [*of_model(config.model, config.data.context), *_eager(config)]


def _eager(config: Config) -> list[str]:
    if config.schedule.optimizer_step != "eager":
        return []
    settings = config.optimizer
    if settings.max_grad_norm is not None:
        return [eager_waits(f"optimizer.max_grad_norm = {settings.max_grad_norm:g}")]
    return [eager_waits("optimizer.check_finite")] if settings.check_finite else []


def eager_waits(waits_for: str) -> str:
    """The problem of `eager` where `waits_for` needs the norm of all gradients."""
    return (
        f"schedule.optimizer_step = 'eager' updates units during backward, but {waits_for} needs the norm of "
        "all gradients first: use 'deferred', or set optimizer.check_finite = false without max_grad_norm and fp16"
    )


def doubts(config: Config, *, ranks: int, memory: int) -> list[str]:
    """What can be run and is hardly meant, for the command's `ranks` processes on a machine with `memory` bytes."""
    found = []
    host, settings, parallel = config.memory.host, config.optimizer, config.parallel
    if host != "auto" and host > memory:
        found.append(
            f"memory.host = {format_bytes(host)} is more than the {format_bytes(memory)} of memory that this machine "
            "has, and so no limit: lower it, or use 'auto'"
        )
    warming = settings.scheduler != "none" and settings.total_steps == "auto"
    if warming and settings.warmup_steps > config.train.steps:
        found.append(
            f"optimizer.warmup_steps = {settings.warmup_steps} is more than train.steps = {config.train.steps}: the "
            "run ends while the learning rate still rises"
        )
    for key, value in (("shard_size", parallel.shard_size), ("replicate_size", parallel.replicate_size)):
        if ranks == 1 and value not in ("auto", 1):
            found.append(f"parallel.{key} = {value} has no effect in a single process: start ranks with torchrun")
    return found
