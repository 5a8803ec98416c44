"""Ties a module's forward and backward to leases on its units. The only file that touches autograd.

A unit is leased in its root's forward and rests right after it. Views of unit buffers that autograd saves meanwhile are
packed into handles (unit, generation, offset, shape, stride) and resolved when the backward needs them, which acquires
the unit if it is not resident. Hooks on the outputs acquire a unit as soon as a gradient reaches it, and on its inputs
end the lease; both are only about time and memory: whatever they miss, unpacking makes right.

[Note: graph tasks] Backward leases belong to the outermost running backward of a thread. They end when the gradients of
the unit's inputs exist, or in the callback that autograd runs at the end of that backward. Reentrant checkpointing
starts nested backwards, whose end must not end the leases of the outer one; hence the stack. After an exception
autograd runs no callback: the next outermost forward, `zero_grad` and `step` clear what was left.

[Note: saved tensors of the user] Only the innermost pair of saved-tensor hooks runs, so everything that is not a view
of a unit goes on to the pair that was in force outside (activation checkpointing, activation offload). Hooks also
switch off autograd's version check, so packing records the version and unpacking compares it.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook, saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from offload.errors import OffloadError, StaleWeightsError
from offload.parameters import ParameterRecord
from offload.prefetch import VisitOrder
from offload.residency import Residency, Unit

Pack = Callable[[Tensor], Any]
Unpack = Callable[[Any], Tensor]


class _WeightHandle(NamedTuple):
    """A saved view of a unit's buffer."""

    unit: Unit
    flat: int
    generation: int
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


class _Passed(NamedTuple):
    """Any other saved tensor, as the outer hooks packed it; `source` and `version` are kept where there are none."""

    value: Any
    version: int


class _GraphTask:
    """Leases of one outermost backward; `open` counts it and the backwards nested in it."""

    def __init__(self, thread: int) -> None:
        self.thread, self.open = thread, 0
        self.leases: dict[int, tuple[Unit, set[object]]] = {}


class _Frame(NamedTuple):
    """What a root's forward acquired and has to give back; `root` tells frames of different roots apart."""

    root: object
    units: list[Unit]
    hooks: saved_tensors_hooks | None
    inputs: list[Tensor]


class _Thread(threading.local):
    def __init__(self) -> None:
        self.frames: list[_Frame] = []
        self.tasks: list[int] = []


def _inert(*_args: Any, **_kwargs: Any) -> None:
    return None


class _RootHook:
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


class Binding:
    """Hooks on the roots of an engine's units and on its trainable parameters."""

    def __init__(
        self, residency: Residency, on_gradient: Callable[[ParameterRecord, Tensor], None], prefetch_units: int
    ) -> None:
        self._residency = residency
        self._on_gradient = on_gradient
        self._thread = _Thread()
        self._tasks: dict[int, _GraphTask] = {}
        self._held: list[Unit] = []  # leases that double backward keeps until the step
        self._said_create_graph = False
        self._handles: list[Any] = []
        self._lock = residency.lock
        self.order = VisitOrder(prefetch_units)
        self.on_unit_backward: Callable[[Unit], None] | None = None

    # Attaching

    def attach(self, root: nn.Module, units: Sequence[Unit]) -> None:
        """Leases `units` (the root's own, then those it borrows from) around every forward of `root`."""
        own = list(units)

        def before(_module: nn.Module, args: Any, kwargs: Any) -> None:
            if not torch.compiler.is_compiling():
                self._before_forward(own, args, kwargs)

        def after(_module: nn.Module, _args: Any, _kwargs: Any, output: Any = None) -> None:
            if not torch.compiler.is_compiling():
                self._after_forward(own, output)

        self._handles.append(root.register_forward_pre_hook(_RootHook(before), with_kwargs=True, prepend=True))
        self._handles.append(root.register_forward_hook(_RootHook(after), with_kwargs=True, always_call=True))

    def watch(self, record: ParameterRecord) -> None:
        """Collects every gradient that accumulates into the parameter."""

        def arrived(parameter: Tensor) -> None:
            # The unit may be resting again, in which case `.grad` would be the engine's.
            with torch._C.DisableTorchFunctionSubclass():
                gradient, parameter.grad = parameter.grad, None
            if gradient is not None:
                self._on_gradient(record, gradient)

        with torch._C.DisableTorchFunctionSubclass():
            self._handles.append(record.parameter.register_post_accumulate_grad_hook(arrived))  # type: ignore[no-untyped-call]

    def detach(self) -> None:
        """Removes every hook. Idempotent."""
        while self._handles:
            self._handles.pop().remove()

    # Forward

    def _before_forward(self, units: list[Unit], args: Any, kwargs: Any) -> None:
        if not self._thread.frames and torch._C._current_graph_task_id() == -1:
            self.reset()
        acquired: list[Unit] = []
        try:
            for unit in units:
                self._residency.acquire(unit)
                acquired.append(unit)
            following = self.order.visit(units[0], backward=torch._C._current_graph_task_id() != -1)
            for unit in following:
                self._residency.prefetch(unit)
            hooks = self._saving_hooks() if torch.is_grad_enabled() else None
            inputs = (
                [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.requires_grad] if hooks else []
            )
            if hooks is not None:
                hooks.__enter__()
        except BaseException:
            for unit in acquired:
                self._residency.release(unit)
            # The forward hook runs even so (always_call) and finds this frame to pop.
            self._thread.frames.append(_Frame(units, [], None, []))
            raise
        self._thread.frames.append(_Frame(units, acquired, hooks, inputs))

    def _after_forward(self, units: list[Unit], output: Any) -> None:
        # Another hook may have raised before ours could run: then the top frame is not this root's.
        if not self._thread.frames or self._thread.frames[-1].root is not units:
            return
        frame = self._thread.frames.pop()
        try:
            if frame.hooks is not None:
                frame.hooks.__exit__()
            if frame.units and torch.is_grad_enabled():
                outputs = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
                if outputs:
                    self._expect_backward(frame.units, outputs, frame.inputs)
        finally:
            for unit in frame.units:
                self._residency.release(unit)

    def _expect_backward(self, units: list[Unit], outputs: list[Tensor], inputs: list[Tensor]) -> None:
        use = object()

        def begin(_gradient: Tensor) -> None:
            self._begin_backward(units, use)

        def end(_gradients: Sequence[Tensor | None]) -> None:
            self._end_backward(units, use)

        # A tensor that the unit hands through unchanged has no node of the unit's own to hang the hook on; unpacking
        # covers it.
        passed = {id(t) for t in inputs}
        for tensor in outputs:
            if id(tensor) not in passed:
                tensor.register_hook(begin)  # type: ignore[no-untyped-call]
        if inputs:
            register_multi_grad_hook(inputs, end, mode="all")

    # Backward

    def _task(self) -> _GraphTask | None:
        """The outermost backward that the current thread is in, or None outside any."""
        graph_id = torch._C._current_graph_task_id()
        if graph_id == -1:
            return None
        task = self._tasks.get(graph_id)
        if task is None:
            stack = self._thread.tasks
            stack[:] = [known for known in stack if known in self._tasks]
            task = self._tasks[stack[0]] if stack else _GraphTask(threading.get_ident())
            task.open += 1
            stack.append(graph_id)
            self._tasks[graph_id] = task
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: self._finish_task(graph_id))
        return task

    def _begin_backward(self, units: Sequence[Unit], use: object) -> None:
        with self._lock:
            task = self._task()
            if task is None:
                return
            for unit in units:
                self._lease(task, unit, use)
            for unit in self.order.visit(units[0], backward=True):
                self._residency.prefetch(unit)

    def _lease(self, task: _GraphTask, unit: Unit, use: object) -> None:
        if unit.index not in task.leases:
            self._residency.acquire(unit)
            task.leases[unit.index] = (unit, set())
            if torch.is_grad_enabled():  # create_graph: the graph being built refers to the weights after this backward
                self._hold_until_step(unit)
        task.leases[unit.index][1].add(use)

    def _end_backward(self, units: Sequence[Unit], use: object) -> None:
        with self._lock:
            task = self._task()
            if task is None:
                return
            for unit in units:
                if unit.index not in task.leases:
                    continue
                uses = task.leases[unit.index][1]
                uses.discard(use)
                if not uses:
                    del task.leases[unit.index]
                    self._residency.release(unit)
                    if self.on_unit_backward is not None:
                        self.on_unit_backward(unit)

    def _finish_task(self, graph_id: int) -> None:
        with self._lock:
            task = self._tasks.pop(graph_id, None)
            if task is None:
                return
            task.open -= 1
            if task.open == 0:
                self._release_task(task)

    def _release_task(self, task: _GraphTask) -> None:
        while task.leases:
            _, (unit, _uses) = task.leases.popitem()
            self._residency.release(unit)
            if self.on_unit_backward is not None:
                self.on_unit_backward(unit)
        self._residency.drop_prefetched()

    def _hold_until_step(self, unit: Unit) -> None:
        if not self._said_create_graph:
            self._said_create_graph = True
            warnings.warn("create_graph=True: units stay on the device until step() or zero_grad()", stacklevel=2)
        self._residency.acquire(unit)
        self._held.append(unit)

    def reset(self) -> None:
        """Ends leases of this thread's backwards that an exception cut short, and those that double backward held."""
        if not self._tasks or torch._C._current_graph_task_id() != -1:
            return
        with self._lock:
            thread = threading.get_ident()
            alive = {t.ident for t in threading.enumerate()}
            for graph_id, task in list(self._tasks.items()):
                if task.thread == thread or task.thread not in alive:
                    del self._tasks[graph_id]
                    self._release_task(task)

    def unwind(self) -> None:
        """Leaves forwards that an interrupt (which module hooks do not see) cut short.

        Call it outside any forward only.
        """
        while self._thread.frames:
            frame = self._thread.frames.pop()
            if frame.hooks is not None:
                frame.hooks.__exit__()
            for unit in frame.units:
                self._residency.release(unit)

    @property
    def in_forward(self) -> bool:
        """Whether the current thread is within a forward of one of the roots."""
        return bool(self._thread.frames)

    def end_step(self) -> None:
        """After a step or `zero_grad`: nothing stays resident beyond what placement says."""
        self.unwind()
        self.reset()
        with self._lock:
            while self._held:
                self._residency.release(self._held.pop())
            self._residency.drop_prefetched()

    # Saved tensors

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Packs views of unit buffers that autograd saves within this context."""
        if not torch.is_grad_enabled():
            yield
            return
        with self._saving_hooks():
            yield

    def _saving_hooks(self) -> saved_tensors_hooks:
        outer: tuple[Pack, Unpack] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)

        def pack(tensor: Tensor) -> Any:
            place = self._residency.find(tensor)
            if place is not None:
                unit, flat = place
                weights = unit.flats[flat]
                if tensor.dtype == weights.flat.dtype and not tensor.is_conj() and not tensor.is_neg():
                    return _WeightHandle(
                        unit, flat, unit.generation, int(tensor.storage_offset()), tensor.shape, tensor.stride()
                    )
            if outer is not None:
                return _Passed(outer[0](tensor), -1)
            return _Passed(tensor, tensor._version)

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, _WeightHandle):
                return self._resolve(packed)
            if outer is not None:
                return outer[1](packed.value)
            if packed.value._version != packed.version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"[{packed.value.type()} {list(packed.value.shape)}] is at version {packed.value._version}; "
                    f"expected version {packed.version} instead"
                )
            return packed.value  # type: ignore[no-any-return]

        return saved_tensors_hooks(pack, unpack)

    def _resolve(self, handle: _WeightHandle) -> Tensor:
        unit = handle.unit
        with self._lock:
            if handle.generation != unit.generation:
                raise StaleWeightsError(
                    f"unit {unit.name}: its weights changed after the forward whose backward is running "
                    "(by step(), gathered(modify=True) or a write in place); run the forward again"
                )
            task = self._task()
            temporary = task is None
            if task is not None:
                if unit.index not in task.leases:
                    self._lease(task, unit, "saved tensor")
            else:
                self._residency.acquire(unit)
            try:
                flat = unit.flats[handle.flat]
                tensor = flat.plane.tensor if flat.fixed else flat.buffer
                if tensor is None:
                    raise OffloadError(f"unit {unit.name}: resident without a buffer")
                with torch.no_grad():
                    return tensor.as_strided(handle.shape, handle.stride, handle.offset)
            finally:
                if temporary:
                    self._residency.release(unit)
