"""The micro-batches of one optimizer step: how each is called, what its loss is, and in which order they run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from offload.residency import Residency
from offload.schedule.layer_major import LayerMajor

if TYPE_CHECKING:
    from offload.binding import Binding

LossFn = Callable[[Any, Any], Any]


class MicroBatches:
    """Forward and backward of one micro-batch at a time, by index, in any order.

    `forward(*args, **kwargs)` and `backward(loss)` are the engine's, `seed(k)` sets the global generators for
    micro-batch k, and `begins(k)` is called before it. A `loss_fn` may give a loss, or a pair of a sum of losses and a
    number of target tokens.
    """

    def __init__(
        self,
        batches: Sequence[Any],
        loss_fn: LossFn | None,
        *,
        forward: Callable[..., Any],
        backward: Callable[[Tensor], None],
        seed: Callable[[int], None],
        begins: Callable[[int], None] | None = None,
    ) -> None:
        self._batches, self._loss_fn, self._begins = batches, loss_fn, begins
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
        if self._begins is not None:
            self._begins(k)
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

    def tokens(self) -> int | None:
        """What the gradients are to be divided by: the number of target tokens where they are counted, else 1; None as
        long as it is not known.
        """
        if len(self._tokens) < len(self._batches):
            return None
        return sum(count or 0 for count in self._tokens.values()) or 1

    @property
    def counted(self) -> bool:
        """Whether target tokens are counted, as far as is known."""
        return any(count is not None for count in self._tokens.values())

    def sums(self) -> tuple[float, int]:
        """(sum of losses, number of target tokens) where they are counted, as far as they are known: the loss of a
        micro-batch is read after its backward.
        """
        losses = sum(self._losses.get(k, 0.0) for k in range(len(self._batches)))
        return losses, sum(n or 0 for n in self._tokens.values())

    def result(self) -> tuple[float, int]:
        """(mean loss, 1) or, with token counts, (mean loss over all tokens, their number)."""
        total = 0.0
        for k in range(len(self._batches)):
            total += self._losses[k]
        tokens = sum(count or 0 for count in self._tokens.values())
        return (total / tokens, tokens) if tokens else (total, 1)


class Runner:
    """Runs the micro-batches of an engine's steps. `wanted`: `schedule.micro_batch_order`."""

    def __init__(self, module: nn.Module, binding: Binding, residency: Residency, wanted: str) -> None:
        self._module, self._binding, self._residency, self._wanted = module, binding, residency, wanted

    def order(self, count: int | None = None) -> str:
        """`layer_major` or `batch_major`, for so many micro-batches."""
        if count is not None and count < 2:
            return "batch_major"
        if self._wanted != "auto":
            return self._wanted
        # Where nothing is brought to the device for its use, there is nothing to share.
        return "layer_major" if any(unit.load_bytes for unit in self._residency.units) else "batch_major"

    def run(self, work: MicroBatches) -> tuple[float, int]:
        """All micro-batches; returns `work.result()`."""
        with without_cache(self._module):
            if self.order(len(work)) == "layer_major":
                self._run_layer_major(work)
            else:
                for k in range(len(work)):
                    work.run(k)
        return work.result()

    def _run_layer_major(self, work: MicroBatches) -> None:
        binding = self._binding
        visitor = LayerMajor(self._residency, len(work), before_pass=binding.pause, after_pass=binding.resume)
        binding.visitor = visitor
        try:
            visitor.run(work.run, self._residency.memory.device.torch_device.type)
        finally:
            binding.visitor = None
            self._residency.drop_prefetched()
            self._residency.let_go()

    def plain_call(self) -> AbstractContextManager[None]:
        """What has to be in force in a call of the model outside `run`."""
        activations = self._binding.activations
        lets_go = activations is not None and activations.explicit and torch.is_grad_enabled() and self._module.training
        return without_cache(self._module) if lets_go else nullcontext()


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Models of transformers build no key-value cache within the context: training has no use for it, and a forward
    that is repeated would append to it twice.
    """
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    found = [c for c in configs.values() if getattr(c, "use_cache", None) is True]
    for config in found:
        config.use_cache = False
    try:
        yield
    finally:
        for config in found:
            config.use_cache = True
