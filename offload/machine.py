"""What this machine has: memory as the kernel would grant it, and free disk space.

The limit on locked memory (RLIMIT_MEMLOCK) is not among the limits: host buffers are pinned by the CUDA driver, which
takes references to the pages and does not count them as locked memory of the process, and nothing here calls `mlock`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

UNLIMITED = 1 << 60


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Bytes of memory this process may still take, and what sets that limit."""

    available: int
    limited_by: str


def host_memory(root: Path = Path("/")) -> HostMemory:
    """The least of what the machine has available and what each memory cgroup (v1 or v2) of this process still grants.

    Page cache that the kernel would reclaim counts as available.
    """
    limits = [(int(psutil.virtual_memory().available), "the machine's available memory")]
    limits.extend(_cgroup_limits(root))
    available, name = min(limits)
    return HostMemory(available=max(0, available), limited_by=name)


def _cgroup_limits(root: Path) -> Iterator[tuple[int, str]]:
    for folder, names in _cgroup_folders(root):
        limit, usage, cache = (_read_number(folder / names[0]), _read_number(folder / names[1]), names[2])
        if limit is None or usage is None or limit >= UNLIMITED:
            continue
        yield (
            limit - usage + _statistic(folder / "memory.stat", cache),
            f"the memory cgroup {folder} (limit {limit:,} bytes)",
        )


def _cgroup_folders(root: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    v1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    v2 = ("memory.max", "memory.current", "inactive_file")
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        fields = line.split(":", 2)
        if len(fields) != 3:
            continue
        controllers, path = fields[1], fields[2]
        if controllers == "":
            bases, names = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"], v2
        elif "memory" in controllers.split(","):
            bases, names = [root / "sys/fs/cgroup/memory"], v1
        else:
            continue
        for base in bases:
            folder = base / path.lstrip("/")
            while True:
                if (folder / names[0]).exists():
                    yield folder, names
                if folder == base or base not in folder.parents:
                    break
                folder = folder.parent


def _read_number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
        return UNLIMITED if text == "max" else int(text)
    except (OSError, ValueError):
        return None


def _statistic(path: Path, key: str) -> int:
    try:
        for line in path.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == key:
                return int(value)
    except (OSError, ValueError):
        pass
    return 0


def free_disk(paths: Sequence[str | os.PathLike[str]]) -> int:
    """Free bytes over the distinct file systems of `paths`; folders that do not exist yet count with their nearest
    parent.
    """
    seen: dict[int, int] = {}
    for given in paths:
        path = Path(given)
        while not path.exists() and path != path.parent:
            path = path.parent
        try:
            seen[path.stat().st_dev] = shutil.disk_usage(path).free
        except OSError:
            continue
    return sum(seen.values())


def return_freed_memory() -> None:
    """Gives what the C library's heap keeps of freed memory back to the system, where the library can do that.

    glibc raises the size from which blocks are mapped apart to that of the largest one freed so far (up to 32 MiB), and
    from then on keeps such blocks: a model built normally would stay resident after its parameters were taken over.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


MAPPED_FROM = 24 << 20
"""Bytes from which blocks of the C library's heap are mapped apart."""
_KEPT_AT_END = 64 << 20
"""Bytes that may stay free at the end of the heap; as many as glibc comes to by itself."""
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of glibc's malloc.h


def map_large_blocks_apart() -> bool:
    """Has the C library map blocks from 24 MiB on apart from its heap, for the whole process; False if it cannot, or if
    the environment says how it is to be.

    glibc maps them apart until one is freed, and then takes blocks of up to 32 MiB from the heap, where logits and
    other large activations leave holes that nothing fits: 0.2 to 0.3 GB of a process that trains 438M parameters. What
    is larger it always maps apart, so only blocks between the two are new pages at every use.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    chosen = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_")
    if any(name in os.environ for name in chosen) or "glibc.malloc." in tunables:
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, MAPPED_FROM)) and bool(mallopt(_TRIM_THRESHOLD, _KEPT_AT_END))


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Processors' worth of time that the tightest CPU cgroup (v1 or v2) of this process grants; None without limit."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    quotas = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        names = ("cpu",) if controllers else ("", "unified")
        for base in (root / "sys/fs/cgroup" / name for name in names):
            folder = base / path.lstrip("/")
            while True:
                quota = _quota_of(folder, unified=not controllers)
                if quota is not None:
                    quotas.append(quota)
                if folder == base or base not in folder.parents:
                    break
                folder = folder.parent
    return min(quotas, default=None)


def _quota_of(folder: Path, *, unified: bool) -> float | None:
    try:
        if unified:
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
        return int(quota) / int(period) if quota != "max" and int(quota) > 0 and int(period) > 0 else None
    except (OSError, ValueError):
        return None
