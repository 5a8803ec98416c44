"""Shared by all tests: few threads, no launcher variables, and every run directory under the test's own folder."""

from __future__ import annotations

import gc
import os
import signal

import pytest
from hypothesis import settings

# Read when torch is loaded: waiting threads that spin make small operations crawl where tests share cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

# A shell that starts the tests in the background has them ignore Ctrl-C, and their children with them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# An ordinary run draws the same examples every time; `make acceptance` searches for new ones.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("searching", max_examples=1000, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def few_to_collect() -> None:
    """What there is before a test stays: without it, each of the many collections of the tests that look for leaks
    would go through a million objects of libraries and of pytest. Objects of the test itself are looked at as before.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables of a launcher that runs the tests must not look like ranks of ours."""
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True, scope="session")
def two_threads() -> None:
    """Small tensors gain nothing from more threads, and several test processes may share a machine."""
    torch.set_num_threads(min(2, os.cpu_count() or 1))
