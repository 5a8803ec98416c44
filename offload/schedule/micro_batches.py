"""The micro-batches of one optimizer step: how each is called, what its loss is, and in which order they run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

LossFn = Callable[[Any, Any], Any]


class MicroBatches:
    """Forward and backward of one micro-batch at a time, by index, in any order.

    `forward(*args, **kwargs)` and `backward(loss)` are the engine's, `seed(k)` sets the global generators for
    micro-batch k. A `loss_fn` may give a loss, or a pair of a sum of losses and a number of target tokens.
    """

    def __init__(
        self,
        batches: Sequence[Any],
        loss_fn: LossFn | None,
        *,
        forward: Callable[..., Any],
        backward: Callable[[Tensor], None],
        seed: Callable[[int], None],
    ) -> None:
        self._batches, self._loss_fn = batches, loss_fn
        self._forward, self._backward, self._seed = forward, backward, seed
        self._losses: dict[int, float] = {}
        self._tokens: dict[int, int | None] = {}

    def __len__(self) -> int:
        return len(self._batches)

    def run(self, k: int) -> None:
        """Forward and backward of micro-batch `k`.

        Raises:
            ValueError: no loss to be found, or a token count for some micro-batches only.
        """
        self._seed(k)
        batch = self._batches[k]
        outputs = self._call(batch)
        value = getattr(outputs, "loss", None) if self._loss_fn is None else self._loss_fn(outputs, batch)
        loss, count = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
        del outputs, value
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            source = "outputs.loss" if self._loss_fn is None else "loss_fn"
            raise ValueError(f"train_batch: {source} of micro-batch {k} is no scalar tensor: {loss!r:.80}")
        self._tokens[k] = None if count is None else int(count)
        if len({tokens is None for tokens in self._tokens.values()}) > 1:
            raise ValueError("train_batch: loss_fn gave a token count for some micro-batches only")
        if count is None:
            loss = loss / len(self._batches)
        self._backward(loss)
        self._losses[k] = float(loss.detach())

    def _call(self, batch: Any) -> Any:
        if isinstance(batch, Mapping):
            return self._forward(**batch)
        if isinstance(batch, (tuple, list)):
            return self._forward(*batch)
        return self._forward(batch)

    def result(self) -> tuple[float, int]:
        """(mean loss, 1) or, with token counts, (mean loss over all tokens, their number)."""
        total = 0.0
        for k in range(len(self._batches)):
            total += self._losses[k]
        tokens = sum(count or 0 for count in self._tokens.values())
        return (total / tokens, tokens) if tokens else (total, 1)


def choose_order(wanted: str, *, loads: bool, count: int | None = None) -> str:
    """`layer_major` or `batch_major`. `loads`: whether the weights of any unit are brought to the device for its use.

    With fewer than two micro-batches (`count`, if it is known) there is nothing to share.
    """
    if count is not None and count < 2:
        return "batch_major"
    if wanted != "auto":
        return wanted
    return "layer_major" if loads else "batch_major"
