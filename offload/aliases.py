"""Parameters whose memory is also somebody else's: offloaded apart they would silently stop being the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from offload.errors import UnsupportedModelError


def check_memory(model: nn.Module) -> None:
    """Refuses parameters that share elements with each other, with a buffer or within themselves, unless nothing of it
    is trained. Parts of one storage that do not meet are fine.

    Raises:
        UnsupportedModelError: naming both.
    """
    found: dict[int, list[tuple[int, int, str, Tensor]]] = {}
    named = [(name, p.data, isinstance(p, nn.Parameter) and p.requires_grad) for name, p in model.named_parameters()]
    trained = {name for name, _, grad in named if grad}
    parameters = {name for name, _, _ in named}
    for name, tensor in [*((n, t) for n, t, _ in named), *model.named_buffers()]:
        if tensor.layout is not torch.strided or tensor.numel() == 0:
            continue
        start = int(tensor.storage_offset()) * tensor.element_size()
        elements = 1 + sum((int(n) - 1) * int(s) for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        if name in trained and any(s == 0 and n > 1 for n, s in zip(tensor.shape, tensor.stride(), strict=True)):
            raise UnsupportedModelError(
                f"parameter {name} is an expanded tensor, whose elements share memory; make it contiguous() first"
            )
        place = found.setdefault(tensor.untyped_storage()._cdata, [])
        place.append((start, start + elements * tensor.element_size(), name, tensor))
    for places in found.values():
        _check_storage(sorted(places, key=lambda place: place[:2]), parameters, trained)


def _check_storage(places: Sequence[tuple[int, int, str, Tensor]], parameters: set[str], trained: set[str]) -> None:
    for index, (_, end, name, tensor) in enumerate(places):
        for begin, _, other, second in places[index + 1 :]:
            if begin >= end:
                break
            pair = {name, other}
            if pair & trained and _meet(tensor, second):
                remedy = (
                    "make it one nn.Parameter in both places to tie them, or clone() one of them"
                    if pair <= parameters
                    else "compute the buffer from the parameter in forward, or clone() it"
                )
                raise UnsupportedModelError(
                    f"{name} and {other} are different objects over the same memory, and would be kept apart: {remedy}"
                )


def _meet(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors whose ranges in one storage overlap have an element in common."""
    if a.is_contiguous() and b.is_contiguous():
        return True
    if a.element_size() != b.element_size():
        return True
    low = min(a.storage_offset(), b.storage_offset())
    spans = [
        t.storage_offset() - low + 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
        for t in (a, b)
    ]
    marks = torch.zeros(max(spans), dtype=torch.bool)
    marks.as_strided(a.shape, a.stride(), a.storage_offset() - low).fill_(True)
    return bool(marks.as_strided(b.shape, b.stride(), b.storage_offset() - low).any())
