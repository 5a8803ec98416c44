"""Directories of checkpoints: locking, committing, keeping and removing them.

`<directory>/step-00000010/` is complete once it holds `manifest.json`, which is written last: to a temporary name,
fsynced, renamed, and the directory fsynced. Nothing else decides. Removal begins with the manifest.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from offload.checkpoint.errors import CheckpointError, CheckpointSaveError
from offload.checkpoint.format import index_file
from offload.checkpoint.manifest import Manifest, SavedFile, read_index, read_manifest
from offload.checkpoint.places import MANIFEST, complete_checkpoints, free_bytes, is_complete, step_directories
from swap.geometry import format_bytes

log = logging.getLogger("offload")

_OURS = (".safetensors", ".json", ".tmp")


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Keeps other processes from writing checkpoints under `directory` meanwhile.

    Raises:
        CheckpointSaveError: one is writing there now.
    """
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise CheckpointSaveError(
                    f"{directory}: another process writes a checkpoint there; give each run a checkpoint.directory of "
                    "its own"
                ) from None
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):  # filesystems without locks
                raise
        yield
    finally:
        os.close(fd)


def fsync_directory(path: Path) -> None:
    """Makes names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_durably(path: Path, data: bytes) -> None:
    """A file with `data`, whole or not at all, on the disk when this returns."""
    temporary = path.with_name(path.name + ".tmp")
    fd = os.open(temporary, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        try:
            done = 0
            while done < len(data):
                done += os.write(fd, data[done:])
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    fsync_directory(path.parent)


def saved_files(directory: Path, names: Sequence[str]) -> tuple[SavedFile, ...]:
    """The manifest's entries for the tensor files `names`, one of each rank in order.

    Raises:
        CheckpointError: a rank's file or index is missing or belongs to another rank.
    """
    return tuple(saved_file(directory, name, rank, len(names)) for rank, name in enumerate(names))


def saved_file(directory: Path, name: str, rank: int, world: int) -> SavedFile:
    """The manifest's entry for the tensor file of one rank.

    Raises:
        CheckpointError: its index belongs to another rank.
    """
    index = index_file(name)
    found = read_index(directory, index)
    if (found.rank, found.world) != (rank, world):
        raise CheckpointError(f"{directory / index}: of rank {found.rank} of {found.world}, not {rank} of {world}")
    data = (directory / index).read_bytes()
    size = os.stat(directory / name).st_size
    return SavedFile(name=name, nbytes=size, index=index, index_sha256=hashlib.sha256(data).hexdigest())


def commit(directory: Path, manifest: Manifest) -> None:
    """Makes a checkpoint complete, then removes what an earlier one of the same step left in its directory."""
    fsync_directory(directory)
    write_durably(directory / MANIFEST, manifest.to_json())
    fsync_directory(directory.parent)
    named = {MANIFEST, *(f.name for f in manifest.files), *(f.index for f in manifest.files)}
    _remove_ours(directory, keep=named)


def clean_up(path: Path) -> None:
    """Removes what a save that failed has left: all but what the manifest of a complete checkpoint names."""
    with contextlib.suppress(OSError, CheckpointError):
        if not is_complete(path):
            if path.is_dir():
                remove_checkpoint(path)
            return
        files = read_manifest(path).files
        _remove_ours(path, keep={MANIFEST, *(f.name for f in files), *(f.index for f in files)})


def _remove_ours(directory: Path, keep: set[str]) -> None:
    with os.scandir(directory) as entries:
        for entry in list(entries):
            if entry.name not in keep and entry.name.endswith(_OURS) and not entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)


def remove_checkpoint(path: Path) -> None:
    """Removes a checkpoint, its manifest first: a crash in the middle leaves none that looks complete."""
    with contextlib.suppress(FileNotFoundError):
        (path / MANIFEST).unlink()
        fsync_directory(path)
    _remove_ours(path, keep=set())
    with contextlib.suppress(OSError):  # something that is not ours lies in it
        path.rmdir()


def remove_leftovers(directory: Path) -> list[Path]:
    """Removes the directories of saves that were cut short; call it under `locked`. Returns them; what cannot be
    removed is logged.
    """
    return [path for _, path in step_directories(directory) if not is_complete(path) and _removed(path)]


def _removed(path: Path) -> bool:
    try:
        remove_checkpoint(path)
    except OSError as error:
        log.warning("%s: an old checkpoint could not be removed: %s", path, error.strerror)
        return False
    return True


def retain(directory: Path, keep: int | None, keep_every: int | None) -> list[Path]:
    """Removes all complete checkpoints but the newest `keep` and those whose step is a multiple of `keep_every`.

    `keep` None keeps all. Returns what was removed; what cannot be is logged.
    """
    if keep is None:
        return []
    gone = []
    for step, path in complete_checkpoints(directory)[:-keep]:
        if keep_every and step and step % keep_every == 0:
            continue
        if _removed(path):
            gone.append(path)
    return gone


def check_space(directory: Path, needed: int, what: str) -> None:
    """CheckpointError, with both figures, unless `needed` bytes are free where `directory` is or will be."""
    free = free_bytes(directory)
    if free < needed:
        raise CheckpointError(
            f"{directory}: {format_bytes(free)} free, but {what} needs {format_bytes(needed)}: free some space, or "
            "choose another directory"
        )
