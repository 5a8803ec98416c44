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

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from offload.errors import OffloadError
from offload.held import METADATA, RECORD, HeldGradient, HeldTensor, names_meta, written
from offload.layout import Slot


class ParameterHost(Protocol):
    """What the engine does for its parameters."""

    def access(
        self, records: Iterable[ParameterRecord], *, modified: Iterable[ParameterRecord] = ()
    ) -> AbstractContextManager[None]:
        """Full values in place; changes made in place to the `modified` ones reach the resting planes at exit."""

    def read_weight(self, record: ParameterRecord) -> Tensor: ...

    gradient_round: int
    """Grows whenever all gradients are let go."""

    def holds_gradient(self, record: ParameterRecord) -> bool: ...

    def held_gradient(self, record: ParameterRecord, *, to_edit: bool = False) -> Tensor | None: ...

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
    position: int = 0
    """Among the parameters of its flat."""
    version: int = 0
    """The parameter's autograd version when its unit was last bound; a difference reveals a write in place."""
    stub: Tensor = field(default_factory=lambda: torch.empty(0))
    replaced: int = 0
    """How often its memory was put back after `.data` was replaced; with `_version` it tells values apart."""
    gradient: int = 0
    """Grows whenever the parameter's `.grad` is another one."""
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


def record_of(parameter: object) -> ParameterRecord | None:
    """The record of an offloaded parameter, or None."""
    try:
        return parameter.__dict__.get(RECORD)
    except AttributeError:
        return None


_FORBIDDEN = frozenset(("set_", "resize_", "resize_as_", "share_memory_", "swap_tensors", "rename_"))


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
        if name in METADATA or func is torch.autograd.grad:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        own = record_of(args[0]) if args else None
        if own is not None and isinstance(args[0], OffloadedParameter):
            if name == "stride":
                return torch.empty(own.slot.shape, device="meta").stride(*args[1:], **kwargs)
            if name == "is_contiguous":
                return torch.empty(own.slot.shape, device="meta").is_contiguous(**kwargs)
            if name in ("to", "empty_like") and names_meta((*args[1:], kwargs.get("device"))):
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
        changed = {id(t) for t in written(func, args, kwargs)}
        with ExitStack() as stack:
            for host in {id(r.host): r.host for r in records}.values():
                own_records = [r for r in records if r.host is host]
                stack.enter_context(
                    host.access(own_records, modified=[r for r in own_records if id(r.parameter) in changed])
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
            return HeldGradient.of(parameter) if record.host.holds_gradient(record) else None
        value = args[1] if kind == "__set__" else None
        if not (isinstance(value, HeldGradient) and value.parameter is parameter):  # p.grad *= 2 ends with that
            record.gradient += 1
            record.host.replace_gradient(record, value)
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
            "refused; set device and precision in the configuration, change values under engine.gathered(modify=True); "
            "for another shape put a new module in its place and call engine.adopt()"
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
