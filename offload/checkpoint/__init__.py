"""Checkpoints that resume with any world size, placement and state format; weights in and out of safetensors files.

docs/checkpoint_format.md is the format.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offload.checkpoint.access import CheckpointAccess, SavedCheckpoint
    from offload.checkpoint.errors import (
        CheckpointError,
        CheckpointMismatchError,
        CheckpointSaveError,
        DamagedCheckpointError,
        IncompleteCheckpointError,
    )
    from offload.checkpoint.load import LoadReport
    from offload.checkpoint.places import complete_checkpoints, find_checkpoint
    from offload.checkpoint.reader import Source

__all__ = [
    "CheckpointAccess",
    "CheckpointError",
    "CheckpointMismatchError",
    "CheckpointSaveError",
    "DamagedCheckpointError",
    "IncompleteCheckpointError",
    "LoadReport",
    "SavedCheckpoint",
    "Source",
    "complete_checkpoints",
    "find_checkpoint",
]

_HOMES = {
    "CheckpointAccess": "access",
    "CheckpointError": "errors",
    "CheckpointMismatchError": "errors",
    "CheckpointSaveError": "errors",
    "DamagedCheckpointError": "errors",
    "IncompleteCheckpointError": "errors",
    "LoadReport": "load",
    "SavedCheckpoint": "access",
    "Source": "reader",
    "complete_checkpoints": "places",
    "find_checkpoint": "places",
}


def __getattr__(name: str) -> Any:
    # Lazy, so that the command can say what is wrong with a directory before torch is imported.
    if name not in _HOMES:
        raise AttributeError(f"module 'offload.checkpoint' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"offload.checkpoint.{_HOMES[name]}"), name)
