"""Calls of modules as their hooks see them: whether one is still running, and the tensors that go in and out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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


def _find_tensors(value: Any, depth: int, found: dict[int, Tensor]) -> None:
    """Adds the tensors that require a gradient in what a module was given or returned, parameters apart."""
    if type(value) is Tensor:  # as a rule; isinstance with a parameter's class takes long
        if value.requires_grad:
            found[id(value)] = value
    elif isinstance(value, Tensor):
        if not isinstance(value, nn.Parameter) and value.requires_grad:
            found[id(value)] = value
    elif value is None or isinstance(value, (str, bytes, int, float, bool)) or depth == 0:
        return
    elif isinstance(value, (dict, Mapping)):
        for item in value.values():
            _find_tensors(item, depth - 1, found)
    elif isinstance(value, (tuple, list, set, frozenset)):
        for item in value:
            _find_tensors(item, depth - 1, found)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            _find_tensors(getattr(value, field.name, None), depth - 1, found)
    else:
        leaves = tree_leaves(value)  # knows containers that were registered with it
        if len(leaves) != 1 or leaves[0] is not value:
            _find_tensors(leaves, depth - 1, found)


def distinct_tensors(value: Any) -> list[Tensor]:
    """Each tensor once that requires a gradient and is no parameter."""
    found: dict[int, Tensor] = {}
    _find_tensors(value, _DEPTH, found)
    return list(found.values())


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
