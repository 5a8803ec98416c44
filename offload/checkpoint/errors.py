"""What can go wrong with a checkpoint."""

from __future__ import annotations

from offload.errors import OffloadError


class CheckpointError(ValueError):
    """A checkpoint that cannot be used, or that does not fit the engine; nothing was changed unless the text says so.

    The message names the file, what is wrong with it, and what to do.
    """


class IncompleteCheckpointError(CheckpointError):
    """A directory without a manifest: its save was cut short."""


class DamagedCheckpointError(CheckpointError):
    """A file is missing, shorter than it was, or has other bytes than were written; or it was never ours."""


class CheckpointMismatchError(CheckpointError):
    """Parameters, groups or shapes differ from the engine's; the message lists them."""


class CheckpointSaveError(OffloadError):
    """A save failed. What it had written was removed; earlier checkpoints are intact and training can go on."""
