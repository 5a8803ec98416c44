"""What stands where torch would show its own memory: copies of weights that are read-only, and gradients.

[Note: gradients] `parameter.grad` of an offloaded parameter is a `HeldGradient`: it has the shape and dtype of the
gradient and no memory of its own. Any operation first reads the gradient from where it rests, one parameter at a time,
and what an operation in place makes of it goes back there. So loops written for torch (clipping, noise, editing)
work on gradients of any size, and see later contributions as they would in torch. Once the engine lets the gradient go
the object is of no use any more and says so.

A gradient that has come once and in its parameter's dtype is edited in that dtype, as torch does it; a sum, and one
under a loss scale, in the accumulation dtype, so that editing costs no bits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from offload.errors import GradientError

if TYPE_CHECKING:
    from offload.parameters import ParameterRecord

RECORD = "_offload_record"
"""The attribute of an offloaded parameter that holds its record."""


def make_stub(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of the right shape in one element of memory that is loud when read: NaN, or the dtype's minimum."""
    if dtype.is_floating_point or dtype.is_complex:
        value: Any = float("nan")
    elif dtype is torch.bool:
        value = False
    else:
        value = torch.iinfo(dtype).min
    # One scalar per parameter: tools that find tied weights by address must not take all stubs for one.
    return torch.full((), value, dtype=dtype, device=device).expand(shape)


class HeldTensor(torch.Tensor):
    """A copy of what the engine holds, in a place where torch has the memory itself.

    Results of operations are plain tensors. What shares the copy's memory (views, arrays) is as read-only as it is:
    writes in place are refused, because they would be lost. Copied and pickled it is a plain tensor.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.__repr__ or getattr(func, "__name__", "") == "requires_grad_":
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        for target in written(func, args, kwargs):
            if isinstance(target, HeldTensor):
                raise GradientError(
                    "an in-place change of a copy of an offloaded parameter's .data or detached value, or of a view of "
                    "its gradient, would be lost: change .grad itself, weights in engine.gathered(modify=True), and "
                    "clone() for a copy of your own"
                )
        with torch._C.DisableTorchFunctionSubclass():
            held = {a.untyped_storage()._cdata for a in tree_leaves((args, kwargs)) if isinstance(a, HeldTensor)}
            if all(kind in _PLAIN for kind in types):
                return tree_map(lambda value: _as_held(value, held), func(*args, **kwargs))
            args, kwargs = tree_map(_as_plain, (args, kwargs))
        # The others know best what they are.
        result = func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return tree_map(lambda value: _as_held(value, held), result)

    @property
    def _is_param(self) -> bool:
        return False

    @_is_param.setter
    def _is_param(self, value: bool) -> None:
        # nn.Parameter(held), as load_state_dict(assign=True) makes it: the copy is that parameter's own from now on.
        self.__class__ = nn.Parameter  # type: ignore[assignment]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            memo[id(self)] = self.clone()
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            plain = self.as_subclass(torch.Tensor)
        return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class HeldGradient(torch.Tensor):
    """The gradient of an offloaded parameter, wherever it rests, see [Note: gradients].

    `of` makes one. It holds no memory: its data is a stub.
    """

    parameter: nn.Parameter
    _stamp: tuple[int, int]

    @classmethod
    def of(cls, parameter: nn.Parameter) -> HeldGradient:
        """The gradient that `parameter` has now."""
        with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(False), torch.no_grad():
            shape, dtype, device = tuple(parameter.shape), parameter.dtype, parameter.device
            made = make_stub(shape, dtype, device).as_subclass(cls)
        made.parameter, made._stamp = parameter, _stamp(parameter)
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__", "__delete__"):
            return _gradient_attribute(name, func, args)
        own = args[0] if args and isinstance(args[0], HeldGradient) else None
        if own is not None and name in ("detach", "detach_", "requires_grad_"):
            if name == "requires_grad_" and bool((args[1:] or tuple(kwargs.values()) or (True,))[0]):
                raise GradientError(
                    f"{own._name}: its gradient is the engine's; clone() it to differentiate through it"
                )
            return own
        if name in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if own is not None and name in ("stride", "is_contiguous"):
            return getattr(torch.empty(own.shape, device="meta"), name)(*args[1:], **kwargs)
        edited = {id(t) for t in written(func, args, kwargs)}
        involved = [t for t in tree_leaves((args, kwargs)) if isinstance(t, HeldGradient)]
        edits = {id(t.parameter): t for t in involved if id(t) in edited}
        values = {id(t.parameter): t._value(to_edit=id(t.parameter) in edits) for t in reversed(involved)}
        args, kwargs = tree_map(lambda t: values[id(t.parameter)] if isinstance(t, HeldGradient) else t, (args, kwargs))
        result = func(*args, **kwargs)
        for key, gradient in edits.items():
            gradient._record.host.replace_gradient(gradient._record, values[key])
        with torch._C.DisableTorchFunctionSubclass():
            storages = {value.untyped_storage()._cdata for value in values.values()}
            shown = {id(values[key]): gradient for key, gradient in edits.items()}
            return tree_map(lambda t: shown[id(t)] if id(t) in shown else _as_held(t, storages), result)

    @property
    def _record(self) -> ParameterRecord:
        """Raises GradientError if the gradient has been let go."""
        record: ParameterRecord | None = self.parameter.__dict__.get(RECORD)
        if record is None or _stamp(self.parameter) != self._stamp or not record.host.holds_gradient(record):
            raise GradientError(
                f"{self._name}: this gradient was let go, by step(), zero_grad(), an assignment to .grad or the end "
                "of its engine; clone() one that is needed later"
            )
        return record

    @property
    def _name(self) -> str:
        record: ParameterRecord | None = self.parameter.__dict__.get(RECORD)
        return "an offloaded parameter" if record is None else record.name

    def _value(self, *, to_edit: bool = False) -> Tensor:
        record = self._record
        value = record.host.held_gradient(record, to_edit=to_edit)
        assert value is not None
        return value

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self._value())

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            memo[id(self)] = self._value()
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._value().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


_PLAIN = (Tensor, nn.Parameter, HeldTensor)


def _stamp(parameter: nn.Parameter) -> tuple[int, int]:
    record: ParameterRecord | None = parameter.__dict__.get(RECORD)
    return (-1, -1) if record is None else (record.host.gradient_round, record.gradient)


def _gradient_attribute(kind: str, func: Any, args: Any) -> Any:
    attribute, gradient = func.__self__.__name__, args[0]
    if attribute == "data":
        if kind == "__get__":
            return gradient
        gradient.copy_(args[1])
        return None
    if kind == "__get__" and attribute in ("T", "mT", "H", "mH", "real", "imag"):
        value = gradient._value()
        with torch._C.DisableTorchFunctionSubclass():
            return _as_held(func(value), {value.untyped_storage()._cdata})
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args)


def _as_held(value: Any, storages: Collection[int]) -> Any:
    """Read-only if it shares one of `storages`, else plain."""
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            return value
        if not isinstance(value, HeldTensor) and type(value) is not Tensor:
            return value
        kind = HeldTensor if value.untyped_storage()._cdata in storages else Tensor
        return value if type(value) is kind else value.as_subclass(kind)
    flags = getattr(value, "flags", None)
    if flags is not None and hasattr(flags, "writeable"):
        flags.writeable = False  # an array over the same memory
    return value


def _as_plain(value: Any) -> Any:
    return value.as_subclass(Tensor) if isinstance(value, HeldTensor) else value


METADATA = frozenset(
    [
        "size",
        "dim",
        "numel",
        "nelement",
        "element_size",
        "ndimension",
        "get_device",
        "is_floating_point",
        "is_complex",
        "is_signed",
        "is_inference",
        "is_same_size",
        "has_names",
        "is_shared",
        "data_ptr",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "requires_grad_",
        "retain_grad",
        "_is_view",
        "__hash__",
        "__len__",
        "is_pinned",
        "is_conj",
        "is_neg",
        "is_distributed",
        "__dlpack_device__",
    ]
)
_INPLACE_DUNDERS = frozenset(
    f"__i{op}__"
    for op in [
        "add",
        "sub",
        "mul",
        "truediv",
        "div",
        "floordiv",
        "mod",
        "pow",
        "and",
        "or",
        "xor",
        "lshift",
        "rshift",
        "matmul",
    ]
)


def names_meta(arguments: Iterable[Any]) -> bool:
    return any(isinstance(a, (str, torch.device)) and str(a).startswith("meta") for a in arguments)


def written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The tensors that `func` writes, by torch's naming rules: a trailing underscore, augmented assignment, `out=`,
    `inplace=True`, `.data =`.
    """
    name = getattr(func, "__name__", "")
    targets: list[Any] = list(tree_leaves(kwargs["out"])) if kwargs.get("out") is not None else []
    in_place = (name.endswith("_") and not name.endswith("__")) or name in _INPLACE_DUNDERS or name == "__setitem__"
    in_place |= kwargs.get("inplace") is True or (name == "__set__" and func.__self__.__name__ == "data")
    if in_place and name != "requires_grad_":
        first = args[0] if args else next(iter(kwargs.values()), None)
        targets.extend(first if isinstance(first, (list, tuple)) else [first])
    return targets
