"""How many threads the kernels use: what this process may really run on, shared with the other ranks of the machine."""

from __future__ import annotations

import math
import os
from pathlib import Path

_chosen: int | None = None


def _positive(name: str) -> int | None:
    text = os.environ.get(name)
    if text is None or text == "":
        return None
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise ValueError(f"environment variable {name}={text!r} must be a whole number of at least 1")
    return value


def _quota_of(text: str) -> float | None:
    """CPUs that the content of a cgroup v2 `cpu.max` file allows; None where unlimited or unreadable."""
    fields = text.split()
    try:
        return None if fields[0] == "max" else int(fields[0]) / int(fields[1])
    except (IndexError, ValueError, ZeroDivisionError):
        return None


def cgroup_cpus(root: Path = Path("/sys/fs/cgroup"), self_cgroup: Path = Path("/proc/self/cgroup")) -> float | None:
    """CPUs allowed by the tightest quota of this process's cgroup (v2) or CPU controller (v1), or None."""
    quotas: list[float] = []
    try:
        entries = self_cgroup.read_text().splitlines()
    except OSError:
        entries = []
    for entry in entries:
        _, controllers, path = entry.split(":", 2)
        base = root if controllers == "" else root / "cpu"
        if controllers not in ("",) and "cpu" not in controllers.split(","):
            continue
        node = base / path.lstrip("/")
        # In a container the path may name the host's tree: files that are not there are skipped, up to the mount point.
        while True:
            quotas.extend(_node_quota(node))
            if node == base or base not in node.parents:
                break
            node = node.parent
    return min(quotas, default=None)


def _node_quota(node: Path) -> list[float]:
    try:
        quota = _quota_of((node / "cpu.max").read_text())
        return [] if quota is None else [quota]
    except OSError:
        pass
    try:
        limit = int((node / "cpu.cfs_quota_us").read_text())
        period = int((node / "cpu.cfs_period_us").read_text())
        return [limit / period] if limit > 0 and period > 0 else []
    except (OSError, ValueError):
        return []


def default_threads() -> int:
    """Threads for this process: min(affinity mask, cgroup CPU quota) / ranks on this machine, at least 1.

    `OFFLOAD_THREADS` overrides it. `OMP_NUM_THREADS` is not consulted: launchers set it to 1 for every rank.
    """
    forced = _positive("OFFLOAD_THREADS")
    if forced is not None:
        return forced
    affinity = getattr(os, "sched_getaffinity", None)
    cpus = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    quota = cgroup_cpus()
    if quota is not None:
        cpus = min(cpus, max(1, math.ceil(quota)))
    return max(1, cpus // (_positive("LOCAL_WORLD_SIZE") or 1))


def get_threads() -> int:
    """Threads that kernels use now."""
    global _chosen
    if _chosen is None:
        _chosen = default_threads()
    return _chosen


def set_threads(count: int | None) -> None:
    """Use `count` threads from now on; None returns to `default_threads()`. Results do not depend on it."""
    global _chosen
    if count is not None and count < 1:
        raise ValueError(f"threads={count!r} must be at least 1")
    _chosen = count
