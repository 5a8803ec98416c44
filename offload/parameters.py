"""What a parameter is while the engine holds its memory.

[Note: two classes] Inside its unit's forward an offloaded parameter is a plain `nn.Parameter` whose data is a view of
the unit's leased buffer: compute, autograd and `torch.compile` see nothing unusual and pay nothing. Everywhere else its
Python class is `OffloadedParameter` (the object and its autograd state stay the same; only `__class__` changes) and its
data is a zero-stride stub of the right shape filled with NaN (or its place in a plane that rests there). The class
intercepts every use through `__torch_function__`: metadata is answered from the stub, `.grad` from the engine, and any
operation first acquires the unit, so a stub's value cannot reach a result. Writes in place are carried through to the
resting planes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from offload.errors import GradientError, OffloadError
from offload.layout import Slot


class ParameterHost(Protocol):
    """What the engine does for its parameters."""

    def access(
        self, records: Iterable[ParameterRecord], *, modified: Iterable[ParameterRecord] = ()
    ) -> AbstractContextManager[None]:
        """Full values in place; changes made in place to the `modified` ones reach the resting planes at exit."""

    def read_weight(self, record: ParameterRecord) -> Tensor: ...

    def held_gradient(self, record: ParameterRecord) -> Tensor | None: ...

    def replace_gradient(self, record: ParameterRecord, value: Tensor | None) -> None: ...

    def unfrozen(self, record: ParameterRecord) -> None:
        """`requires_grad` of a parameter is True now; raises if it cannot be trained."""


@dataclass(slots=True, eq=False)
class ParameterRecord:
    """One offloaded parameter: where it lives in its unit's flats."""

    name: str
    parameter: nn.Parameter
    unit: int
    flat: int
    slot: Slot
    host: ParameterHost
    version: int = 0
    """The parameter's autograd version when its unit was last bound; a difference reveals a write in place."""
    stub: Tensor = field(default_factory=lambda: torch.empty(0))
    watched: bool = False
    """Whether gradients that accumulate into the parameter are collected."""
    saved: Any = None
    """What last stood for the parameter in what autograd saves."""

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _nothing, ()  # a copied or pickled parameter is an ordinary one

    def __deepcopy__(self, memo: object) -> None:
        return None


def _nothing() -> None:
    return None


RECORD = "_offload_record"


def record_of(parameter: object) -> ParameterRecord | None:
    """The record of an offloaded parameter, or None."""
    try:
        return parameter.__dict__.get(RECORD)
    except AttributeError:
        return None


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
    """A copy of a gradient or of a weight that the engine holds, in a place where torch has the memory itself.

    Results of operations are plain tensors. What shares the copy's memory (views, arrays) is as read-only as it is:
    writes in place are refused, because they would be lost. Copied and pickled it is a plain tensor.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.__repr__ or getattr(func, "__name__", "") == "requires_grad_":
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        for target in _written(func, args, kwargs):
            if isinstance(target, HeldTensor):
                raise GradientError(
                    "an in-place change of a copy of an offloaded parameter's .grad, .data or detached value would be "
                    "lost: use engine.clip_grad_norm_ for clipping, parameter.grad = tensor to replace a gradient, "
                    "engine.gathered(modify=True) to change weights, and clone() for a copy of your own"
                )
        with torch._C.DisableTorchFunctionSubclass():
            held = {a.untyped_storage()._cdata for a in tree_leaves((args, kwargs)) if isinstance(a, HeldTensor)}
            return tree_map(lambda value: _as_held(value, held), func(*args, **kwargs))

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


def _as_held(value: Any, storages: Collection[int]) -> Any:
    """Read-only if it shares one of `storages`, else plain."""
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            return value
        kind = HeldTensor if value.untyped_storage()._cdata in storages else Tensor
        return value if type(value) is kind else value.as_subclass(kind)
    flags = getattr(value, "flags", None)
    if flags is not None and hasattr(flags, "writeable"):
        flags.writeable = False  # an array over the same memory
    return value


_METADATA = frozenset(
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
_FORBIDDEN = frozenset(("set_", "resize_", "resize_as_", "share_memory_", "swap_tensors", "rename_"))


def _names_meta(arguments: Iterable[Any]) -> bool:
    return any(isinstance(a, (str, torch.device)) and str(a).startswith("meta") for a in arguments)


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
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


class OffloadedParameter(nn.Parameter):
    """An offloaded parameter outside its unit's forward and backward, see [Note: two classes]."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__", "__delete__"):
            return _attribute(name, func, args)
        if name == "requires_grad_":
            _set_requires_grad(args[0], bool((args[1:] or tuple(kwargs.values()) or (True,))[0]))
            return args[0]
        if name in _METADATA or func is torch.autograd.grad:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        own = record_of(args[0]) if args else None
        if own is not None and isinstance(args[0], OffloadedParameter):
            if name == "stride":
                return torch.empty(own.slot.shape, device="meta").stride(*args[1:], **kwargs)
            if name == "is_contiguous":
                return torch.empty(own.slot.shape, device="meta").is_contiguous(**kwargs)
            if name in ("to", "empty_like") and _names_meta((*args[1:], kwargs.get("device"))):
                # Module.to("meta") would put new, empty parameters into the module.
                raise OffloadError(f"{own.name}: its memory belongs to the engine, so it cannot go to the meta device")
            if name == "detach":
                return own.host.read_weight(own).as_subclass(HeldTensor)
        if name in _FORBIDDEN:
            raise OffloadError(
                f"{own.name if own else 'an offloaded parameter'}: {name} would detach it from the engine "
                "that holds its memory"
            )
        offloaded = [p for p in tree_leaves((args, kwargs)) if isinstance(p, OffloadedParameter)]
        records = [r for r in map(record_of, offloaded) if r is not None]
        if not records:
            raise OffloadError(
                "this parameter belonged to an engine that is closed; export or gather weights before engine.close()"
            )
        written = {id(t) for t in _written(func, args, kwargs)}
        with ExitStack() as stack:
            for host in {id(r.host): r.host for r in records}.values():
                own_records = [r for r in records if r.host is host]
                stack.enter_context(
                    host.access(own_records, modified=[r for r in own_records if id(r.parameter) in written])
                )
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.detach().clone(), self.requires_grad).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        record = record_of(self)
        where = "closed engine" if record is None else record.name
        facts = f"shape={tuple(self.shape)}, dtype={self.dtype}, requires_grad={self.requires_grad}"
        return f"OffloadedParameter({where}, {facts})"


def _set_requires_grad(parameter: Tensor, wanted: bool) -> None:
    """As torch does it; the engine makes room for the state of a parameter that was frozen until now."""
    record = record_of(parameter)
    with torch._C.DisableTorchFunctionSubclass():
        before = parameter.requires_grad
        parameter.requires_grad_(wanted)
    if record is not None and wanted and not before:
        try:
            record.host.unfrozen(record)
        except BaseException:
            with torch._C.DisableTorchFunctionSubclass():
                parameter.requires_grad_(before)
            raise


def _attribute(kind: str, func: Any, args: Any) -> Any:
    attribute = func.__self__.__name__
    parameter = args[0]
    record = record_of(parameter)
    if attribute == "grad" and record is not None:
        if kind == "__get__":
            held = record.host.held_gradient(record)
            return None if held is None else held.as_subclass(HeldTensor)
        record.host.replace_gradient(record, args[1] if kind == "__set__" else None)
        return None
    if attribute == "data":
        if record is None:
            raise OffloadError(
                "this parameter belonged to an engine that is closed; export or gather weights before engine.close()"
            )
        if kind == "__get__":
            return record.host.read_weight(record).as_subclass(HeldTensor)
        if args[1] is parameter:
            return None  # module.to() with the device and dtype that it has already
        raise OffloadError(
            f"{record.name}: its memory belongs to the engine, so .to(), .half() and other changes of .data are "
            "refused; set device and precision in the configuration, change values under engine.gathered(modify=True)"
        )
    if attribute == "requires_grad" and kind == "__set__":
        return _set_requires_grad(parameter, bool(args[1]))
    if kind == "__get__" and attribute in ("T", "mT", "H", "mH", "real", "imag"):
        if record is None:
            raise OffloadError(
                "this parameter belonged to an engine that is closed; export or gather weights before engine.close()"
            )
        with record.host.access([record]):
            return func(*args)
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args)
