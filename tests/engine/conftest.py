"""Fixtures of the engine's tests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The models are tiny, and torch's threads wait for each other in a busy loop that starves whatever else runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def swap_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder for swap files; neither a file in it nor a thread outlives the test."""
    folder = tmp_path / "swap"
    folder.mkdir()
    before = set(threading.enumerate())
    yield folder
    # Inductor keeps the workers of its own pool, which have the pool's default name; ours all have names of their own.
    after = [t for t in threading.enumerate() if t not in before and not t.name.startswith("ThreadPoolExecutor-")]
    left = [thread.name for thread in after if thread.is_alive()]
    assert not left, f"threads left: {left}"
    assert list(folder.iterdir()) == []
