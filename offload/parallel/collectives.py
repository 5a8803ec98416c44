"""What ranks exchange, on top of point-to-point messages.

gloo's own all-gather copies everything once more, which messages straight into place do not; its
reductions put as much on the wire as an all-reduce, and their sums depend on where buckets begin. So a gather here is
messages into place, and a sum is an all-to-all followed by additions in rank order.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from offload.layout import ceil_to
from offload.parallel.ranks import Ranks

T = TypeVar("T")
Allocate = Callable[[int, torch.dtype], Tensor]
_MESSAGE = 1 << 30
"""Most bytes of one message."""
_SUM = 1 << 18
"""Elements that are added at a time, so that the sum stays in the cache."""


class RankGoneError(RuntimeError):
    """`rank` has ended, or did not send or take what belongs to an operation in time; the text is the backend's."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(text)
        self.rank = rank


class Collectives:
    """Operations of the groups `shard`, `replicate` and `world`. `allocate` gives host memory for what arrives; `tag`
    the tag of the n-th message, of so many bytes, between two ranks of the current operation.

    The length is in the tag because gloo ends the process when a message is longer than what waits for it, and takes a
    shorter one for the whole.
    """

    def __init__(self, ranks: Ranks, allocate: Allocate, tag: Callable[[int, int], int]) -> None:
        self._ranks, self._allocate, self._tag = ranks, allocate, tag

    # Messages

    def _exchange(self, sends: dict[int, Tensor], receives: dict[int, Tensor], part: int = 0) -> None:
        """Sends and receives 1-D contiguous host tensors, by rank; returns when all is done.

        Raises:
            RankGoneError: a rank is gone or does not come.
        """
        group = self._ranks.messages
        works = []
        rank, gone = self._ranks.rank, None
        try:
            for rank, tensor in receives.items():
                for n, piece in enumerate(_pieces(tensor)):
                    tag = self._tag(part + n, piece.numel())
                    works.append((rank, dist.irecv(piece, src=rank, group=group, tag=tag)))
            for rank, tensor in sends.items():
                for n, piece in enumerate(_pieces(tensor)):
                    tag = self._tag(part + n, piece.numel())
                    works.append((rank, dist.isend(piece, dst=rank, group=group, tag=tag)))
            for peer, work in works:
                rank = peer
                if work is not None:
                    work.wait()
        except RuntimeError as error:
            text = " ".join(str(error).split()).partition(" This is typically caused by")[0]
            gone = RankGoneError(rank, text)
        if gone is not None:
            raise gone  # out here: the backend's error would keep this frame, and with it the group, as long as itself

    # Collectives

    def all_gather_(self, buffer: Tensor, group: str, category: str) -> None:
        """Fills the equal parts of `buffer` (1-D, one part a rank) that other ranks hold, in place."""
        members = self._ranks.members(group)
        if len(members) == 1 or buffer.numel() == 0:
            return
        self._ranks.counters.add("gather", category, buffer.nbytes)
        size, own = buffer.numel() // len(members), members.index(self._ranks.rank)
        if buffer.device.type == "cuda":
            part = buffer[own * size : (own + 1) * size]
            dist.all_gather_into_tensor(buffer, part, group=self._ranks.device_group(group))
            torch.cuda.current_stream().synchronize()
            return
        parts = {rank: buffer[i * size : (i + 1) * size] for i, rank in enumerate(members)}
        mine = parts.pop(self._ranks.rank)
        self._exchange(dict.fromkeys(parts, mine), parts)

    def reduce_scatter(self, send: Tensor, group: str, category: str) -> Tensor:
        """The fp32 sum in rank order of this rank's part of everybody's `send` (1-D, equal parts)."""
        self._ranks.counters.add("reduce-scatter", category, send.nbytes)
        return self._reduce_scatter(send, group)

    def _reduce_scatter(self, send: Tensor, group: str) -> Tensor:
        members = self._ranks.members(group)
        size, own = send.numel() // len(members), members.index(self._ranks.rank)
        parts = [send[i * size : (i + 1) * size] for i in range(len(members))]
        if send.device.type == "cuda":
            arrived = torch.empty_like(send)
            dist.all_to_all_single(arrived, send, group=self._ranks.device_group(group))
            torch.cuda.current_stream().synchronize()
            landed = [arrived[i * size : (i + 1) * size] for i in range(len(members))]
            total = torch.empty(size, dtype=torch.float32, device=send.device)
        else:
            others = [i for i in range(len(members)) if i != own]
            landing = self._allocate(size * len(others), send.dtype)
            landed = [parts[own]] * len(members)
            for n, i in enumerate(others):
                landed[i] = landing[n * size : (n + 1) * size]
            if size:
                self._exchange({members[i]: parts[i] for i in others}, {members[i]: landed[i] for i in others})
            total = self._allocate(size, torch.float32)
        for lo in range(0, size, _SUM):
            hi = min(lo + _SUM, size)
            chunk = total[lo:hi].copy_(landed[0][lo:hi])
            for of_rank in landed[1:]:
                chunk.add_(of_rank[lo:hi])
        return total

    def all_reduce(self, send: Tensor, group: str, category: str, *, scale: float = 1.0) -> Tensor:
        """The sum of everybody's `send` in rank order in fp32, times `scale`, rounded to its dtype; on every rank."""
        members = self._ranks.members(group)
        count = send.numel()
        if len(members) == 1:
            return (send.float() * scale).to(send.dtype)
        self._ranks.counters.add("all-reduce", category, 2 * send.nbytes)
        padded = ceil_to(count, len(members))
        if padded != count:
            send = torch.cat([send, send.new_zeros(padded - count)])
        total = self._reduce_scatter(send, group).mul_(scale)
        size, own = padded // len(members), members.index(self._ranks.rank)
        everything = torch.empty_like(send) if send.device.type == "cuda" else self._allocate(padded, send.dtype)
        everything[own * size : (own + 1) * size].copy_(total)
        if send.device.type == "cuda":
            part = everything[own * size : (own + 1) * size]
            dist.all_gather_into_tensor(everything, part, group=self._ranks.device_group(group))
            torch.cuda.current_stream().synchronize()
        elif size:
            parts = {rank: everything[i * size : (i + 1) * size] for i, rank in enumerate(members)}
            mine = parts.pop(self._ranks.rank)
            self._exchange(dict.fromkeys(parts, mine), parts, part=1 << 16)
        return everything[:count]

    def collect(self, part: Tensor, lengths: list[int], group: str, category: str) -> Tensor | None:
        """The parts (1-D host tensors of one dtype, `lengths` elements by place in the group) of everybody, one after
        the other, on the first rank of the group; None on the others.
        """
        members = self._ranks.members(group)
        self._ranks.counters.add("gather", category, sum(lengths) * part.element_size())
        if self._ranks.rank != members[0]:
            self._exchange({members[0]: part} if part.numel() else {}, {})
            return None
        whole = torch.empty(sum(lengths), dtype=part.dtype)
        into, at = {}, 0
        for rank, length in zip(members, lengths, strict=True):
            if rank == members[0]:
                whole[at : at + length].copy_(part)
            elif length:
                into[rank] = whole[at : at + length]
            at += length
        self._exchange({}, into)
        return whole

    def all_gather_objects(self, value: T, group: str) -> list[T]:
        """Everybody's `value`, small and picklable, in rank order."""
        members = self._ranks.members(group)
        data = _packed(value)
        own = members.index(self._ranks.rank)
        others = [i for i in range(len(members)) if i != own]
        lengths = torch.zeros(len(members), dtype=torch.int64)
        lengths[own] = data.numel()
        into = {members[i]: lengths[i : i + 1] for i in others}
        self._exchange(dict.fromkeys(into, lengths[own : own + 1]), into)
        arrived = {members[i]: torch.empty(int(lengths[i]), dtype=torch.uint8) for i in others}
        self._exchange(dict.fromkeys(arrived, data), arrived, part=1)
        return [value if rank == self._ranks.rank else _unpacked(arrived[rank]) for rank in members]


def _pieces(tensor: Tensor) -> list[Tensor]:
    """Messages that carry a tensor."""
    data = tensor.view(torch.uint8) if tensor.numel() else tensor.new_empty(0, dtype=torch.uint8)
    return [data[lo : lo + _MESSAGE] for lo in range(0, data.numel(), _MESSAGE)]


def _packed(value: Any) -> Tensor:
    stream = io.BytesIO()
    pickle.dump(value, stream)
    return torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8)


def _unpacked(data: Tensor) -> Any:
    return pickle.loads(data.numpy().tobytes())
