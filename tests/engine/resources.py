"""What a process holds: threads, descriptors, memory; and scripts run in processes of their own."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from torch import nn

from tests import programs

ROOT = Path(__file__).resolve().parents[2]
TIERS = ("parameters", "gradients", "optimizer")


def threads() -> set[str]:
    """Names of live threads with their identity."""
    return {f"{thread.name}-{thread.ident}" for thread in threading.enumerate()}


def descriptors() -> dict[str, str]:
    """Open descriptors of this process and what they refer to."""
    found = {}
    for entry in os.scandir("/proc/self/fd"):
        try:
            found[entry.name] = os.readlink(entry.path)
        except OSError:  # the directory's own
            continue
    return found


def rss() -> int:
    """Resident bytes."""
    return int(psutil.Process().memory_info().rss)


def pinned() -> tuple[int, int]:
    """(pinned, locked) bytes of this process, as the kernel counts them: memory registered with io_uring is pinned."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmPin"].split()[0]) << 10, int(status["VmLck"].split()[0]) << 10


@contextmanager
def nothing_left_of(folder: Path) -> Iterator[None]:
    """Fails if a thread, a descriptor or a file is left when the context ends."""
    gc.collect()
    before = threads(), len(descriptors())
    yield
    gc.collect()
    assert threads() <= before[0], threads() - before[0]
    assert len(descriptors()) <= before[1], descriptors()
    assert list(folder.iterdir()) == []


def on_nvme(folder: Path, engine: str = "threads", device: str = "cpu", **sections: Any) -> dict[str, Any]:
    """A configuration with everything on nvme and small buffers."""
    swap = {"engine": engine, "staging": "512KiB", "chunk": "16KiB", **sections.pop("swap", {})}
    return {
        "device": device,
        "memory": {"nvme_paths": [str(folder)], "host": "64MiB", "device": "16MiB"},
        "placement": dict.fromkeys(TIERS, "nvme"),
        "swap": swap,
        **sections,
    }


def tiny() -> nn.Module:
    """Three units."""
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2))


def run_script(script: str, *arguments: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Runs Python code in a process of its own; `timeout` is only a watchdog."""
    return programs.run("-c", script, *arguments, env=environment(), timeout=timeout)


def start_script(script: str, *arguments: str) -> programs.Program:
    """The same without waiting."""
    return programs.Program("-c", script, *arguments, env=environment())


def run_anew(script: str, *arguments: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
    """As `run_script`, in a process that imports everything itself: what it takes of memory is its own."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
