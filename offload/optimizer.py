"""The optimizer that users see: a real `torch.optim.Optimizer` over the real parameters, whose step is the engine's."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from offload.engine import Engine


class EngineOptimizer(torch.optim.Optimizer):
    """Hyperparameters per group, as schedulers and trainers expect them; moments live in the engine's planes.

    Read moments with `engine.named_full_states()` or `engine.get_full(name, kind)`; `state_dict()` holds the groups
    only.
    """

    def __init__(self, engine: Engine, groups: Iterable[Any], defaults: dict[str, Any]) -> None:
        self._engine = weakref.ref(engine)
        super().__init__(groups, defaults)

    def _owner(self) -> Engine:
        engine = self._engine()
        if engine is None:
            raise RuntimeError("the engine of this optimizer is gone")
        return engine

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The engine's step. With a closure, which must run the backward, its result is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._owner().step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets gradients; with offloaded parameters they are always set to None."""
        self._owner().zero_grad()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        engine = self._engine()
        if engine is not None and getattr(engine, "_ready", False):
            raise ValueError(
                "parameter groups cannot be added after offload.initialize; pass all of them as param_groups"
            )
        super().add_param_group(param_group)

    def __reduce__(self) -> Any:
        raise TypeError("an EngineOptimizer cannot be pickled: it belongs to a running engine")


def default_groups(parameters: Iterable[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    """One group of every parameter that requires a gradient."""
    return [{"params": [p for _, p in parameters if p.requires_grad]}]
