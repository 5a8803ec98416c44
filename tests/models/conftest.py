"""Fixtures of the tests of whole models: those of the engine's tests."""

from __future__ import annotations

import contextlib

from tests.engine.conftest import one_thread, swap_folder

with contextlib.suppress(ImportError):
    import tqdm

    tqdm.tqdm.monitor_interval = 0  # its thread would count as one that was left behind

__all__ = ["one_thread", "swap_folder"]
