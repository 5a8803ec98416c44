"""Cross entropy over a large vocabulary, a few tokens at a time, so that the logits never exist whole.

Chunk by chunk the logits and their loss are computed, and dropped; the backward computes them again. Besides hidden
states and gradients, memory is that of the logits of one chunk. Chunks are part of the numerical policy: losses are
summed in fp32 chunk after chunk, and the head's gradient is the sum of one per chunk, in the head's dtype.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from offload.parameters import record_of

IGNORE_INDEX = -100


def chunked_cross_entropy(
    hidden: Tensor,
    head: nn.Linear | Tensor,
    targets: Tensor,
    chunk: int,
    *,
    ignore_index: int = IGNORE_INDEX,
    reduction: str = "mean",
) -> Tensor:
    """Cross entropy, in fp32, of `hidden @ head.T` against `targets`; for models in and out of an engine.

    Args:
        hidden: (..., width), any floating dtype.
        head: a Linear, or its weight of shape (vocabulary, width).
        targets: int64 of the leading shape of `hidden`; positions with `ignore_index` do not count.
        chunk: tokens whose logits exist at a time.
        reduction: "mean" over the targets that count (NaN without any, as in torch), or "sum".

    Raises:
        ValueError: shapes that do not fit, a chunk below 1, another reduction.
    """
    if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
        raise ValueError(f"chunked_cross_entropy: chunk = {chunk!r} must be a number of tokens, at least 1")
    if reduction not in ("mean", "sum"):
        raise ValueError(f"chunked_cross_entropy: reduction = {reduction!r}; known: mean, sum")
    weight, bias = (head.weight, head.bias) if isinstance(head, nn.Linear) else (head, None)
    if hidden.shape[:-1] != targets.shape or hidden.dim() == 0 or hidden.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"chunked_cross_entropy: hidden {tuple(hidden.shape)}, head {tuple(weight.shape)} and targets "
            f"{tuple(targets.shape)} do not fit: (..., width), (vocabulary, width) and (...)"
        )
    rows, wanted = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)

    def loss_of(part: Tensor, targets: Tensor) -> Tensor:
        logits = F.linear(part, weight, bias)
        return F.cross_entropy(logits.float(), targets, ignore_index=ignore_index, reduction="sum")

    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    with _resident(weight, bias):
        for part, few in zip(_parts(rows, chunk), _parts(wanted, chunk), strict=True):
            if torch.is_grad_enabled():
                # Nothing random happens inside, so no random state has to be carried.
                total = total + checkpoint(loss_of, part, few, use_reentrant=False, preserve_rng_state=False)
            else:
                total = total + loss_of(part, few)
    return total if reduction == "sum" else total / (wanted != ignore_index).sum()


def _parts(value: Tensor, size: int) -> list[Tensor]:
    return [value[start : start + size] for start in range(0, len(value), size)]


@contextmanager
def _resident(*parameters: Tensor | None) -> Iterator[None]:
    """Offloaded ones are loaded once for all chunks."""
    records = [record for p in parameters if p is not None and (record := record_of(p)) is not None]
    with ExitStack() as stack:
        for host in {id(record.host): record.host for record in records}.values():
            stack.enter_context(host.access([record for record in records if record.host is host]))
        yield


def set_loss_chunk(model: nn.Module, chunk: int | None) -> None:
    """Tells the models of `offload.models` in `model` what `schedule.loss_chunk` is; warns if there is none."""
    if chunk is None:
        return
    found = [module for module in model.modules() if hasattr(type(module), "loss_chunk")]
    for module in found:
        module.loss_chunk = chunk  # type: ignore[assignment]
    if not found:
        warnings.warn(
            f"schedule.loss_chunk = {chunk} has no effect on {type(model).__name__}, whose loss is its own: use "
            "offload.chunked_cross_entropy in the loss_fn of train_batch",
            stacklevel=2,
        )
