"""safetensors files: headers that are checked before anything is believed, and writing in pages, in any order.

A file is 8 bytes (length of the header, little endian), the header (JSON: name -> dtype, shape, data_offsets) and the
data, in which tensors follow each other without gaps. Headers written here are padded with blanks to a whole number of
pages, so that data that begin on a page of the data section begin on a page of the file.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import struct
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from offload.checkpoint.errors import DamagedCheckpointError
from offload.checkpoint.format import DTYPE_NAMES, DTYPES, HEADER_LIMIT, integer, parse_json, shape_of
from swap.geometry import PAGE, align_up

_EMPTY = 1 << 20
_STREAM = 8 << 20


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file: bytes `[start, start + nbytes)` of the file itself."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    nbytes: int


def read_header(fd: int, path: Path | str) -> tuple[dict[str, Entry], dict[str, str]]:
    """(tensors, metadata) of a safetensors file, each value checked against the size of the file.

    Raises:
        DamagedCheckpointError: anything that the format forbids: gaps, overlaps, sizes that do not fit.
    """
    size = os.fstat(fd).st_size
    if size < 8:
        raise DamagedCheckpointError(f"{path}: {size} bytes, too short for a safetensors file")
    (length,) = struct.unpack("<Q", os.pread(fd, 8, 0))
    if length > min(HEADER_LIMIT, size - 8):
        raise DamagedCheckpointError(
            f"{path}: a header of {length:,} bytes in a file of {size:,} (a header has at most {HEADER_LIMIT:,})"
        )
    header = parse_json(_pread(fd, length, 8, path), path)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise DamagedCheckpointError(f"{path}: __metadata__ is not a map of strings")
    begin, entries = 8 + length, {}
    for name, value in header.items():
        entries[name] = _entry(f"{path}: tensor {name!r:.80}", value, begin)
    end = begin
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if entry.start != end:
            raise DamagedCheckpointError(f"{path}: tensor {name!r:.80} overlaps another one or leaves a gap before it")
        end += entry.nbytes
    if end != size:
        raise DamagedCheckpointError(
            f"{path}: its tensors end at byte {end:,}, the file at {size:,}: it was cut off or does not belong here"
        )
    return entries, metadata


def _entry(where: str, value: Any, begin: int) -> Entry:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise DamagedCheckpointError(f"{where}: not a description of a tensor")
    name, offsets = value["dtype"], value["data_offsets"]
    if not isinstance(name, str) or name not in DTYPES:
        raise DamagedCheckpointError(f"{where}: unknown dtype {name!r:.40}")
    shape, numel = shape_of(value["shape"], where)
    span = [integer(offset, where) for offset in offsets] if isinstance(offsets, list) else []
    if len(span) != 2 or span[1] - span[0] != numel * DTYPES[name].itemsize:
        raise DamagedCheckpointError(f"{where}: {numel:,} elements of {name} do not take bytes {offsets!r:.60}")
    return Entry(dtype=DTYPES[name], shape=shape, start=begin + span[0], nbytes=span[1] - span[0])


def _pread(fd: int, count: int, offset: int, path: Path | str) -> bytes:
    parts = []
    while count:
        part = os.pread(fd, min(count, 1 << 24), offset)
        if not part:
            raise DamagedCheckpointError(f"{path}: became shorter while it was read")
        parts.append(part)
        offset, count = offset + len(part), count - len(part)
    return b"".join(parts)


def read_into(fd: int, target: memoryview, offset: int, path: Path | str) -> None:
    """Fills `target` (flat, bytes) from `offset` on; DamagedCheckpointError if the file ends before."""
    done = 0
    while done < len(target):
        count = os.preadv(fd, [target[done:]], offset + done)
        if count == 0:
            raise DamagedCheckpointError(
                f"{path}: ends at byte {offset + done:,}, before the {len(target):,} bytes at {offset:,}"
            )
        done += count


def build_header(
    tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]], metadata: dict[str, str], *, align: int = PAGE
) -> tuple[bytes, int]:
    """(length and header, padded so that data begin at a multiple of `align`; bytes of the data).

    Tensors lie in the order given.
    """
    import json

    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    position = 0
    for name, dtype, shape in tensors:
        nbytes = dtype.itemsize
        for size in shape:
            nbytes *= size
        header[name] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [position, position + nbytes],
        }
        position += nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    length = align_up(8 + len(text), align) - 8
    if length > HEADER_LIMIT:
        raise ValueError(f"a safetensors header of {length:,} bytes: more than {HEADER_LIMIT:,}; write more files")
    return struct.pack("<Q", length) + text.ljust(length), position


class PagedFile:
    """A new file of known size, written in whole pages at any offset from any thread, past the page cache if possible.

    The caller's buffers are page-aligned. Nothing survives a failure: `discard` removes the file.
    """

    def __init__(self, path: Path, nbytes: int, header: bytes) -> None:
        self.path, self.nbytes, self._data = path, nbytes, len(header)
        self._lock = threading.Lock()
        self._fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        self._direct_fd: int | None = None
        try:
            allocate(self._fd, nbytes)
            write_all(self._fd, memoryview(header), 0)
            if nbytes > _EMPTY:
                self._direct_fd = _open_direct(path)
        except BaseException:
            self.discard()
            raise

    def write(self, data: memoryview, offset: int) -> None:
        """Writes whole pages at `offset` of the data section."""
        fd, at = self._direct_fd, self._data + offset
        if fd is not None:
            try:
                write_all(fd, data, at)
                return
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                with self._lock:  # a filesystem that takes the flag but not the transfer
                    self._direct_fd = None
        write_all(self._fd, data, at)
        # Starts the write-back of these bytes now and keeps the page cache for others.
        os.posix_fadvise(self._fd, at, len(data), os.POSIX_FADV_DONTNEED)

    def write_tail(self, data: bytes, offset: int) -> None:
        """Writes any bytes at any offset of the data section: for what is small."""
        write_all(self._fd, memoryview(data), self._data + offset)

    def finish(self) -> None:
        """Cuts the file to its exact size and waits until it is on the disk."""
        os.ftruncate(self._fd, self.nbytes)
        os.fsync(self._fd)
        self.close()

    def close(self) -> None:
        for fd in (self._fd, self._direct_fd):
            if fd is not None and fd >= 0:
                os.close(fd)
        self._fd, self._direct_fd = -1, None

    def discard(self) -> None:
        """Closes and removes the file."""
        self.close()
        self.path.unlink(missing_ok=True)


class StreamWriter:
    """A new file written from front to back, past the page cache where the filesystem allows it."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path, self._nbytes = path, nbytes
        self._fd = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        self._direct: int | None = None
        self._buffer = mmap.mmap(-1, _STREAM)
        self._used = self._at = 0
        try:
            allocate(self._fd, nbytes)
            if nbytes > _STREAM:
                self._direct = _open_direct(path)
        except BaseException:
            self.close()
            raise

    def write(self, data: memoryview | bytes) -> None:
        """Appends `data`."""
        view, done = memoryview(data), 0
        while done < len(view):
            count = min(len(view) - done, _STREAM - self._used)
            self._buffer[self._used : self._used + count] = view[done : done + count]
            self._used, done = self._used + count, done + count
            if self._used == _STREAM:
                self._flush()

    def _flush(self) -> None:
        part = memoryview(self._buffer)[: self._used]
        fd = self._direct if self._direct is not None and self._used == _STREAM else self._fd
        try:
            write_all(fd, part, self._at)
        except OSError as error:
            if error.errno != errno.EINVAL or fd == self._fd:
                raise
            write_all(self._fd, part, self._at)  # a filesystem that takes the flag but not the transfer
        self._at += self._used
        self._used = 0

    def finish(self) -> int:
        """Writes the rest and waits until all is on the disk; the descriptor, for reading it back."""
        self._flush()
        if self._at != self._nbytes:
            raise OSError(errno.EIO, f"{self._at:,} of {self._nbytes:,} bytes were written")
        os.fsync(self._fd)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)  # what is read back comes from the disk
        return self._fd

    def close(self) -> None:
        """Closes the file. Idempotent."""
        for fd in (self._fd, self._direct):
            if fd is not None and fd >= 0:
                os.close(fd)
        self._fd, self._direct = -1, None


def allocate(fd: int, nbytes: int) -> None:
    """Takes the disk space now, so that a full disk shows before hours of work; without the call's support, never."""
    if nbytes:
        try:
            os.posix_fallocate(fd, 0, nbytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                raise


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """All of `data` at `offset`, whatever the system takes at once."""
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)


def _open_direct(path: Path) -> int | None:
    flag = getattr(os, "O_DIRECT", 0)
    if not flag:
        return None
    try:
        fd = os.open(path, os.O_RDWR | flag | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        probe = mmap.mmap(-1, PAGE)
        os.preadv(fd, [probe], 0)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
    except OSError:
        os.close(fd)
        return None
    return fd
