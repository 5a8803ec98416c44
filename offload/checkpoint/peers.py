"""What ranks do together for a checkpoint: each does its part, and all of them succeed or fail."""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from offload.checkpoint.errors import (
    CheckpointError,
    CheckpointMismatchError,
    CheckpointSaveError,
    DamagedCheckpointError,
    IncompleteCheckpointError,
)
from offload.checkpoint.format import dump_json, encode_state
from swap.checksums import crc32

if TYPE_CHECKING:
    from offload.parallel.channel import Channel
    from offload.parallel.cluster import Cluster

T = TypeVar("T")
_KINDS: dict[str, Callable[[str], Exception]] = {
    kind.__name__: kind
    for kind in (
        CheckpointError,
        IncompleteCheckpointError,
        DamagedCheckpointError,
        CheckpointMismatchError,
        CheckpointSaveError,
    )
}
_VISIBLE = 5.0
"""Seconds in which a file that one machine has made must show on another one: caches of network filesystems."""
OWN_LIMIT = 64 << 20
"""Bytes of buffers at most that a rank saves because they differ from rank 0's."""


class Peers:
    """The ranks that save or load one checkpoint together; a single process is alone among them.

    `channel`: for what runs beside training, whose votes must not come between those of the steps.
    """

    def __init__(self, cluster: Cluster | None, channel: Channel | None = None) -> None:
        self._cluster, self._channel = cluster, channel
        self.rank = 0 if cluster is None else cluster.ranks.rank
        self.world = 1 if cluster is None else cluster.ranks.world

    def together(self, what: str, job: Callable[[], T]) -> list[T]:
        """`job()` of every rank, by rank; small and picklable.

        Raises:
            Exception: the job's own where it failed; on the other ranks one of the same kind that names the rank.
        """
        if self._cluster is None:
            return [job()]
        value: T | None = None
        error: BaseException | None = None
        try:
            value = job()
        except BaseException as caught:
            error = caught
        said = None if error is None else (type(error).__name__, " ".join(str(error).split()) or type(error).__name__)
        answers = self._exchange(what, (value, said))
        if error is not None:
            raise error
        for rank, (_, failure) in enumerate(answers):
            if failure is not None:
                kind, text = failure
                raise _KINDS.get(kind, CheckpointSaveError)(f"{text} (on rank {rank} of {self.world})")
        return [answer for answer, _ in answers]

    def _exchange(self, what: str, value: Any) -> list[Any]:
        assert self._cluster is not None
        if self._channel is None:
            return self._cluster.all_of(what, value)
        return self._channel.submit(what, lambda collectives: collectives.all_gather_objects(value, "world")).result()

    def same(self, what: str, values: list[T]) -> None:
        """Raises CheckpointMismatchError unless all ranks have the same value of `what`."""
        if any(value != values[0] for value in values[1:]):
            shown = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values[:8]))
            raise CheckpointMismatchError(f"{what} differs between ranks: {shown}")


def put_marker(target: Path) -> str:
    """Makes a file by which other ranks see that they have the same directory; its name."""
    name = f"shared-{socket.gethostname()}-{uuid.uuid4().hex[:12]}.tmp"
    (target / name).touch()
    return name


def await_marker(target: Path, name: str, rank: int) -> None:
    """Returns once the marker of rank 0 shows in `target`.

    Raises:
        CheckpointSaveError: it does not: the directory is not one and the same for all ranks.
    """
    deadline = time.monotonic() + _VISIBLE
    while True:
        try:
            if name in os.listdir(target):  # a listing, since lookups that failed are cached
                return
        except OSError:
            pass
        if time.monotonic() > deadline:
            raise CheckpointSaveError(
                f"{target}: rank {rank} on {socket.gethostname()} does not see there what rank 0 has made "
                f"({name}): all ranks need the same directory, on a filesystem that all machines share; set "
                "checkpoint.directory to one"
            )
        time.sleep(0.1)


def fingerprints(data: Any, extra: Any, buffers: Mapping[str, Tensor]) -> dict[str, int]:
    """By which ranks compare what they would save besides state."""
    found = {
        "data": crc32(dump_json({"value": encode_state(data, "data")})),
        "extra": crc32(dump_json({"value": encode_state(extra, "extra")})),
    }
    for name, buffer in buffers.items():
        plain = buffer.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if buffer.numel() else b""
        found[f"buffer {name}"] = crc32(plain)
    return found


def own_values(
    mine: Mapping[str, int], first: Mapping[str, int], data: Any, extra: Any, buffers: Mapping[str, Tensor]
) -> dict[str, Any] | None:
    """What of a rank's `data`, `extra` and buffers differs from rank 0's, encoded; None if nothing does.

    Raises:
        CheckpointError: buffers of more than 64 MiB differ.
    """
    own: dict[str, Any] = {}
    for key, value in (("data", data), ("extra", extra)):
        if mine[key] != first.get(key):
            own[key] = encode_state(value, key)
    different = {name: b for name, b in buffers.items() if mine[f"buffer {name}"] != first.get(f"buffer {name}")}
    if sum(b.nbytes for b in different.values()) > OWN_LIMIT:
        raise CheckpointError(
            f"buffers {', '.join(list(different)[:3])} differ from those of rank 0 and have more than "
            f"{OWN_LIMIT >> 20} MiB; make them the same on all ranks, or register them with persistent=False"
        )
    if different:
        own["buffers"] = {
            name: encode_state(buffer.cpu(), name, limit=OWN_LIMIT) for name, buffer in different.items()
        }
    return own or None
