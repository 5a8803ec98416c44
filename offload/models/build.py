"""From the settings of a ``[model]`` section to a module."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Protocol

from torch import nn

from .config import llama_config
from .llama import Llama


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
