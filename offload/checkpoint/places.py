"""Where checkpoints lie: what can be told of directories without reading what is in their files, and without torch."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import tempfile
from pathlib import Path

from offload.checkpoint.errors import IncompleteCheckpointError
from offload.config import Config, ConfigError

MANIFEST = "manifest.json"
STEP_DIRECTORY = re.compile(r"step-(\d{8,12})")
OF_A_RUN = "checkpoints"
"""The directory of checkpoints in that of a run."""
RECORDS = "metrics.jsonl"
"""A file that the directory of every run has."""


def step_directories(directory: Path) -> list[tuple[int, Path]]:
    """(step, path) of every directory named like a checkpoint, complete or not, oldest first. Follows no links."""
    found = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(directory) as entries:
        for entry in entries:
            match = STEP_DIRECTORY.fullmatch(entry.name)
            if match and entry.is_dir(follow_symlinks=False):
                found.append((int(match[1]), Path(entry.path)))
    return sorted(found)


def is_complete(path: Path) -> bool:
    """Whether a directory holds a manifest."""
    try:
        return stat.S_ISREG(os.lstat(path / MANIFEST).st_mode)
    except OSError:
        return False


def complete_checkpoints(directory: Path) -> list[tuple[int, Path]]:
    """(step, path) of the complete checkpoints, oldest first."""
    return [item for item in step_directories(directory) if is_complete(item[1])]


def checkpoints_in(path: Path) -> Path:
    """`path`, or for the directory of a run the one of its checkpoints."""
    below = path / OF_A_RUN
    return below if not is_complete(path) and not step_directories(path) and step_directories(below) else path


def find_checkpoint(path: str | os.PathLike[str]) -> Path:
    """A checkpoint: `path` itself, or the newest complete one in it; `path` may also be the directory of a run.

    Raises:
        IncompleteCheckpointError: neither is there; the message says what is.
    """
    root = checkpoints_in(Path(path))
    if is_complete(root):
        return root
    complete = complete_checkpoints(root)
    if complete:
        return complete[-1][1]
    if not root.is_dir():
        found = "not a directory" if os.path.lexists(root) else "no such directory"
        raise IncompleteCheckpointError(f"{root}: {found}")
    cut = [p.name for _, p in step_directories(root)]
    found = f"only {', '.join(cut[-3:])}, whose save was cut short" if cut else "and no step-… directory"
    if not cut and (root / RECORDS).is_file():
        raise IncompleteCheckpointError(
            f"{root}: the directory of a run that has no checkpoint in {root / OF_A_RUN}; it saves there when "
            "checkpoint.interval is set or a signal ends it, unless checkpoint.directory names another place"
        )
    raise IncompleteCheckpointError(f"{root}: no complete checkpoint ({MANIFEST}) in it, {found}")


def free_bytes(directory: Path) -> int:
    """Bytes free on the filesystem of a directory that may not exist yet."""
    return shutil.disk_usage(_nearest(directory)).free


def directory_of(config: Config, run: Path) -> Path:
    """Where a run's checkpoints lie."""
    return Path(config.checkpoint.directory) if config.checkpoint.directory is not None else run / OF_A_RUN


def newest_run(runs: Path = Path("runs")) -> Path | None:
    """The directory below `runs` whose newest complete checkpoint was written last."""
    found = []
    for run in sorted(runs.glob("*")):
        complete = complete_checkpoints(run / OF_A_RUN)
        if complete:
            found.append((complete[-1][1].stat().st_mtime_ns, run))
    return max(found)[1] if found else None


def resolve_resume(wanted: str, directory: Path) -> Path | None:
    """The checkpoint that `--resume` names: a path, or the newest complete one of `directory` for "auto" (None: start
    from the beginning).

    Raises:
        ConfigError: a named one is not there or not complete.
    """
    try:
        return find_checkpoint(directory if wanted == "auto" else wanted)
    except IncompleteCheckpointError as error:
        if wanted == "auto":
            return None
        raise ConfigError([f"--resume: {error}"]) from None


def why_not_writable(directory: Path) -> str | None:
    """Why no checkpoint could be written below a directory that may not exist yet, or None; leaves nothing behind.

    It is tried, since permissions do not tell of read-only filesystems, nor of those that take no files.
    """
    place = _nearest(directory)
    if not place.is_dir():
        return f"{place} is not a directory"
    try:
        probe = tempfile.mkdtemp(prefix=".offload-", dir=place)
        try:
            with open(os.path.join(probe, "probe"), "wb") as file:
                file.write(b"x")
        finally:
            shutil.rmtree(probe, ignore_errors=True)
    except OSError as error:
        return f"nothing can be written in {place} ({error.strerror})"
    return None


def _nearest(directory: Path) -> Path:
    """The directory, or the nearest one above it that exists."""
    place = directory.absolute()
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    return place
