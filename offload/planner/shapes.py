"""One step of a model without its numbers: the operations it runs, and the bytes that are alive meanwhile.

Parameters, inputs and everything computed are fake tensors: meta tensors that say which device they would be on, so
that the same kernels are chosen as in the run. Nothing of the model is touched or allocated.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.flop_counter import (
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from offload.errors import OffloadError
from offload.planner.heap import heap_peak
from offload.units import UnitSpec


@dataclass(frozen=True, slots=True)
class TensorShape:
    """A tensor argument: dtype, sizes and strides."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that it addresses, each once."""
        count = 1
        for size, step in zip(self.shape, self.stride, strict=True):
            count *= 1 if step == 0 else size
        return count * self.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """One kind of call: the operator and its arguments, tensors as shapes; `key` is equal for equal calls."""

    function: Any
    arguments: Any
    key: str
    flops: int
    nbytes: int
    """Bytes of arguments and results, each once."""


@dataclass(slots=True, kw_only=True)
class StepShapes:
    """What one micro-batch of a step does.

    `forward` and `backward` count each kind of operation; `forward_by_unit` is the part of forward's FLOPs and bytes
    under each unit's root. `kept`: bytes alive after forward (what autograd saved, outputs); `peak`: the largest number
    at any time, without parameters and their gradients; `boundaries`: bytes of the units' outputs;
    `last`: the units of the root that is left last; `heap`: the most bytes that the heap takes for it all, with what it
    keeps of freed blocks.
    """

    operations: dict[str, Operation] = field(default_factory=dict)
    forward: dict[str, int] = field(default_factory=dict)
    backward: dict[str, int] = field(default_factory=dict)
    forward_by_unit: dict[int, dict[str, int]] = field(default_factory=dict)
    visits: list[list[int]] = field(default_factory=list)
    last: list[int] = field(default_factory=list)
    kept: int = 0
    peak: int = 0
    heap: int = 0
    boundaries: int = 0
    tokens: int = 0

    def flops(self, direction: Mapping[str, int]) -> int:
        """FLOPs of `forward` or `backward` (a multiplication and an addition count as two)."""
        return sum(self.operations[key].flops * count for key, count in direction.items())


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations, and the bytes of storages made while it is on."""

    def __init__(self, shapes: StepShapes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes, self.counts = shapes, shapes.forward
        self.unit: int | None = None
        self.alive = self.peak = 0
        self.events: list[tuple[int, int]] = []
        """Allocations (number, bytes) and their ends (number, -1)."""
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        result = func(*args, **kwargs)
        if not isinstance(func, torch._ops.OpOverload) or func.namespace == "prim":
            return result
        outputs = [t for t in tree_flatten(result)[0] if isinstance(t, Tensor)]
        for tensor in outputs:
            self._watch(tensor)
        if not _is_view(func):
            self._count(func, args, kwargs, result, outputs)
        return result

    def _watch(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._known:
            return
        self._known.add(storage._cdata)
        nbytes = storage.nbytes()
        self.alive += nbytes
        self.peak = max(self.peak, self.alive)
        number = len(self.events)
        self.events.append((number, nbytes))
        weakref.finalize(storage, self._forget, storage._cdata, number, nbytes)

    def _forget(self, key: int, number: int, nbytes: int) -> None:
        self._known.discard(key)
        self.events.append((number, -1))
        self.alive -= nbytes

    def ignore(self, tensor: Tensor) -> None:
        """The storage of `tensor` is not ours to count."""
        self._known.add(tensor.untyped_storage()._cdata)

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any, outputs: Sequence[Tensor]) -> None:
        arguments = tree_map(_shape_of, (args, kwargs))
        key = f"{func} {arguments}"
        if key not in self.shapes.operations:
            flops = _flops(func, args, kwargs, result)
            leaves = [leaf for leaf in tree_flatten(arguments)[0] if isinstance(leaf, TensorShape)]
            nbytes = sum(leaf.nbytes for leaf in leaves) + sum(_shape_of(t).nbytes for t in outputs)
            self.shapes.operations[key] = Operation(func, arguments, key, flops, nbytes)
        self.counts[key] = self.counts.get(key, 0) + 1
        if self.unit is not None and self.counts is self.shapes.forward:
            mine = self.shapes.forward_by_unit.setdefault(self.unit, {})
            mine[key] = mine.get(key, 0) + 1


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """FLOPs of matrix products and attention; 0 for everything else."""
    packet, aten = func.overloadpacket, torch.ops.aten
    # torch counts the accelerators' attention kernels only.
    if packet is aten._scaled_dot_product_flash_attention_for_cpu:
        return int(sdpa_flop_count(*(t.shape for t in args[:3])))  # type: ignore[no-untyped-call]
    if packet is aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return int(sdpa_backward_flop_count(*(t.shape for t in args[:4])))  # type: ignore[no-untyped-call]
    count = flop_registry.get(packet)
    return 0 if count is None else int(count(*args, **kwargs, out_val=result))


def _is_view(func: Any) -> bool:
    if func.overloadpacket is torch.ops.aten._unsafe_view:  # a view that its schema does not admit to
        return True
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _shape_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        return TensorShape(value.dtype, tuple(value.shape), tuple(value.stride()))
    return value


def trace_step(
    model: nn.Module,
    specs: Sequence[UnitSpec],
    dtypes: Mapping[str, torch.dtype],
    batch: Any,
    *,
    device: torch.device,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    trainable: frozenset[str] | None = None,
) -> StepShapes:
    """Traces forward and backward of one micro-batch.

    Args:
        model: with parameters anywhere, also on the meta device; they and its buffers are not touched.
        specs: the units it is split into.
        dtypes: of each parameter by name, as it computes.
        batch: a dict (keyword arguments), a tuple (arguments) or a tensor; only shapes, dtypes and devices matter.
        loss_fn: as for `Engine.train_batch`.
        trainable: names of the parameters that get gradients; by default all floating-point ones that ask for them.

    Raises:
        OffloadError: the model cannot run without numbers (it reads a value to decide what to do).
        ValueError: no loss is to be found.
    """
    shapes = StepShapes()
    recorder = _Recorder(shapes)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            _run(model, specs, dtypes, batch, fake, recorder, device, loss_fn, trainable)
    except (ValueError, OffloadError):
        raise
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        raise OffloadError(
            f"{type(model).__name__} cannot be traced without its numbers ({type(error).__name__}: {first}); the plan "
            "needs shapes that do not depend on values"
        ) from error
    shapes.peak, shapes.heap = recorder.peak, heap_peak(recorder.events)
    return shapes


def _run(
    model: nn.Module,
    specs: Sequence[UnitSpec],
    dtypes: Mapping[str, torch.dtype],
    batch: Any,
    fake: FakeTensorMode,
    recorder: _Recorder,
    device: torch.device,
    loss_fn: Callable[[Any, Any], Any] | None,
    trainable: frozenset[str] | None,
) -> None:
    shapes = recorder.shapes
    state: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        dtype = dtypes.get(name, parameter.dtype)
        wanted = parameter.requires_grad if trainable is None else name in trainable
        value = torch.empty(parameter.shape, dtype=dtype, device=device).requires_grad_(wanted)
        recorder.ignore(value)
        if wanted:
            value.register_post_accumulate_grad_hook(_drop_gradient)  # type: ignore[no-untyped-call]
        state[name] = value
    for name, buffer in model.named_buffers():
        state[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
        recorder.ignore(state[name])

    def moved(value: Any) -> Any:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)

    leaves, layout = tree_flatten(batch)
    for leaf in leaves:
        if isinstance(leaf, Tensor) and not leaf.is_floating_point():
            shapes.tokens = max(shapes.tokens, leaf.numel())
    inputs = tree_unflatten([moved(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves], layout)
    args, kwargs = _call_of(inputs)
    with _units_noted(specs, recorder), recorder:
        outputs = torch.func.functional_call(model, state, args, kwargs, tie_weights=True)
        loss = getattr(outputs, "loss", None) if loss_fn is None else loss_fn(outputs, inputs)
        loss = loss[0] if isinstance(loss, tuple) else loss
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ValueError(
                f"the plan needs a loss: {'outputs.loss' if loss_fn is None else 'loss_fn'} is {type(loss).__name__}, "
                "not a scalar tensor; give the sample batch labels, or pass loss_fn"
            )
        shapes.kept = recorder.alive
        recorder.counts = shapes.backward
        loss.backward()  # type: ignore[no-untyped-call]


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _call_of(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,), {}


@contextlib.contextmanager
def _units_noted(specs: Sequence[UnitSpec], recorder: _Recorder) -> Iterator[None]:
    """Within the block, the recorder knows the innermost unit whose root is running, and visits are noted."""
    stack: list[int | None] = []
    handles = []
    shapes = recorder.shapes

    def attach(spec: UnitSpec) -> None:
        def before(_module: nn.Module, _args: Any) -> None:
            stack.append(recorder.unit)
            recorder.unit = spec.index
            if recorder.counts is shapes.forward:
                shapes.visits.append([spec.index, *spec.borrows])

        def after(_module: nn.Module, _args: Any, output: Any) -> None:
            recorder.unit = stack.pop() if stack else None
            if recorder.counts is shapes.forward:
                shapes.last = [spec.index, *spec.borrows]
            if recorder.counts is shapes.forward and spec.kind != "container":
                sizes = [_shape_of(t).nbytes for t in tree_flatten(output)[0] if isinstance(t, Tensor)]
                shapes.boundaries += sum(sizes)

        handles.append(spec.root.register_forward_pre_hook(before))
        handles.append(spec.root.register_forward_hook(after))

    for spec in specs:
        attach(spec)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
