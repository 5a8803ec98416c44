"""A small reference Llama for demos, tests and benchmarks, and the model that a ``[model]`` section asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .config import LlamaConfig, parameter_count, presets

if TYPE_CHECKING:
    from .build import ModelSettings, build_model
    from .llama import Llama, LlamaBlock, LlamaOutput, RMSNorm

__all__ = [
    "Llama",
    "LlamaBlock",
    "LlamaConfig",
    "LlamaOutput",
    "ModelSettings",
    "RMSNorm",
    "build_model",
    "parameter_count",
    "presets",
]


def __getattr__(name: str) -> Any:
    # Lazy, so that sizes can be checked before torch is imported.
    if name not in __all__:
        raise AttributeError(f"module 'offload.models' has no attribute {name!r}")
    import importlib

    home = "build" if name in ("ModelSettings", "build_model") else "llama"
    return getattr(importlib.import_module(f"offload.models.{home}"), name)
