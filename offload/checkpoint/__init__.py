"""Checkpoints that resume with any world size, placement and state format; weights in and out of safetensors files.

docs/checkpoint_format.md is the format.
"""

from offload.checkpoint.access import CheckpointAccess, SavedCheckpoint
from offload.checkpoint.directory import complete_checkpoints, find_checkpoint
from offload.checkpoint.errors import (
    CheckpointError,
    CheckpointMismatchError,
    CheckpointSaveError,
    DamagedCheckpointError,
    IncompleteCheckpointError,
)
from offload.checkpoint.load import LoadReport
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
