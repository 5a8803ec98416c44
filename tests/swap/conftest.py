"""Shared by the tests of the swap layer: whatever a test opens must be gone when it ends."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import programs


def _descriptors() -> set[str]:
    """What this process has open, without the descriptor of the listing itself."""
    found = set()
    for name in set(os.listdir("/proc/self/fd")) - set(map(str, programs.descriptors())):
        try:
            found.add(f"{name} -> {os.readlink(f'/proc/self/fd/{name}')}")
        except OSError:
            continue
    return {entry for entry in found if "/proc/" not in entry}


@pytest.fixture
def no_leaks(tmp_path: Path) -> Iterator[None]:
    """Threads, descriptors and directories after the test are those from before it."""
    threads = set(threading.enumerate())
    descriptors = _descriptors()
    yield
    deadline = time.monotonic() + 5
    while (set(threading.enumerate()) - threads or _descriptors() - descriptors) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert set(threading.enumerate()) - threads == set()
    assert _descriptors() - descriptors == set()
    assert list(tmp_path.rglob("offload-*")) == []


@pytest.fixture
def shm_path() -> Iterator[Path]:
    """A directory on tmpfs; the test is skipped where there is none."""
    import shutil
    import tempfile

    if not os.path.isdir("/dev/shm") or not os.access("/dev/shm", os.W_OK):
        pytest.skip("no tmpfs at /dev/shm")
    path = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield path
    left = os.listdir(path)
    shutil.rmtree(path)
    assert left == []
