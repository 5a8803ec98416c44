"""Collectives against one-line references: bits, dtypes, groups, empty parts, long tensors, memory, counters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from itertools import product

import pytest
import torch
from torch import Tensor

from offload.errors import ParallelError
from offload.parallel import collectives as module
from offload.parallel.channel import Channel
from offload.parallel.ranks import Ranks
from tests.ranks.harness import RankPool

PoolOf = Callable[[int], RankPool]
WIRES = (torch.float32, torch.bfloat16, torch.float16)


@contextmanager
def ranks_of(shard_size: int | None = None, timeout: float = 20.0) -> Iterator[Ranks]:
    ranks = Ranks.open(shard_size=shard_size, replicate_size=None, timeout=timeout, device_kind="cpu")
    assert ranks is not None
    try:
        yield ranks
    finally:
        ranks.close()


@contextmanager
def channel_of(ranks: Ranks, allocated: list[int] | None = None) -> Iterator[Channel]:
    def allocate(numel: int, dtype: torch.dtype) -> Tensor:
        if allocated is not None:
            allocated.append(numel * dtype.itemsize)
        return torch.full((numel,), torch.nan, dtype=dtype)  # what is not written shows

    channel = Channel("test", ranks, allocate)
    try:
        yield channel
    finally:
        channel.close()


def values(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    """Of very different magnitudes, so that the order of a sum shows in its bits."""
    generator = torch.Generator().manual_seed(rank)
    exponents = torch.randint(-6, 7, (count,), generator=generator)
    return (torch.randn(count, generator=generator) * torch.exp2(exponents.float())).to(dtype)


def summed(members: list[int], count: int, dtype: torch.dtype) -> Tensor:
    return reduce(torch.add, [values(rank, count, dtype).float() for rank in members])


def check_sums(groups: list[str], shard_size: int | None, parts: list[int]) -> int:
    """The number of comparisons."""
    checked = 0
    with ranks_of(shard_size) as ranks, channel_of(ranks) as channel:
        for group, part, dtype in product(groups, parts, WIRES):
            members = ranks.members(group)
            own, count = members.index(ranks.rank), part * len(members)
            send = values(ranks.rank, count, dtype)
            kept = send.clone()
            got = channel.submit("sum parts", lambda c, s=send, g=group: c.reduce_scatter(s, g, "test")).result()
            assert got.dtype is torch.float32 and torch.equal(send, kept)
            assert torch.equal(got, summed(members, count, dtype)[own * part : (own + 1) * part])
            odd = max(count - 1, 0)  # not a multiple of the number of ranks
            send, scale = values(ranks.rank, odd, dtype), 1.0 / len(members)
            everything = channel.submit(
                "sum all", lambda c, s=send, g=group, f=scale: c.all_reduce(s, g, "test", scale=f)
            ).result()
            assert torch.equal(everything, (summed(members, odd, dtype) * scale).to(dtype))
            checked += 2
    return checked


def check_gathers(groups: list[str], shard_size: int | None, parts: list[int], dtypes: list[torch.dtype]) -> None:
    with ranks_of(shard_size) as ranks, channel_of(ranks) as channel:
        for group, part, dtype in product(groups, parts, dtypes):
            members = ranks.members(group)
            whole = torch.cat([torch.arange(part).add(100 * rank).to(dtype) for rank in members])
            own = slice(ranks.members(group).index(ranks.rank) * part, None)
            buffer = torch.full_like(whole, 77)
            buffer[own][:part] = whole[own][:part]
            at = buffer.data_ptr()
            channel.submit("gather", lambda c, b=buffer, g=group: c.all_gather_(b, g, "test")).wait()
            assert torch.equal(buffer, whole) and buffer.data_ptr() == at


def check_objects() -> dict[str, list[object]]:
    found = {}
    with ranks_of(2) as ranks, channel_of(ranks) as channel:
        mine = {"rank": ranks.rank, "text": "x" * (1000 * ranks.rank)}
        for group in ("world", "shard", "replicate"):
            everybody = channel.submit("tell", lambda c, g=group: c.all_gather_objects(mine, g)).result()
            assert [len(said["text"]) for said in everybody] == [1000 * said["rank"] for said in everybody]
            found[group] = [said["rank"] for said in everybody]
    return found


def check_collect(cases: list[list[int]]) -> list[list[int] | None]:
    found = []
    with ranks_of() as ranks, channel_of(ranks) as channel:
        for lengths in cases:
            part = torch.full((lengths[ranks.rank],), ranks.rank, dtype=torch.int64)
            whole = channel.submit("collect", lambda c, p=part, n=lengths: c.collect(p, n, "world", "test")).result()
            found.append(None if whole is None else whole.tolist())
    return found


def check_short_messages() -> None:
    """Long tensors go in several messages and sums in several pieces; here with both limits low."""
    before = module._MESSAGE, module._SUM
    module._MESSAGE, module._SUM = 100, 7
    try:
        check_sums(["world"], None, [331])
        check_gathers(["world"], None, [331], [torch.bfloat16])
    finally:
        module._MESSAGE, module._SUM = before


def bytes_allocated(part: int) -> tuple[list[int], dict[str, dict[str, int]]]:
    allocated: list[int] = []
    with ranks_of() as ranks, channel_of(ranks, allocated) as channel:
        send = values(ranks.rank, part * ranks.world, torch.bfloat16)
        channel.submit("sum parts", lambda c: c.reduce_scatter(send, "world", "gradients")).wait()
        channel.submit("gather", lambda c: c.all_gather_(send, "world", "parameters")).wait()
        before = list(allocated)
        channel.submit("sum all", lambda c: c.all_reduce(send, "world", "gradients")).wait()
        return before, ranks.counters.snapshot()


def test_sums_are_in_rank_order_to_the_bit(pool_of: PoolOf) -> None:
    assert pool_of(3).run(check_sums, ["world"], None, [0, 1, 4097]) == [18] * 3


def test_sums_of_groups(pool_of: PoolOf) -> None:
    assert pool_of(4).run(check_sums, ["shard", "replicate"], 2, [130]) == [12] * 4


def test_gathers_fill_in_place_in_any_dtype(pool_of: PoolOf) -> None:
    dtypes = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.bool]
    pool_of(3).run(check_gathers, ["world"], None, [0, 1000], dtypes)


def test_gathers_of_groups(pool_of: PoolOf) -> None:
    pool_of(4).run(check_gathers, ["shard", "replicate"], 2, [1000], [torch.bfloat16])


def test_objects_of_different_sizes_come_in_rank_order(pool_of: PoolOf) -> None:
    found = pool_of(4).run(check_objects)
    assert [of_rank["world"] for of_rank in found] == [[0, 1, 2, 3]] * 4
    assert [of_rank["shard"] for of_rank in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [of_rank["replicate"] for of_rank in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]


def test_collected_parts_may_differ_in_length(pool_of: PoolOf) -> None:
    whole = [[0, 0, 1, 1, 1, 2], [1, 1, 1, 1], []]
    assert pool_of(3).run(check_collect, [[2, 3, 1], [0, 4, 0], [0, 0, 0]]) == [whole, [None] * 3, [None] * 3]


def test_tensors_longer_than_a_message(pool_of: PoolOf) -> None:
    pool_of(3).run(check_short_messages)


def test_memory_beside_the_operands_and_counted_payload(pool_of: PoolOf) -> None:
    part = 1000
    for allocated, counted in pool_of(3).run(bytes_allocated, part):
        # What arrives from two ranks in bf16, and one part in fp32; the gather needs nothing.
        assert allocated == [2 * part * 2, part * 4]
        assert counted == {
            "reduce-scatter gradients": {"bytes": 3 * part * 2, "calls": 1},
            "gather parameters": {"bytes": 3 * part * 2, "calls": 1},
            "all-reduce gradients": {"bytes": 2 * 3 * part * 2, "calls": 1},
        }


def mismatched(counts: list[int]) -> str:
    """Ranks disagree about a length: never an abort, never data of another length."""
    with ranks_of(timeout=4.0) as ranks, channel_of(ranks) as channel:
        buffer = torch.zeros(counts[ranks.rank])
        with pytest.raises(ParallelError) as caught:
            channel.submit("gather", lambda c: c.all_gather_(buffer, "world", "test")).wait(30)
        return str(caught.value)


@pytest.mark.parametrize("counts", [[8, 1024], [1024, 8]])
def test_lengths_that_differ_end_in_an_error_not_in_an_abort(pool_of: PoolOf, counts: list[int]) -> None:
    for text in pool_of(2).run(mismatched, counts):
        assert text.startswith("gather: rank ")
