"""From the settings of a ``[model]`` section to a module."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any, Protocol

from torch import nn

from .config import LlamaConfig, presets
from .llama import Llama

DEFAULT_PRESET = "20m"


class ModelSettings(Protocol):
    """What ``build_model`` reads: a preset or a factory by name, and the fields that override the preset."""

    @property
    def preset(self) -> str | None: ...

    @property
    def factory(self) -> str | None: ...

    def overrides(self) -> Mapping[str, Any]: ...


def build_model(settings: ModelSettings, *, context: int) -> nn.Module:
    """The model for sequences of ``context`` bytes (so at least 256 token ids).

    ``ValueError`` names the key that cannot be. A preset's ``max_positions`` grows to ``context`` unless it is set.
    """
    if settings.factory is not None:
        return _call_factory(settings.factory)
    return Llama(llama_config(settings.preset, settings.overrides(), context=context))


def llama_config(preset: str | None, overrides: Mapping[str, Any], *, context: int) -> LlamaConfig:
    """The sizes that ``build_model`` uses for a preset (by default 20m) and its overrides."""
    name = preset or DEFAULT_PRESET
    if name not in presets:
        raise ValueError(f"model.preset = {name!r}: must be one of {', '.join(presets)}")
    changes = dict(overrides)
    changes.setdefault("max_positions", max(context, presets[name].max_positions))
    try:
        config = dataclasses.replace(presets[name], **changes)
    except ValueError as error:
        raise ValueError(f"model: {error}") from None
    if config.max_positions < context:
        raise ValueError(f"model.max_positions = {config.max_positions} is less than data.context = {context}")
    if config.vocab_size < 256:
        raise ValueError(f"model.vocab_size = {config.vocab_size}: text in bytes needs at least 256 token ids")
    return config


def _call_factory(path: str) -> nn.Module:
    module_name, _, attribute = path.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"model.factory = {path!r}: {error}") from error
    model = factory()
    if not isinstance(model, nn.Module):
        raise ValueError(f"model.factory = {path!r} must return a torch.nn.Module, got {type(model).__name__}")
    return model
