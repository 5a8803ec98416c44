"""offload: train models whose state does not fit in memory.

with offload.empty_init():
    model = build_model()
engine = offload.initialize(model, config)
for batch in loader:
    loss = engine(**batch).loss
    engine.backward(loss)
    engine.step()
engine.close()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offload.checkpoint import CheckpointError, CheckpointSaveError
    from offload.checkpoint.weights import Weights
    from offload.config import Config, ConfigError, load_config
    from offload.engine import Engine, initialize
    from offload.errors import GradientError, OffloadError, PlanError, StaleWeightsError, UnsupportedModelError
    from offload.initialization import empty_init
    from offload.planner.plan import plan
    from offload.results import HandoverReport, MemoryReport, StepResult
    from offload.schedule.loss import chunked_cross_entropy

__all__ = [
    "CheckpointError",
    "CheckpointSaveError",
    "Config",
    "ConfigError",
    "Engine",
    "GradientError",
    "HandoverReport",
    "MemoryReport",
    "OffloadError",
    "PlanError",
    "StaleWeightsError",
    "StepResult",
    "UnsupportedModelError",
    "Weights",
    "chunked_cross_entropy",
    "empty_init",
    "initialize",
    "load_config",
    "plan",
]

__version__ = "0.1.0"

_HOMES = {
    "CheckpointError": "offload.checkpoint.errors",
    "CheckpointSaveError": "offload.checkpoint.errors",
    "Weights": "offload.checkpoint.weights",
    "Config": "offload.config",
    "ConfigError": "offload.config",
    "load_config": "offload.config",
    "Engine": "offload.engine",
    "initialize": "offload.engine",
    "GradientError": "offload.errors",
    "OffloadError": "offload.errors",
    "PlanError": "offload.errors",
    "StaleWeightsError": "offload.errors",
    "UnsupportedModelError": "offload.errors",
    "empty_init": "offload.initialization",
    "plan": "offload.planner.plan",
    "HandoverReport": "offload.results",
    "MemoryReport": "offload.results",
    "StepResult": "offload.results",
    "chunked_cross_entropy": "offload.schedule.loss",
}


def __getattr__(name: str) -> Any:
    # Lazy, so that the command line can report a wrong configuration before torch is imported.
    if name not in _HOMES:
        raise AttributeError(f"module 'offload' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
