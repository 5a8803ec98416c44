"""The place of a process: the grid of replicas and shards, whose process group it is, and who failed first."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from offload.errors import ParallelError
from offload.parallel.ranks import Ranks, grid
from tests.ranks.harness import RankPool, run_torchrun

PoolOf = Callable[[int], RankPool]


@pytest.mark.parametrize(
    ("world", "shard", "replicate", "expected"),
    [(4, None, None, (4, 1)), (4, 2, None, (2, 2)), (4, None, 4, (1, 4)), (6, 3, 2, (3, 2)), (1, None, None, (1, 1))],
)
def test_sizes(world: int, shard: int | None, replicate: int | None, expected: tuple[int, int]) -> None:
    assert grid(world, shard, replicate) == expected


@pytest.mark.parametrize(("shard", "replicate"), [(3, None), (None, 3), (2, 1), (8, None), (0, None), (None, 0)])
def test_sizes_that_do_not_make_up_the_world(shard: int | None, replicate: int | None) -> None:
    with pytest.raises(ValueError, match=r"parallel\.shard_size = \d+ .*parallel\.replicate_size = \d+.*4"):
        grid(4, shard, replicate)


def test_a_single_process_has_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for world in (None, "1", ""):
        if world is None:
            monkeypatch.delenv("WORLD_SIZE", raising=False)
        else:
            monkeypatch.setenv("WORLD_SIZE", world)
        assert Ranks.open(shard_size=None, replicate_size=None, timeout=5.0, device_kind="cpu") is None


def place() -> tuple[int, ...]:
    ranks = Ranks.open(shard_size=2, replicate_size=2, timeout=10.0, device_kind="cpu")
    assert ranks is not None
    assert ranks.rank == ranks.replicate_rank * ranks.shard_size + ranks.shard_rank
    found = (ranks.replicate_rank, ranks.shard_rank, *ranks.members("shard"), *ranks.members("replicate"))
    ranks.close()
    ranks.close()
    return found


def test_shard_groups_are_neighbours(pool_of: PoolOf) -> None:
    expected = [(0, 0, 0, 1, 0, 2), (0, 1, 0, 1, 1, 3), (1, 0, 2, 3, 0, 2), (1, 1, 2, 3, 1, 3)]
    assert pool_of(4).run(place) == expected


def refused() -> str:
    with pytest.raises(ValueError) as caught:
        Ranks.open(shard_size=3, replicate_size=None, timeout=10.0, device_kind="cpu")
    return str(caught.value)


def test_a_refused_grid_says_both_numbers(pool_of: PoolOf) -> None:
    for text in pool_of(4).run(refused):
        assert "shard_size = 3" in text and "which is 4" in text


def fails_first() -> str | None:
    ranks = Ranks.open(shard_size=None, replicate_size=None, timeout=10.0, device_kind="cpu")
    assert ranks is not None
    try:
        if ranks.rank == 1:
            ranks.report_failure(ParallelError("a consequence"))
            assert ranks.first_failure() is None
            ranks.report_failure(ValueError("the first\nline"))
            ranks.report_failure(ValueError("a second"))
            ranks.publish("said", "yes")
        else:
            ranks.store.wait(["said"])
            ranks.report_failure(ValueError("later"))
        return ranks.first_failure()
    finally:
        ranks.close()


def test_the_first_failure_stays(pool_of: PoolOf) -> None:
    assert pool_of(2).run(fails_first) == ["rank 1: ValueError: the first line"] * 2


def files_left() -> int:
    """How many files more are open after further rounds of opening and closing."""
    counts = []
    for _ in range(6):
        ranks = Ranks.open(shard_size=None, replicate_size=None, timeout=10.0, device_kind="cpu")
        assert ranks is not None
        ranks.close()
        gc.collect()
        counts.append(len(os.listdir("/proc/self/fd")))
    return counts[-1] - counts[1]


def test_closing_gives_back_the_files_of_a_group(pool_of: PoolOf) -> None:
    assert max(pool_of(2).run(files_left)) <= 0


OWNED = """
import torch, torch.distributed as dist
from offload.parallel.channel import Channel
from offload.parallel.ranks import Ranks

def opened():
    return Ranks.open(shard_size=None, replicate_size=None, timeout=120.0, device_kind="cpu")

def tell(ranks, name):
    channel = Channel(name, ranks, lambda n, dtype: torch.empty(n, dtype=dtype))
    said = channel.submit("tell", lambda c: c.all_gather_objects(ranks.rank, "world")).result()
    channel.close()
    assert said == [0, 1], said

first = opened()
assert dist.is_initialized()
second = opened()
tell(first, "first")
first.close()
tell(second, "second")     # the group that `first` has made lives as long as anybody uses it
second.close()
assert not dist.is_initialized()
third = opened()
tell(third, "third")
third.close()
assert not dist.is_initialized()
print("done\\n", end="")  # in one piece: the other rank writes to the same file
"""


def test_the_process_group_lives_as_long_as_anybody_uses_it(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(OWNED)
    ended = run_torchrun(["--no-python", sys.executable, str(tmp_path / "program.py")], nproc=2, timeout=240)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["done", "done"] and ended.left == []
