"""Comparison of what has to be the same on several ranks: first values, and later the weights that they all keep.

Ranks that drift apart (values that were drawn without a common seed, an unreliable machine) train silently wrong; a
comparison names the unit and the ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from offload.errors import ParallelError
from offload.planes import Carver, SlotQueue
from offload.state import FlatState
from swap.checksums import crc32

if TYPE_CHECKING:
    from offload.checkpoint.weights import WeightSource

_ENDS = 1024
"""Elements at either end of a tensor in a file that are compared."""


def hash_parameters(parameters: Iterable[nn.Parameter], source: WeightSource | None = None) -> int:
    """CRC-32 of the values of parameters in host memory; of those that come from files, of their ends only: no rank
    reads all of these, and files that differ mostly differ everywhere.
    """
    found = 0
    for parameter in parameters:
        if source is None or not source.has(parameter):
            found = _add(found, parameter.detach().reshape(-1))
            continue
        count = parameter.numel()
        for lo, hi in ((0, min(_ENDS, count)), (max(0, count - _ENDS), count)):
            found = _add(found, source.read(parameter, lo, hi))
    return found


def hash_weights(state: FlatState, queue: SlotQueue) -> int:
    """CRC-32 of what a rank keeps of a flat's weight plane, read chunk by chunk."""
    plane, found = state.weight, 0
    state.settle()
    for lo, hi in state.flat.chunks(state.chunk, plane.base, plane.end):
        if plane.on_host:
            found = _add(found, plane.view(lo, hi))
            continue
        staging = queue.acquire()
        try:
            piece = Carver(staging).take(hi - lo, plane.spec.dtype)
            plane.read(lo, hi, piece)
            found = _add(found, piece)
        finally:
            queue.give_back(staging, [])
    return found


def _add(found: int, values: Tensor) -> int:
    if values.numel() == 0:
        return found
    return crc32(values.contiguous().view(torch.uint8).numpy().data, found)


def compare(hashes: Sequence[Mapping[str, int]], groups: Sequence[Sequence[int]], when: str) -> None:
    """Refuses units whose hashes, by rank, differ within one of `groups`.

    Raises:
        ParallelError: names the first such unit, and the ranks that differ from the first one of their group.
    """
    for group in groups:
        for name, expected in hashes[group[0]].items():
            others = [rank for rank in group if hashes[rank].get(name) != expected]
            if others:
                raise ParallelError(
                    f"replicas differ {when}: the weights of {name} on rank{'s' if len(others) > 1 else ''} "
                    f"{', '.join(map(str, others))} are not those of rank {group[0]}; give all ranks the same initial "
                    "values (the same seed or file), change weights on all of them alike, and check the machines"
                )
