"""Units whose activations are not kept: what their forward saved is computed again when the backward needs it.

[Note: recompute] Within such a forward, saved tensors that are no views of unit buffers are numbered and held. When it
has ended well they are let go, and only its inputs are kept, by whoever stores them. The first of them that the
backward asks for runs the unit's forward again, on detached inputs, under the random state and autocast of the first
time, with the modules' modes, buffers and attributes of then, and collects what is saved this time, up to the last one
that is needed. So the numbers are those of the first forward, if that was a function of these; where it wrote to one of
them in place it was not, and what it saved is kept.
"""

from __future__ import annotations

import contextlib
import enum
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from offload.binding_modules import ModuleState
from offload.binding_saved import WrittenInPlace, check_version
from offload.errors import OffloadError, StaleWeightsError
from offload.parameters import ParameterRecord
from offload.randomness import RandomState
from offload.residency import Unit

_PLAIN = frozenset((bool, int, float, complex, str, bytes))  # those hash and compare as everybody expects
_VALUES = (bool, int, float, complex, str, bytes, enum.Enum)
_TORCH_VALUES = (torch.dtype, torch.device, torch.layout, torch.memory_format)


class Stored(Protocol):
    """A tensor that was put away."""

    def prefetch(self) -> None:
        """Begins to bring it back, if there is room for it."""

    def bring(self) -> Tensor:
        """The tensor: detached, with the strides it had."""
        ...


class Enough(Exception):
    """Ends a recompute that has collected everything."""


class _Input:
    """One tensor that a unit was given."""

    __slots__ = ("requires_grad", "stored")

    def __init__(self, stored: Stored, requires_grad: bool) -> None:
        self.stored, self.requires_grad = stored, requires_grad

    def bring(self) -> Tensor:
        return self.stored.bring().requires_grad_(self.requires_grad)


class Saved:
    """Stands for one saved tensor of a visit."""

    __slots__ = ("_index", "_visit")

    def __init__(self, visit: Visit, index: int) -> None:
        self._visit, self._index = visit, index

    def value(self) -> Tensor:
        """The tensor, from the forward or from its repetition."""
        return self._visit.value(self._index)


class _Again:
    """A tensor that a repeated forward saved."""

    __slots__ = ("_value", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._value, self._version = tensor.detach(), tensor._version

    def value(self) -> Tensor:
        return check_version(self._value, self._version)


class Root:
    """A module whose activations may be computed again, with what a recompute has to put back."""

    def __init__(self, module: nn.Module, units: Sequence[Unit]) -> None:
        self.module, self.units = module, units
        self.hook: Any = None
        """The first pre-forward hook, unless somebody put another before it."""
        self.modules = list(module.modules())
        self.repeatable = True
        """Whether its forward was a function of its inputs so far."""
        self.sizes: dict[Any, int] = {}
        """The most bytes that a forward with inputs of these `signature`s kept alive, the latest last."""

    def sees_everything(self) -> bool:
        """Whether what our hook was given is what a call of the module would give to it again."""
        own = next(iter(self.module._forward_pre_hooks.values()), None) is self.hook
        return own and not torch.nn.modules.module._global_forward_pre_hooks  # those run before all others

    def records(self) -> list[ParameterRecord]:
        return [record for unit in self.units for record in unit.records]


def repeatable_arguments(arguments: Any) -> tuple[list[Any], TreeSpec] | None:
    """Leaves and structure of what a unit is given; None if something in it may change when it is used."""
    leaves, spec = tree_flatten(arguments)
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if type(leaf) not in (Tensor, nn.Parameter) and not isinstance(leaf, nn.Parameter):
                return None
            if leaf.layout is not torch.strided or leaf.is_nested or leaf.is_inference():
                return None
        elif leaf is not None and not isinstance(leaf, (*_VALUES, *_TORCH_VALUES)):
            return None
    return leaves, spec


def signature(value: Any) -> Any:
    """What the number of bytes that a forward saves depends on as a rule: shapes and dtypes of tensors, and other
    values themselves. None for what is nothing of that kind, which no signature holds.
    """
    if isinstance(value, Tensor):
        # Only some nested tensors have a shape.
        return None if value.is_nested else (value.shape, value.dtype, value.requires_grad)
    if value is None:
        return ()
    if type(value) in _PLAIN:
        return value
    if isinstance(value, (tuple, list, dict)):
        items = value.items() if isinstance(value, dict) else value
        found = tuple([signature(item) for item in items])
        return None if None in found else found
    return None


def _storages(tensors: Sequence[Tensor]) -> dict[int, int]:
    """Bytes by storage."""
    found = {}
    for tensor in tensors:
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return found


def _autocast_state() -> list[tuple[str, bool, torch.dtype]]:
    kinds = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    return [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]


class Visit:
    """One forward of a root that is not kept. Only the graph holds it, by its `Saved`s.

    `again(visit, call)` runs `call` with the binding's hooks collecting for the visit.
    """

    __slots__ = (
        "__weakref__",
        "_again",
        "_autocast",
        "_collected",
        "_inputs",
        "_leaves",
        "_lock",
        "_random",
        "_shapes",
        "_spec",
        "_state",
        "_values",
        "_versions",
        "previous",
        "root",
        "signature",
    )

    def __init__(
        self,
        root: Root,
        leaves: list[Any],
        spec: TreeSpec,
        again: Callable[[Visit, Callable[[], Any]], None],
        signature: Any = None,
    ) -> None:
        self.root, self._again, self._spec, self.signature = root, again, spec, signature
        self.previous: weakref.ref[Visit] | None = None
        """The visit before it, whose backward comes after it."""
        self._leaves: list[Any] = leaves
        self._inputs = [(leaf, leaf._version) for leaf in leaves if isinstance(leaf, Tensor)]
        self._state: ModuleState | None = ModuleState(root.modules, root.records())
        self._random = RandomState.take()
        self._autocast = _autocast_state()
        self._versions = self._weight_versions()
        self._values: list[tuple[Tensor, int]] | None = []
        self._shapes: list[tuple[torch.Size, torch.dtype]] = []
        """Of what the forward saved, once it is let go."""
        self._collected: list[_Again | None] | None = None
        self._lock = threading.RLock()

    def _weight_versions(self) -> list[int]:
        with torch._C.DisableTorchFunctionSubclass():
            return [record.parameter._version + record.replaced for record in self.root.records()]

    # The first forward

    def pack(self, tensor: Tensor) -> Saved:
        """Numbers a saved tensor."""
        assert self._values is not None
        self._values.append((tensor.detach(), tensor._version))
        return Saved(self, len(self._values) - 1)

    def saved_bytes(self) -> int:
        """Bytes that the forward saved beyond its inputs."""
        own = _storages([leaf for leaf, _ in self._inputs])
        saved = _storages([value for value, _ in self._values or ()])
        return sum(nbytes for key, nbytes in saved.items() if key not in own)

    def input_bytes(self) -> int:
        """Bytes of the inputs."""
        return sum(_storages([leaf for leaf, _ in self._inputs]).values())

    def unchanged(self) -> bool:
        """Whether inputs and buffers are as they were before the forward, and attributes can be put back."""
        assert self._state is not None
        return all(leaf._version == version for leaf, version in self._inputs) and self._state.settled()

    def keep(self) -> None:
        """What the forward saved stays."""
        self._inputs.clear()
        self._state = None
        self._leaves.clear()

    def let_go(self, store: Callable[[Tensor], Stored]) -> None:
        """Only the inputs stay, where `store` puts them."""
        self._leaves = [
            _Input(store(leaf), leaf.requires_grad)
            if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter)
            else leaf
            for leaf in self._leaves
        ]
        self._shapes = [(value.shape, value.dtype) for value, _ in self._values or ()]
        self._values = None
        self._inputs.clear()

    # The backward

    def prefetch(self) -> None:
        """Begins to bring the inputs back."""
        if self._values is None and self._collected is None:
            for leaf in self._leaves:
                if isinstance(leaf, _Input):
                    leaf.stored.prefetch()

    def value(self, index: int) -> Tensor:
        """The saved tensor of that number."""
        with self._lock:
            if self._values is not None:
                return check_version(*self._values[index])
            if self._collected is None or self._collected[index] is None:
                self._recompute()
            assert self._collected is not None
            found = self._collected[index]
            assert found is not None
            self._collected[index] = None  # autograd asks once for each; who asks again waits for another recompute
            if not any(self._collected):
                self._collected = None
            return found.value()

    def drop(self) -> None:
        """Forgets what was collected and not asked for."""
        with self._lock:
            self._collected = None

    def collect(self, tensor: Tensor) -> _Again:
        """Takes the next saved tensor of a recompute."""
        collected = self._collected
        assert collected is not None
        value = _Again(tensor)
        index = len(collected)
        if index < len(self._shapes):
            if self._shapes[index] != (tensor.shape, tensor.dtype):
                shape, dtype = self._shapes[index]
                raise self._differs(
                    f"saved tensor {index} was {tuple(shape)} {dtype}, and is {tuple(tensor.shape)} {tensor.dtype} now"
                )
            collected.append(value)
            if len(collected) == len(self._shapes):
                raise Enough
        return value

    def _differs(self, what: str) -> OffloadError:
        return OffloadError(
            f"unit {self.root.units[0].name}: its forward is not the same the second time ({what}), so that its "
            "activations cannot be recomputed; set placement.activations = 'keep'"
        )

    def _recompute(self) -> None:
        if self._weight_versions() != self._versions:
            raise StaleWeightsError(
                f"unit {self.root.units[0].name}: a value changed after the forward whose backward is running (by "
                "step(), gathered(modify=True) or a write in place); run the forward again"
            )
        assert self._state is not None
        written = self._state.written()
        if written is not None:
            raise self._differs(f"{written} was written to in between")
        self._collected = []
        now = RandomState.take()
        try:
            with self._state.restored():
                self._random.restore()
                self._again(self, self._call)
            if len(self._collected) != len(self._shapes):
                raise self._differs(f"{len(self._shapes)} tensors were saved, and {len(self._collected)} now")
        except BaseException:
            self._collected = None
            raise
        finally:
            now.restore()

    def _call(self) -> None:
        try:
            leaves = [leaf.bring() if isinstance(leaf, _Input) else leaf for leaf in self._leaves]
        except WrittenInPlace as error:
            raise self._differs("one of its inputs was written to in between") from error
        args, kwargs = tree_unflatten(leaves, self._spec)
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            for kind, enabled, dtype in self._autocast:
                if enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            with contextlib.suppress(Enough):
                self.root.module(*args, **kwargs)
