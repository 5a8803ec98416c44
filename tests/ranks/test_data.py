"""Which samples a rank gets: the same order at any number of ranks, every sample once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from offload.data import TextData
from offload.parallel.data import RankBatches, share

WORLDS = range(1, 9)


@pytest.mark.parametrize("world", WORLDS)
def test_shares_are_consecutive_and_even(world: int) -> None:
    for count in range(world, 30):
        parts = [share(count, rank, world) for rank in range(world)]
        assert [i for part in parts for i in part] == list(range(count))
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1 and min(sizes) >= 1


def test_a_share_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"3 samples in a batch cannot be shared by 4 ranks.*train\.batch_size"):
        share(3, 0, 4)
    with pytest.raises(ValueError, match="rank 2 is not one of the 2 ranks 0 to 1"):
        share(4, 2, 2)


@pytest.mark.parametrize("world", WORLDS)
def test_text_batches_are_the_same_rows_at_any_number_of_ranks(tmp_path: Path, world: int) -> None:
    file = tmp_path / "text"
    file.write_bytes(bytes(range(256)) * 40)
    data = TextData([file], context=16, batch_size=9, seed=3)
    for step, micro_batch in ((0, 0), (0, 1), (5, 2)):
        whole = data.train_batch(step, micro_batch)["input_ids"]
        parts = [data.train_batch(step, micro_batch, rank, world)["labels"] for rank in range(world)]
        assert torch.equal(torch.cat(parts), whole)
    whole = torch.cat([batch["input_ids"] for batch in data.eval_batches(3)])
    columns = [list(data.eval_batches(3, rank, world)) for rank in range(world)]
    rows = [columns[rank][batch]["input_ids"] for batch in range(3) for rank in range(world)]
    assert torch.equal(torch.cat(rows), whole)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("world", WORLDS)
def test_the_global_order_of_a_loader_does_not_depend_on_the_number_of_ranks(world: int, shuffle: bool) -> None:
    for length in (8, 16, 17, 23, 41):
        alone = RankBatches(length, 8, seed=5, shuffle=shuffle, rank=0, world=1)
        ranks = [RankBatches(length, 8, seed=5, shuffle=shuffle, rank=rank, world=world) for rank in range(world)]
        orders = []
        for epoch in (0, 1):
            for sampler in (alone, *ranks):
                sampler.set_epoch(epoch)
            parts = [list(sampler) for sampler in ranks]
            assert {len(part) for part in parts} == {len(ranks[0])}
            assert all(samples for part in parts for samples in part), "every rank has something in every batch"
            order = [i for batch in zip(*parts, strict=True) for samples in batch for i in samples]
            assert order == [i for batch in alone for i in batch]
            assert sorted(order) == list(range(length))
            orders.append(order)
        assert (orders[0] != orders[1]) is shuffle


def test_a_loader_of_too_few_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="a data set of 3 samples cannot be shared by 4 ranks"):
        RankBatches(3, 8, rank=0, world=4)
    with pytest.raises(ValueError, match="2 samples in a batch cannot be shared by 4 ranks"):
        RankBatches(100, 2, rank=0, world=4)


def test_a_loader_takes_its_place_from_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert list(RankBatches(4, 4, shuffle=False)) == [[2, 3]]
