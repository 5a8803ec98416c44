"""Which samples a rank trains on: every global batch is cut into one part a rank, so that the order of samples is the
same for any number of ranks, and each sample is used exactly once.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.utils.data import Sampler


def share(count: int, rank: int, world: int) -> range:
    """The positions of a batch of `count` samples that belong to `rank`: consecutive, and at most one more than those
    of another rank. Together, by rank, they are `range(count)`.

    Raises:
        ValueError: a rank that is not there, or fewer samples than ranks.
    """
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank} is not one of the {world} ranks 0 to {world - 1}")
    if count < world:
        raise ValueError(
            f"{count} samples in a batch cannot be shared by {world} ranks; each needs one: raise the batch size "
            "(train.batch_size on the command line) or start fewer ranks"
        )
    return range(count * rank // world, count * (rank + 1) // world)


def this_rank() -> tuple[int, int]:
    """(rank, ranks) of the process group, else of the launcher's environment, else (0, 1)."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    rank, world = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    return int(rank), int(world)


class RankBatches(Sampler[list[int]]):
    """A `batch_sampler` for `torch.utils.data.DataLoader`: this rank's part of every global batch.

    `length` samples are put into one order by (`seed`, epoch), or stay in theirs without `shuffle`. Global batch `b` is
    samples `b * batch_size` to `(b + 1) * batch_size` of that order, whatever the number of ranks; `share` says which
    of them are this rank's. The samples that are left over make a last, smaller batch; if they are fewer than the
    ranks, they join the batch before it, since every rank needs something to compute. Call `set_epoch` before an epoch.

    Where `batch_size` or the last batch does not divide by the ranks, return (sum of losses, number of target tokens)
    from the loss function of `Engine.train_batch`: a mean over ranks of means would weigh samples differently.

    Raises:
        ValueError: a batch, or the whole data set, of fewer samples than ranks.
    """

    def __init__(
        self,
        length: int,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        rank: int | None = None,
        world: int | None = None,
    ) -> None:
        here = this_rank()
        self.rank = here[0] if rank is None else rank
        self.world = here[1] if world is None else world
        share(batch_size, self.rank, self.world)
        if length < self.world:
            raise ValueError(f"a data set of {length} samples cannot be shared by {self.world} ranks; each needs one")
        self.length, self.batch_size, self.seed, self.shuffle, self.epoch = length, batch_size, seed, shuffle, 0

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order; the same number on every rank."""
        self.epoch = epoch

    def _bounds(self) -> list[tuple[int, int]]:
        starts = list(range(0, self.length, self.batch_size))
        if len(starts) > 1 and self.length - starts[-1] < self.world:
            starts.pop()
        return list(zip(starts, [*starts[1:], self.length], strict=True))

    def __len__(self) -> int:
        return len(self._bounds())

    def __iter__(self) -> Iterator[list[int]]:
        found: list[int] | range = range(self.length)
        if self.shuffle:
            digest = hashlib.sha256(f"{self.seed}/{self.epoch}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            found = torch.randperm(self.length, generator=generator).tolist()
        for start, stop in self._bounds():
            mine = share(stop - start, self.rank, self.world)
            yield list(found[start + mine.start : start + mine.stop])
