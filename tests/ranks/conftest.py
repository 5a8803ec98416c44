"""Fixtures of the tests on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engine.conftest import one_thread  # as the ranks
from tests.ranks.harness import RankPool, pools

__all__ = ["one_thread", "pool_of"]


@pytest.fixture(scope="module")
def pool_of() -> Iterator[Callable[[int], RankPool]]:
    """`pool_of(world)`: a pool of so many ranks, the same for all tests of a module."""
    with pools() as of:
        yield of


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Several processes for one test, on a machine that may do much else: that takes as long as it takes."""
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(300 if item.get_closest_marker("acceptance") is None else 3600))
