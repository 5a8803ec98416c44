"""Calls of modules as their hooks see them: whether one is still running, and the tensors that go in and out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

_CALL = nn.Module._call_impl.__code__
_DEPTH = 6
"""Levels of containers within which tensors are looked for."""


def _inert(*_args: Any, **_kwargs: Any) -> None:
    return None


class RootHook:
    """A module hook that a copied or pickled model leaves behind as an inert one."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __deepcopy__(self, memo: object) -> Callable[..., None]:
        return _inert

    def __reduce__(self) -> str | tuple[Any, ...]:
        return _resolve_inert, ()


def _resolve_inert() -> Callable[..., None]:
    return _inert


def _tensors(value: Any, depth: int = _DEPTH) -> Iterator[Tensor]:
    """The tensors that require a gradient in what a module was given or returned, parameters apart."""
    if isinstance(value, Tensor):
        if not isinstance(value, nn.Parameter) and value.requires_grad:
            yield value
    elif value is None or isinstance(value, (str, bytes, int, float, bool)) or depth == 0:
        return
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item, depth - 1)
    elif isinstance(value, (tuple, list, set, frozenset)):
        for item in value:
            yield from _tensors(item, depth - 1)
    elif is_dataclass(value) and not isinstance(value, type):
        for item in fields(value):
            yield from _tensors(getattr(value, item.name, None), depth - 1)
    else:
        leaves = tree_leaves(value)  # knows containers that were registered with it
        if len(leaves) != 1 or leaves[0] is not value:
            yield from _tensors(leaves, depth - 1)


def distinct_tensors(value: Any) -> list[Tensor]:
    """Each tensor once that requires a gradient and is no parameter."""
    return list({id(t): t for t in _tensors(value)}.values())


def module_call(frame: FrameType | None) -> FrameType | None:
    """The call of a module that one of its hooks, in `frame`, runs in."""
    while frame is not None and frame.f_code is not _CALL:
        frame = frame.f_back
    return frame


def on_stack(call: FrameType, top: FrameType | None) -> bool:
    """Whether `call` is `top` or one of its callers."""
    while top is not None:
        if top is call:
            return True
        top = top.f_back
    return False
