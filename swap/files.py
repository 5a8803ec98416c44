"""Swap files: anonymous, locked against other runs, direct where the filesystem can.

[Note: anonymous files] A store makes a private directory (mode 0700) under the path, takes a lock on a file in it,
opens the swap file with O_TMPFILE (or creates and unlinks it), and removes lock file and directory again at once: an
open file needs no name. A killed process thus leaves nothing behind. Only a kill within those few system calls, or a
filesystem that keeps names of open files (NFS), leaves a directory, whose lock nobody holds: ``remove_leftovers``
takes the lock before it removes anything, so it never touches a live store.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import re
import secrets
import socket
import stat
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from swap.engines.protocol import System
from swap.errors import SwapIOError, SwapPathError
from swap.geometry import PAGE

_LOCK_NAME = "lock"
_SWAP_NAME = "swap"
_DIRECTORY = re.compile(r"offload-(?P<host>.+)-(?P<pid>\d+)-(?P<random>[0-9a-f]{16})")
_O_DIRECT = getattr(os, "O_DIRECT", 0)
_O_TMPFILE = getattr(os, "O_TMPFILE", 0)
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)
_NO_FALLOCATE = (errno.EOPNOTSUPP, errno.ENOSYS)

_WRITEBACK_WINDOW = 32 * 1024 * 1024
"""Buffered bytes written between two waits for writeback: what a cgroup may be charged in dirty page cache."""

_open_files: weakref.WeakSet[SwapFile] = weakref.WeakSet()


def host_name() -> str:
    """This machine's name, as it appears in directory names."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", socket.gethostname())[:64] or "localhost"


class SwapFile:
    """One open swap file. ``path`` is for messages; the file has no name unless the filesystem insists."""

    def __init__(self, *, fd: int, path: str, direct: bool, directory: _Directory) -> None:
        self.fd = fd
        self.path = path
        self.direct = direct
        self.size = 0
        self.device = os.fstat(fd).st_dev
        self._directory = directory
        self._pid = os.getpid()
        self._unsettled = 0
        self._lock = threading.Lock()
        self._closed = False
        _open_files.add(self)

    @property
    def free_bytes(self) -> int:
        """Bytes that an unprivileged writer can still get from the filesystem."""
        status = os.fstatvfs(self.fd)
        return status.f_bavail * status.f_frsize

    def grow(self, system: System, nbytes: int) -> None:
        """Give the file ``nbytes`` more, backed by real blocks where the filesystem can; SwapIOError if it is full."""
        try:
            try:
                system.fallocate(self.fd, self.size, nbytes)
            except OSError as error:
                if error.errno not in _NO_FALLOCATE:
                    raise
                if self.free_bytes < nbytes:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
                os.ftruncate(self.fd, self.size + nbytes)
        except OSError as error:
            raise SwapIOError(
                operation="allocate", path=self.path, offset=self.size, nbytes=nbytes, errno=error.errno
            ) from error
        self.size += nbytes

    def settle(self, offset: int, nbytes: int, *, write: bool) -> None:
        """Keep the page cache small: write back and drop what buffered transfers left in it.

        A memory cgroup is charged for the cache, and swap data is not read twice from it. OSError if writeback
        failed. Direct files have nothing to settle.
        """
        if self.direct:
            return
        if not write:
            _drop_cache(self.fd, offset, nbytes)
            return
        with self._lock:
            self._unsettled += nbytes
            if self._unsettled < _WRITEBACK_WINDOW:
                return
            self._unsettled = 0
        _write_back(self.fd)
        _drop_cache(self.fd, 0, 0)

    def close(self) -> None:
        """Close the file and remove what is left of its directory. Idempotent; does nothing in a forked child."""
        with self._lock:
            if self._closed or os.getpid() != self._pid:
                return
            self._closed = True
        _open_files.discard(self)
        os.close(self.fd)
        self._directory.close()

    def abandon_in_child(self) -> None:
        """After fork: drop the inherited descriptors, so that the file's space does not outlive the parent."""
        for fd in (self.fd, self._directory.lock_fd):
            if fd >= 0:
                with suppress(OSError):
                    os.close(fd)


def _after_fork_in_child() -> None:
    for file in list(_open_files):
        file.abandon_in_child()
    _open_files.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


class _Directory:
    """A private, locked directory; it is usually gone again when the swap file has been opened."""

    def __init__(self, parent: Path) -> None:
        while True:
            self.path = parent / f"offload-{host_name()}-{os.getpid()}-{secrets.token_hex(8)}"
            os.mkdir(self.path, 0o700)
            try:
                self.lock_fd = os.open(self.path / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            except FileNotFoundError:
                continue  # someone's remove_leftovers met the directory before it had a lock
            except BaseException:
                os.rmdir(self.path)
                raise
            try:
                # Waits at most for a leftover check that came upon the directory before this line.
                fcntl.flock(self.lock_fd, fcntl.LOCK_EX)
            except OSError:
                return  # no locks here (some network filesystems): the directory is private all the same
            if os.fstat(self.lock_fd).st_nlink:
                return
            os.close(self.lock_fd)  # that check removed it: start over

    def vanish(self) -> None:
        """Remove the directory while its swap file is open, if the filesystem lets us; else ``close`` does it."""
        try:
            os.unlink(self.path / _LOCK_NAME)
            os.rmdir(self.path)
        except OSError:
            return
        self._unlock()

    def close(self) -> None:
        if self.lock_fd < 0:
            return
        for name in (_SWAP_NAME, _LOCK_NAME):
            with suppress(OSError):
                os.unlink(self.path / name)
        # Unlocked first: NFS keeps the name of an open file, and a directory with names cannot go.
        self._unlock()
        with suppress(OSError):
            os.rmdir(self.path)

    def _unlock(self) -> None:
        os.close(self.lock_fd)
        self.lock_fd = -1


def check_path(path: Path) -> None:
    """SwapPathError unless ``path`` is an existing directory."""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        raise SwapPathError(
            f"swap path {str(path)!r} cannot be used ({error.strerror}); create it or change memory.nvme_paths",
            path=str(path),
        ) from error
    if not stat.S_ISDIR(mode):
        raise SwapPathError(
            f"swap path {str(path)!r} is not a directory; change memory.nvme_paths", path=str(path)
        )


def open_swap_file(path: Path, direct: str | bool) -> SwapFile:
    """Open an anonymous swap file under the directory ``path``.

    ``direct``: "auto" uses O_DIRECT if a real aligned write and read through it succeed; True insists; False does
    without. SwapPathError if the path cannot be written or cannot do what is asked.
    """
    check_path(path)
    with _path_errors(path):
        directory = _Directory(path)
    try:
        with _path_errors(path):
            fd, is_direct = _open_probed(directory.path, direct)
        try:
            if direct is True and not is_direct:
                raise SwapPathError(
                    f"swap path {str(path)!r} does not support direct I/O (O_DIRECT); set swap.direct = \"auto\" or "
                    "change memory.nvme_paths",
                    path=str(path),
                )
            directory.vanish()
            return SwapFile(fd=fd, path=str(directory.path / _SWAP_NAME), direct=is_direct, directory=directory)
        except BaseException:
            os.close(fd)
            raise
    except BaseException:
        directory.close()
        raise


@contextmanager
def _path_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SwapPathError(
            f"swap path {str(path)!r} is not writable ({error.strerror}); fix its permissions or change "
            "memory.nvme_paths",
            path=str(path),
        ) from error


def _open_probed(directory: Path, direct: str | bool) -> tuple[int, bool]:
    """(descriptor, whether direct) of a new anonymous file."""
    if direct is not False and _O_DIRECT:
        try:
            fd = _open_anonymous(directory, _O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        else:
            if _can_transfer(fd):
                return fd, True
            os.close(fd)
    fd = _open_anonymous(directory, 0)
    if hasattr(os, "posix_fadvise"):
        # Readahead past an extent would fill the cache with pages that nobody drops.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    return fd, False


def _open_anonymous(directory: Path, flags: int) -> int:
    flags |= os.O_RDWR | os.O_CLOEXEC
    if _O_TMPFILE:
        try:
            return os.open(directory, flags | _O_TMPFILE | os.O_EXCL, 0o600)
        except OSError as error:
            if error.errno not in _NO_TMPFILE:
                raise
    try:
        return os.open(directory / _SWAP_NAME, flags | os.O_CREAT | os.O_EXCL, 0o600)
    finally:
        # Also after a failure: a refused O_DIRECT may leave the new file behind.
        with suppress(FileNotFoundError):
            os.unlink(directory / _SWAP_NAME)


def _can_transfer(fd: int) -> bool:
    """Whether aligned direct transfers really work on ``fd``; some filesystems accept the flag and fail later."""
    with mmap.mmap(-1, 2 * PAGE) as memory:
        pattern = secrets.token_bytes(PAGE)
        memory[:PAGE] = pattern
        with memoryview(memory) as view, view[:PAGE] as source, view[PAGE:] as target:
            try:
                moved = (os.pwritev(fd, [source], 0), os.preadv(fd, [target], 0))
                os.ftruncate(fd, 0)
            except OSError as error:
                if error.errno == errno.ENOSPC:
                    raise
                return False
            return moved == (PAGE, PAGE) and bytes(target) == pattern


def _load_sync_file_range() -> Callable[[int, int, int, int], int] | None:
    try:
        function = ctypes.CDLL(None, use_errno=True).sync_file_range
    except (AttributeError, OSError):
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    function.restype = ctypes.c_int
    return function


_sync_file_range = _load_sync_file_range()
_WAIT_WRITE_WAIT = 7  # SYNC_FILE_RANGE_WAIT_BEFORE | WRITE | WAIT_AFTER


def _write_back(fd: int) -> None:
    """Write all dirty pages of ``fd`` and wait. The metadata of an anonymous file may stay dirty: it dies with us."""
    if _sync_file_range is not None:
        if _sync_file_range(fd, 0, 0, _WAIT_WRITE_WAIT) == 0:
            return
        number = ctypes.get_errno()
        if number not in (errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.EINTR):
            raise OSError(number, os.strerror(number))
    (os.fdatasync if hasattr(os, "fdatasync") else os.fsync)(fd)


def _drop_cache(fd: int, offset: int, nbytes: int) -> None:
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)


def find_leftovers(path: str | os.PathLike[str], *, any_host: bool = False) -> list[Path]:
    """Directories under ``path`` that a dead store of this user left behind; live ones are never listed.

    Directories made on other machines are listed only with ``any_host``: not every network filesystem shows us their
    locks. Empty for a path that does not exist.
    """
    return [directory for directory in _candidates(Path(path), any_host) if _with_lock(directory, remove=False)]


def remove_leftovers(path: str | os.PathLike[str], *, any_host: bool = False) -> list[Path]:
    """Remove what ``find_leftovers`` lists and return it; each directory's lock is taken first, only our files go."""
    return [directory for directory in _candidates(Path(path), any_host) if _with_lock(directory, remove=True)]


def _candidates(path: Path, any_host: bool) -> list[Path]:
    found = []
    try:
        entries = sorted(os.scandir(path), key=lambda entry: entry.name)
    except OSError:
        return []
    for entry in entries:
        match = _DIRECTORY.fullmatch(entry.name)
        if match is None or not entry.is_dir(follow_symlinks=False):
            continue
        if entry.stat(follow_symlinks=False).st_uid != os.geteuid():
            continue
        if any_host or match["host"] == host_name():
            found.append(path / entry.name)
    return found


def _with_lock(directory: Path, *, remove: bool) -> bool:
    """Whether ``directory`` is dead, which we know by holding its lock; remove it meanwhile if asked to."""
    try:
        names = set(os.listdir(directory))
        if names - {_LOCK_NAME, _SWAP_NAME}:
            return False  # not ours alone: somebody put files there
        if _LOCK_NAME not in names:
            # Born this moment or killed at birth. Removing an empty directory is safe: its maker starts over.
            if remove and not names:
                os.rmdir(directory)
            return not names
        fd = os.open(directory / _LOCK_NAME, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if remove:
            for name in sorted(names, reverse=True):  # the lock goes last
                os.unlink(directory / name)
            os.rmdir(directory)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
