"""Configuration: sections, sizes, files, overrides, and errors of one clear line each."""

from offload.config.errors import ConfigError
from offload.config.load import DEFAULT_FILE, load_config
from offload.config.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    LogConfig,
    MemoryConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PlacementConfig,
    PrecisionConfig,
    ScheduleConfig,
    SwapConfig,
    TrainConfig,
    UnitsConfig,
)

__all__ = [
    "DEFAULT_FILE",
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "LogConfig",
    "MemoryConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PlacementConfig",
    "PrecisionConfig",
    "ScheduleConfig",
    "SwapConfig",
    "TrainConfig",
    "UnitsConfig",
    "load_config",
]
