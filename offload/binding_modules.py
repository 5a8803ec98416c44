"""What the modules below a root hold beside offloaded weights, and how it is put back for a forward that is repeated.

A forward may depend on attributes, buffers, training modes, generators that a module owns, on what stands in the place
of a parameter (`torch.func.functional_call`) and on which parameters require gradients. Any of these may be another one
by the time of the backward: set by the forward itself (a counter, a state that is carried on), or by whoever called it.
What was put in another's place is put back for the repetition. What was written to in place cannot be.

[Note: no chains] A value of this step may lead, through a graph, to what the step before noted. So nothing is held that
may hold a graph: tensors with one are held detached, other objects weakly.
"""

from __future__ import annotations

import contextlib
import enum
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from offload.parameters import ParameterRecord, record_of

_OWN = frozenset(nn.Module().__dict__)
_SIMPLE = (bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, torch.Size, type, type(None))
_CODE = (types.FunctionType, types.BuiltinFunctionType, torch.Generator)
_CONTAINERS = (list, dict, set, frozenset, tuple, deque)


class _Held:
    """One value: whether another is the same, and what to put in its place."""

    __slots__ = ("_items", "_keys", "_kind", "_ref", "_value")

    def __init__(self, value: Any) -> None:
        self._kind, self._items = type(value), None
        self._keys: list[Any] | None = None
        self._ref: Callable[[], Any] | None = None
        self._value: Any = value
        if isinstance(value, Tensor):
            if value.grad_fn is not None:
                self._ref, self._value = weakref.ref(value), value.detach().requires_grad_()
        elif type(value) in _CONTAINERS:
            self._keys = list(value) if isinstance(value, dict) else None
            self._items, self._value = [_Held(item) for item in _items(value)], None
        elif not isinstance(value, (*_SIMPLE, *_CODE)):
            with contextlib.suppress(TypeError):
                self._ref, self._value = weakref.ref(value), None

    def same(self, value: Any) -> bool:
        if self._items is not None:
            found = list(_items(value)) if type(value) is self._kind else []
            return (
                type(value) is self._kind
                and len(found) == len(self._items)
                and (self._keys is None or self._keys == list(value))
                and all(held.same(item) for held, item in zip(self._items, found, strict=True))
            )
        known = self._value if self._ref is None else self._ref()
        return known is value or (type(value) is self._kind and isinstance(value, _SIMPLE) and bool(known == value))

    def value(self, now: Any) -> Any:
        """The value; `now` where it is not there any more."""
        if self._items is not None:
            items = [held.value(None) for held in self._items]
            return dict(zip(self._keys, items, strict=True)) if self._keys is not None else self._kind(items)
        if self._value is None and self._ref is not None:
            found = self._ref()
            return now if found is None else found
        return self._value

    @property
    def lasting(self) -> bool:
        """Whether the value is there as long as this is."""
        if self._items is not None:
            return all(held.lasting for held in self._items)
        return self._value is not None or self._ref is None


def _items(container: Any) -> Any:
    return container.values() if isinstance(container, dict) else container


class _Table:
    """A dictionary of a module, as it was."""

    __slots__ = ("_fixed", "_now", "_then")

    def __init__(self, now: dict[str, Any], fixed: frozenset[str] = frozenset()) -> None:
        self._now, self._fixed = now, fixed
        self._then = {key: _Held(value) for key, value in now.items() if key not in fixed}

    def changed(self) -> list[str]:
        """Keys of values that are others than they were, came or went."""
        keys = [key for key, held in self._then.items() if key not in self._now or not held.same(self._now[key])]
        if len(self._now) - len(self._fixed) != len(self._then) - sum(key not in self._now for key in keys):
            keys += [key for key in self._now if key not in self._then and key not in self._fixed]
        return keys

    def lost(self, keys: Sequence[str]) -> bool:
        """Whether one of them cannot be put back."""
        return any(key in self._then and not self._then[key].lasting for key in keys)

    def restore(self, stack: contextlib.ExitStack) -> None:
        """Puts back what is changed, until `stack` is left."""
        for key in self.changed():
            if key in self._now:
                stack.callback(self._now.__setitem__, key, self._now[key])
            else:
                stack.callback(self._now.pop, key, None)
            if key in self._then:
                self._now[key] = self._then[key].value(self._now.get(key))
            else:
                del self._now[key]


class ModuleState:
    """The state of `modules`, and of the parameters in `records`, at the moment it is made."""

    __slots__ = ("_attributes", "_buffers", "_containers", "_generators", "_graded", "_tensors", "_training")

    def __init__(self, modules: Sequence[nn.Module], records: Sequence[ParameterRecord]) -> None:
        self._training = [(module, module.training) for module in modules]
        self._attributes: list[_Table] = []
        self._buffers: list[_Table] = []
        self._tensors: list[tuple[str, Tensor, int]] = []
        self._containers: list[tuple[str, Any, _Held]] = []
        self._generators: dict[int, tuple[torch.Generator, Tensor]] = {}
        for module in modules:
            for table in (module._parameters, module._buffers):
                if table:
                    self._buffers.append(_Table(table))
                    self._note(table, frozenset())
            self._attributes.append(_Table(module.__dict__, _OWN))
            self._note(module.__dict__, _OWN)
        with torch._C.DisableTorchFunctionSubclass():
            self._graded = [(record.parameter, record.parameter.requires_grad) for record in records]

    def _note(self, table: dict[str, Any], fixed: frozenset[str]) -> None:
        for key, value in table.items():
            if key in fixed or value is None:
                continue
            if isinstance(value, Tensor):
                if record_of(value) is None and not value.is_inference():
                    held = value.detach() if value.grad_fn is not None else value  # shares the version
                    self._tensors.append((key, held, held._version))
            elif type(value) in _CONTAINERS:
                self._containers.append((key, value, _Held(value)))
            elif isinstance(value, torch.Generator):
                self._generators[id(value)] = value, value.get_state()

    def written(self) -> str | None:
        """The name of a buffer or an attribute that was written to in place since then."""
        for key, tensor, version in self._tensors:
            if tensor._version != version:
                return key
        return next((key for key, value, held in self._containers if not held.same(value)), None)

    def settled(self) -> bool:
        """At the end of a forward: whether it left buffers alone, and attributes so that they can be put back."""
        if self.written() is not None or any(table.changed() for table in self._buffers):
            return False
        self._containers.clear()
        return not any(table.lost(keys) for table in self._attributes if (keys := table.changed()))

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Within the context everything that was replaced since then is as it was."""
        with contextlib.ExitStack() as stack:
            for module, mode in self._training:
                if module.training != mode:
                    stack.callback(setattr, module, "training", module.training)
                    module.training = mode
            for table in (*self._buffers, *self._attributes):
                table.restore(stack)
            for generator, state in self._generators.values():
                stack.callback(generator.set_state, generator.get_state())
                generator.set_state(state)
            for parameter, graded in self._graded:
                with torch._C.DisableTorchFunctionSubclass():
                    now = parameter.requires_grad
                if now != graded:
                    stack.callback(_set_graded, parameter, now)
                    _set_graded(parameter, graded)
            yield


def _set_graded(parameter: nn.Parameter, graded: bool) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        parameter.requires_grad_(graded)
