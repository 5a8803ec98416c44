"""Loading of the native part, once per process, and what the kernel's io_uring can do here.

A missing or broken extension is no error: checksums fall back to a slow twin and I/O to threads, with a reason.
"""

from __future__ import annotations

import errno
import functools
import importlib
import importlib.util
import os
import platform
import resource
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from swap.geometry import format_bytes

INTERFACE = 3

_CAP_IPC_LOCK = 14


@functools.cache
def load() -> tuple[ModuleType | None, str]:
    """(the extension, "") or (None, why it cannot be used)."""
    try:
        module = importlib.import_module("swap._native")
    except ImportError as error:
        return None, f"the native extension is not there ({error}): reinstall with a C++ compiler"
    found = getattr(module, "interface", None)
    if found != INTERFACE:
        return None, f"swap._native has interface {found}, these sources need {INTERFACE}: reinstall"
    return module, ""


def built() -> bool:
    """Whether there is an extension, of use or not."""
    return importlib.util.find_spec("swap._native") is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class UringProbe:
    """What a trial of io_uring found.

    ``usable``: a ring was made and answered. ``reason`` and ``remedy``: why it is not, or why ``files`` or ``buffers``
    cannot be registered with it (then transfers cost a little more processor time); "" where all is well.
    """

    usable: bool
    files: bool
    buffers: bool
    reason: str = ""
    remedy: str = ""

    @property
    def text(self) -> str:
        """Reason and remedy in one line."""
        return f"{self.reason}; {self.remedy}" if self.remedy else self.reason


def probe_io_uring() -> UringProbe:
    """Try io_uring now: make a ring, send an operation through it, register files and memory."""
    module, why = load()
    if module is None:
        return _refused(why)
    if not module.has_io_uring:
        return _refused("the native part was built without io_uring", "build it where linux/io_uring.h is installed")
    found = module.probe()
    if found["error"]:
        return _refused(*_explain(found["error"], found["stage"]))
    files, buffers = not found["files_error"], not found["buffers_error"]
    reason = remedy = ""
    if not buffers:
        reason, remedy = explain_buffers(found["buffers_error"], 1 << 20)
    elif not files:
        reason = f"files cannot be registered ({_name(found['files_error'])})"
    return UringProbe(usable=True, files=files, buffers=buffers, reason=reason, remedy=remedy)


def explain_buffers(number: int, nbytes: int) -> tuple[str, str]:
    """(reason, remedy) when ``nbytes`` of memory could not be registered with a ring."""
    if number in (errno.ENOMEM, errno.EPERM, errno.EAGAIN):
        limit = memlock_limit()
        bound = "is unlimited" if limit is None else f"is {format_bytes(limit)}"
        return (
            f"{format_bytes(nbytes)} of buffers cannot be pinned ({_name(number)}, the locked-memory limit {bound})",
            "raise it: ulimit -l, or LimitMEMLOCK of the service, or --ulimit memlock=-1 of the container",
        )
    if number in (errno.EINVAL, errno.EOPNOTSUPP, errno.EFAULT):
        return f"the kernel {platform.release()} cannot register these buffers ({_name(number)})", ""
    return f"buffers cannot be registered ({_name(number)})", ""


def memlock_limit() -> int | None:
    """Bytes this process may pin; None without limit (also for a process with CAP_IPC_LOCK)."""
    if _has_capability(_CAP_IPC_LOCK):
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _refused(reason: str, remedy: str = "") -> UringProbe:
    return UringProbe(usable=False, files=False, buffers=False, reason=reason, remedy=remedy)


def _explain(number: int, stage: str) -> tuple[str, str]:
    """(reason, remedy) when a ring could not be made or did not answer."""
    release = platform.release()
    if stage == "features":
        return f"kernel {release} is too old for io_uring as used here", "kernel 5.11 or later has what it takes"
    switch = _read("/proc/sys/kernel/io_uring_disabled")
    if number == errno.EPERM and switch in ("1", "2"):
        return f"io_uring is switched off (kernel.io_uring_disabled = {switch})", "sysctl -w kernel.io_uring_disabled=0"
    if number in (errno.EPERM, errno.EACCES, errno.ENOSYS) and _filtered():
        return (
            f"a seccomp filter refuses io_uring ({_name(number)})",
            "allow io_uring_setup, io_uring_enter and io_uring_register in the container's seccomp profile",
        )
    if number == errno.ENOSYS:
        return f"kernel {release} has no io_uring", "kernel 5.11 or later has it"
    if number == errno.ENOMEM:
        limit = memlock_limit()
        return (
            f"the ring's memory was refused ({_name(number)}, the locked-memory limit is "
            f"{'unlimited' if limit is None else format_bytes(limit)})",
            "raise ulimit -l or use a kernel from 5.12 on, which does not count it",
        )
    if number in (errno.EMFILE, errno.ENFILE):
        return f"no descriptor left for a ring ({_name(number)})", "raise the open file limit (ulimit -n)"
    return f"io_uring does not work here ({_name(number)} at {stage})", ""


def _name(number: int) -> str:
    return errno.errorcode.get(number, str(number))


def _filtered() -> bool:
    return any(line.split() == ["Seccomp:", "2"] for line in _read("/proc/self/status").splitlines())


def _has_capability(number: int) -> bool:
    for line in _read("/proc/self/status").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> number & 1)
    return os.geteuid() == 0


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
