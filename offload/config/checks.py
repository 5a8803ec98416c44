"""What sections of the configuration do not allow each other, found without torch: problems as complete lines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offload.models.config import llama_config

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
