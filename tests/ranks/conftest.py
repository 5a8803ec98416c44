"""Fixtures of the tests on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.engine.conftest import one_thread  # as the ranks
from tests.ranks.harness import RankPool, pools

__all__ = ["one_thread", "pool_of"]


@pytest.fixture(scope="module")
def pool_of() -> Iterator[Callable[[int], RankPool]]:
    """`pool_of(world)`: a pool of so many ranks, the same for all tests of a module."""
    with pools() as of:
        yield of
