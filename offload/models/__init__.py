"""A small reference Llama for demos, tests and benchmarks, and the model that a ``[model]`` section asks for."""

from .build import ModelSettings, build_model
from .config import LlamaConfig, parameter_count, presets
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
