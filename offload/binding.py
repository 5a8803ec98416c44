"""Ties a module's forward and backward to leases on its units. With `binding_*`, the only file that touches autograd.

A unit is leased in its root's forward and rests right after it. Views of unit buffers that autograd saves meanwhile are
packed into handles (unit, version, offset, shape, stride) and resolved when the backward needs them, which acquires the
unit if it is not resident. Hooks on the outputs acquire a unit as soon as a gradient reaches it, and on its inputs end
the lease; both are only about time and memory: whatever they miss, unpacking makes right. So the leases of a backward
may be given up at any time, and are when the device has no room for another unit.

[Note: graph tasks] Backward leases belong to the outermost running backward of a thread. They end when the gradients of
the unit's inputs exist, or in the callback that autograd runs at the end of that backward. Reentrant checkpointing
starts nested backwards, whose end must not end the leases of the outer one; hence the stack. After an exception
autograd runs no callback: the next outermost forward, `zero_grad` and `step` clear what was left.

[Note: frames] What a forward acquired is noted in a frame before it is acquired. Module hooks do not see interrupts, so
frames may be left over; a frame whose Python call is not on its thread's stack any more is one of these.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version, saved_tensors_hooks

from offload.binding_recompute import Root, Visit, repeatable_arguments, signature
from offload.binding_saved import SavedTensors, WeightHandle, pop_hooks, top_pair, view_of
from offload.binding_uses import Use
from offload.calls import RootHook, distinct_tensors, module_call, on_stack
from offload.errors import OffloadError, StaleWeightsError
from offload.held import RECORD
from offload.parameters import ParameterRecord
from offload.prefetch import VisitOrder
from offload.residency import Residency, Unit
from offload.schedule.activations import Activations, Tally
from offload.schedule.visitor import Visitor
from offload.telemetry.trace import COMPUTE
from offload.turning import Turning
from offload.turns import Turn

_no_function, _graph_task = torch._C.DisableTorchFunctionSubclass, torch._C._current_graph_task_id


class _GraphTask:
    """Leases of one outermost backward, oldest first; `open` counts it and the backwards nested in it.

    A unit's lease ends with the last of its uses.
    """

    def __init__(self) -> None:
        self.open = 0
        self.leases: dict[int, tuple[Unit, set[object]]] = {}


class _Frame:
    """One forward of a root (`units` tells roots apart) and what it has to give back."""

    __slots__ = ("acquired", "again", "call", "foreign", "handled", "hooks", "tally", "units", "use", "visit")

    def __init__(self, units: Sequence[Unit], call: FrameType | None) -> None:
        self.units, self.call = units, call
        self.acquired: list[Unit] = []
        self.again = False  # whether a backward is to follow
        self.hooks: saved_tensors_hooks | None = None
        self.foreign = False  # whether hooks of the user lie below ours
        self.handled = sys.exc_info()[1]
        """The exception that the caller is handling, which is none of the forward's own."""
        self.use: Use | None = None
        self.visit: Visit | None = None
        self.tally: Tally | None = None


class _Activity:
    """What one thread is doing: frames of running forwards, innermost last, and ids of its graph tasks."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.frames: list[_Frame] = []
        self.tasks: list[int] = []
        self.again: Visit | None = None  # whose forward is about to be repeated
        self.last: weakref.ref[Visit] | None = None  # the last one that was not kept


class _Local(threading.local):
    activity: _Activity | None = None


class Binding:
    """Hooks on the roots of an engine's units and on its trainable parameters."""

    def __init__(
        self, residency: Residency, on_gradient: Callable[[ParameterRecord, Tensor], None], prefetch_units: int | None
    ) -> None:
        self._residency = residency
        self._on_gradient = on_gradient
        self._local = _Local()
        self._activities: list[_Activity] = []
        self._tasks: dict[int, _GraphTask] = {}
        self._held: list[Unit] = []  # leases that double backward keeps until the step
        self._said_create_graph = False
        self._handles: list[Any] = []
        self._turn = Turn()
        self._saved = SavedTensors(residency, self._resolve)
        self._watched: dict[int, list[Any]] = {}
        self._dtypes: set[torch.dtype] = set()
        for unit in residency.units:
            self.laid_out(unit)
        self._device_type = residency.memory.device.torch_device.type
        self.lock = residency.lock
        self._spans = residency.memory.spans
        self.order = VisitOrder(prefetch_units)
        self._turning = Turning(residency, self.order)
        self.on_unit_backward: Callable[[Unit], None] | None = None
        self.on_backward_end: Callable[[], None] | None = None
        """Called in the thread of an outermost backward when it is over."""
        self.visitor: Visitor | None = None
        self.activations: Activations | None = None
        residency.reclaim = self._give_way

    # Attaching

    def laid_out(self, unit: Unit) -> None:
        """Takes note of where a unit's parameters are."""
        self._saved.laid_out(unit)
        self._dtypes.update(flat.flat.dtype for flat in unit.flats if flat.records)

    def attach(self, root: nn.Module, units: Sequence[Unit], *, repeatable: bool = True) -> None:
        """Leases `units` (the root's own, then those it borrows from) around every forward of `root`.

        `repeatable`: whether its activations may be computed again instead of being kept.
        """
        own = list(units)
        again = Root(root, own) if repeatable else None

        def before(_module: nn.Module, args: Any, kwargs: Any) -> None:
            self._before_forward(own, again, args, kwargs)

        def after(_module: nn.Module, _args: Any, _kwargs: Any, output: Any = None) -> None:
            self._after_forward(own, output)

        # A compiled model or block breaks its graph here; `block.forward` compiled alone has no break.
        disable: Any = torch.compiler.disable
        before, after = disable(before), disable(after)
        hook = RootHook(before)
        if again is not None:
            again.hook = hook
        self._handles.append(root.register_forward_pre_hook(hook, with_kwargs=True, prepend=True))
        self._handles.append(root.register_forward_hook(RootHook(after), with_kwargs=True, always_call=True))

    def watch(self, record: ParameterRecord) -> None:
        """Collects every gradient that accumulates into the parameter."""
        record.watched = True
        # Autograd keeps the hooks where the garbage collector does not look: they must not hold what holds the
        # parameter.
        reference, unit, name = weakref.ref(self), record.unit, record.name
        take, give = self._turn.take, self._turn.give

        def arriving(_gradient: Tensor) -> None:
            binding = reference()
            if binding is not None:
                if binding.visitor is not None:
                    binding.visitor.gradient_due(unit, name)
                if _graph_task() not in binding._tasks:
                    with binding.lock:
                        binding._task()  # whose end ends the turn, should nothing be accumulated (torch.autograd.grad)
                take()

        def arrived(parameter: Tensor) -> None:
            binding, owner = reference(), parameter.__dict__.get(RECORD)
            try:
                # Outside its unit's forward the parameter's `.grad` would be the engine's.
                with _no_function():
                    gradient, parameter.grad = parameter.grad, None
                if gradient is not None and binding is not None and owner is not None:
                    binding._on_gradient(owner, gradient)
                    if binding.visitor is not None:
                        binding.visitor.gradient_added(unit, name, nested=binding.nested)
            finally:
                give()

        with torch._C.DisableTorchFunctionSubclass():
            self._watched[id(record)] = [
                record.parameter.register_hook(arriving),  # type: ignore[no-untyped-call]
                record.parameter.register_post_accumulate_grad_hook(arrived),  # type: ignore[no-untyped-call]
            ]

    def unwatch(self, record: ParameterRecord) -> None:
        """Leaves the parameter's gradients to torch again."""
        record.watched = False
        for handle in self._watched.pop(id(record), ()):
            handle.remove()

    def detach(self) -> None:
        """Removes every hook and ends transfers of activations. Idempotent."""
        while self._handles:
            self._handles.pop().remove()
        while self._watched:
            for handle in self._watched.popitem()[1]:
                handle.remove()
        if self.activations is not None:
            self.activations.close()

    def settle(self) -> None:
        """Waits for transfers of activations."""
        if self.activations is not None:
            self.activations.settle()

    # Forward

    def _activity(self) -> _Activity:
        activity = self._local.activity
        if activity is None:
            activity = self._local.activity = _Activity()
            with self.lock:
                alive = {t.ident for t in threading.enumerate()}
                self._activities = [a for a in self._activities if a.thread in alive or a.frames or a.tasks]
                self._activities.append(activity)
        return activity

    def _before_forward(self, units: list[Unit], root: Root | None, args: Any, kwargs: Any) -> None:
        call = module_call(sys._getframe(1))
        activity = self._activity()
        in_backward = torch._C._current_graph_task_id() != -1
        self._leave_dead_frames(activity, call)
        if not activity.frames and not in_backward:
            self.reset()
        frame = _Frame(units, call)
        frame.foreign = self._below_foreign_hooks(activity)
        activity.frames.append(frame)
        # After an exception from here the forward hook runs even so (always_call) and finds the frame.
        self._check_modes(units)
        if self.visitor is not None:
            if in_backward:
                self.visitor.reaching(units)
            else:
                self.visitor.entering(units, graded=torch.is_grad_enabled())
        self._spans.begin(COMPUTE, f"{'recompute' if in_backward else 'forward'} {units[0].name}", frame)
        if not in_backward:
            self._turning.visit(units[0])
        # All loads begin before the first wait. A load that nobody leases yet may have to give way meanwhile.
        self._residency.begin(units[0])
        for unit in units[1:]:
            self._residency.prefetch(unit)
        for unit in self.order.visit(units[0], backward=in_backward):
            self._residency.prefetch(unit)
        for unit in units:
            frame.acquired.append(unit)
            self._residency.acquire(unit, frame, opened=True)
        if self.visitor is not None:
            self.visitor.leased(units)
        # Also where gradients are off: the forward may switch them on for a part of itself.
        if not in_backward and self._residency.gather is not None:
            # Reentrant checkpointing runs a forward without gradients, and in the backward once more.
            frame.again = torch.is_grad_enabled() or bool(distinct_tensors((args, kwargs)))
        again = activity.again
        if again is not None and again.root is root:
            activity.again = None
            frame.hooks = self._saved.enter(again.collect)
            return
        if not torch.is_grad_enabled():
            frame.hooks = self._saved.enter()
            return
        frame.use = Use(self, units, distinct_tensors((args, kwargs)))
        if not in_backward and root is not None:
            self._choose(activity, frame, root, args, kwargs)
        frame.hooks = self._saved.enter(None if frame.visit is None else frame.visit.pack, frame.tally)

    def _below_foreign_hooks(self, activity: _Activity) -> bool:
        """Whether saved-tensor hooks that are not ours are in force."""
        top = top_pair()
        below = activity.frames[-1] if activity.frames else None
        if below is None or below.hooks is None:
            return top is not None
        return below.foreign or top is None or top[0] is not below.hooks.pack_hook

    def _choose(self, activity: _Activity, frame: _Frame, root: Root, args: Any, kwargs: Any) -> None:
        """A forward begins: a visit if its activations may be let go, a tally if they will be kept and count."""
        if self.activations is None or not self.activations.wants(root):
            return
        if frame.foreign or any(outer.visit or outer.tally for outer in activity.frames):
            return
        if not root.sees_everything() or torch._C._functorch.peek_interpreter_stack() is not None:
            return
        given = (root.module.training, signature(args), signature(kwargs))
        known = None if None in given else given
        frame.tally = self.activations.surely_kept(root, known)
        if frame.tally is None:
            arguments = repeatable_arguments((args, kwargs))
            if arguments is not None:
                frame.visit = Visit(root, *arguments, self._repeat, known)

    def _check_modes(self, units: Sequence[Unit]) -> None:
        functorch: Any = torch._C._functorch
        if functorch.peek_interpreter_stack() is not None:
            for level in functorch.get_interpreter_stack():
                if level.key() != functorch.TransformType.Vmap:
                    raise OffloadError(
                        f"unit {units[0].name}: torch.func's grad, vjp and jacobians do not work through offloaded "
                        "modules; use torch.autograd"
                    )
        if torch.is_autocast_enabled(self._device_type):
            dtype = torch.get_autocast_dtype(self._device_type)
            if dtype not in self._dtypes:
                raise OffloadError(
                    f"unit {units[0].name}: autocast to {dtype}, but the parameters are "
                    f"{', '.join(sorted(map(str, self._dtypes)))}; set precision.compute_dtype instead of autocast"
                )

    def _after_forward(self, units: list[Unit], output: Any) -> None:
        activity = self._activity()
        call = module_call(sys._getframe(1))
        # Another hook may have raised before ours could run: then the top frame is not this call's.
        if not activity.frames or activity.frames[-1].units is not units or activity.frames[-1].call is not call:
            return
        frame = activity.frames[-1]
        use, visit, tally = frame.use, frame.visit, frame.tally
        # After an error, what was saved is about to be dropped with the graph.
        well = sys.exc_info()[1] is frame.handled
        if use is not None and well and self.visitor is None and self._residency.gather is None:
            frame.again = self._turning.leave(use)
        self._leave(activity)
        if tally is not None and well:
            tally.ended()
        if visit is not None and self.activations is not None and well:
            if self.activations.ended(visit):
                visit.previous, activity.last = activity.last, weakref.ref(visit)
                if use is not None:
                    use.visit = activity.last
            del visit
        if use is not None and torch.is_grad_enabled():
            use.expect(output)

    def _leave(self, activity: _Activity) -> None:
        """Ends the innermost frame of the current thread."""
        frame = activity.frames.pop()
        self._spans.end(frame)
        frame.call = frame.use = frame.visit = frame.tally = frame.handled = None
        if frame.hooks is not None:
            pop_hooks(frame.hooks)
            frame.hooks = None
        self._release_frame(frame)

    def _release_frame(self, frame: _Frame) -> None:
        if len(frame.acquired) == 1:  # as a rule, and cheaper
            try:
                self._residency.release(frame.acquired[0], frame, again=frame.again)
            finally:
                frame.acquired = []
            return
        with contextlib.ExitStack() as stack:
            for unit in frame.acquired:
                stack.callback(self._residency.release, unit, frame, again=frame.again)
            frame.acquired = []

    def _leave_dead_frames(self, activity: _Activity, top: FrameType | None) -> None:
        while activity.frames:
            call = activity.frames[-1].call
            if call is None or on_stack(call, top):
                return
            self._leave(activity)

    # Backward

    def _task(self) -> _GraphTask | None:
        """The outermost backward that the current thread is in, or None outside any."""
        graph_id = torch._C._current_graph_task_id()
        if graph_id == -1:
            return None
        task = self._tasks.get(graph_id)
        if task is None:
            stack = self._activity().tasks
            stack[:] = [known for known in stack if known in self._tasks]
            task = self._tasks[stack[0]] if stack else _GraphTask()
            task.open += 1
            stack.append(graph_id)
            self._tasks[graph_id] = task
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: self._finish_task(graph_id))
        return task

    @property
    def nested(self) -> bool:
        """Whether the running backward was started within another one."""
        tasks = self._activity().tasks
        return bool(tasks) and tasks[0] in self._tasks and tasks[0] != torch._C._current_graph_task_id()

    def pause(self) -> None:
        """The current thread is about to let others run: it holds no gradient that they could be waiting for."""
        self._turn.give()
        self._spans.pause()

    def resume(self) -> None:
        """It goes on."""
        self._spans.resume()

    def join(self, loss: Tensor) -> None:
        """Makes a backward of `loss` known from its first moment on."""
        reference = weakref.ref(self)

        def begun(_gradient: Tensor) -> None:
            binding = reference()
            if binding is not None:
                with binding.lock:
                    binding._task()

        if loss.requires_grad:
            loss.register_hook(begun)  # type: ignore[no-untyped-call]

    def _repeat(self, visit: Visit, call: Callable[[], None]) -> None:
        """Runs the forward of `visit` for what it saves."""
        activity = self._activity()
        activity.again = visit
        try:
            call()
        finally:
            activity.again = None
            self._leave_dead_frames(activity, sys._getframe(1))

    @staticmethod
    def _prefetch_inputs(use: Use) -> None:
        visit = None if use.visit is None else use.visit()
        if visit is not None:
            visit.prefetch()
            before = None if visit.previous is None else visit.previous()
            if before is not None:
                before.prefetch()

    def begin_backward(self, use: Use) -> None:
        if self.visitor is not None:
            self.visitor.reaching(use.units)
        self._prefetch_inputs(use)
        with self.lock:
            task = self._task()
            if task is None:
                return
            self._spans.replace(COMPUTE, f"backward {use.units[0].name}", task)
            for unit in use.units:
                self._lease(task, unit, use)
            if self.visitor is not None:
                self.visitor.leased(use.units)
            for unit in self.order.visit(use.units[0], backward=True):
                self._residency.prefetch(unit)

    def _lease(self, task: _GraphTask, unit: Unit, use: object) -> None:
        if unit.index not in task.leases:
            task.leases[unit.index] = (unit, set())
            self._residency.acquire(unit, task)
        task.leases[unit.index][1].add(use)

    def end_backward(self, use: Use) -> None:
        visit = None if use.visit is None else use.visit()
        if visit is not None:
            visit.drop()
        with self.lock:
            task = self._task()
            if task is None:
                return
            for unit in use.units:
                if unit.index not in task.leases:
                    continue
                uses = task.leases[unit.index][1]
                uses.discard(use)
                self._residency.used_again(unit)
                if uses <= {task}:  # the task itself stands for what was unpacked out of turn
                    del task.leases[unit.index]
                    self._residency.release(unit, task)
                    if self.on_unit_backward is not None:
                        self.on_unit_backward(unit)

    def _finish_task(self, graph_id: int) -> None:
        self._turn.give()
        with self.lock:
            task = self._tasks.pop(graph_id, None)
            if task is None:
                return
            task.open -= 1
            if task.open:
                return
            self._release_task(task)
        if self.on_backward_end is not None:
            self.on_backward_end()

    def _release_task(self, task: _GraphTask) -> None:
        self._spans.end(task)
        while task.leases:
            _, (unit, uses) = task.leases.popitem()
            self._residency.used_again(unit, len(uses - {task}))
            self._residency.release(unit, task)
            if self.on_unit_backward is not None:
                self.on_unit_backward(unit)
        self._drop_prefetched()
        if self.visitor is None:
            self._residency.let_go()

    def _drop_prefetched(self) -> None:
        if self.visitor is None:  # else another micro-batch is about to use it
            self._residency.drop_prefetched()

    def _give_way(self, unit: Unit | None) -> bool:
        """Ends the oldest leases for speed that free memory, other than of `unit` and of each running backward's
        latest.
        """
        if self._turning.give_way(unit):
            return True
        visitor = self.visitor
        paused = [] if visitor is None else [a for a in self._activities if visitor.paused(a.thread)]
        waiting = {id(self._tasks[graph]) for a in paused for graph in a.tasks if graph in self._tasks}
        tasks = list({id(task): task for task in self._tasks.values()}.values())
        candidates = [] if visitor is None else visitor.kept()
        latest = set()
        for task in tasks:
            leased = [old for old, _uses in task.leases.values()]
            if leased and id(task) not in waiting:
                latest.add(leased.pop().index)
            candidates.extend(leased)
        for old in candidates:
            if old is unit or not old.load_bytes or old.index in latest:
                continue
            holding = [task for task in tasks if old.index in task.leases]
            if any(holder is not visitor and holder not in holding for holder in old.holders):
                continue
            for task in holding:
                del task.leases[old.index]
                self._residency.release(old, task)
            if visitor is not None:
                visitor.drop(old)
            return True
        return False

    def _hold_until_step(self, unit: Unit) -> None:
        if not self._said_create_graph:
            self._said_create_graph = True
            warnings.warn("create_graph=True: units stay on the device until step() or zero_grad()", stacklevel=2)
        if unit not in self._held:
            self._held.append(unit)
            self._residency.acquire(unit, self)

    # Clearing up

    def reset(self) -> None:
        """Ends leases that an exception cut short: of this thread's backwards and of threads that are not Python's.

        Autograd has threads of its own for accelerators. Their backwards may be running; they then load anew.
        """
        if not self._tasks or torch._C._current_graph_task_id() != -1:
            return
        self._turn.give()
        with self.lock:
            own = self._activity()
            alive = {t.ident for t in threading.enumerate()}
            for activity in [a for a in self._activities if a is own or a.thread not in alive]:
                for graph_id in activity.tasks:
                    task = self._tasks.pop(graph_id, None)
                    if task is not None:
                        self._release_task(task)
                activity.tasks.clear()

    def unwind(self) -> None:
        """Leaves forwards that an interrupt cut short, see [Note: frames]."""
        own = self._activity()
        self._leave_dead_frames(own, sys._getframe(1))
        with self.lock:
            others = [a for a in self._activities if a is not own and a.frames]
            if others:
                tops = sys._current_frames()
                for activity in others:
                    top = tops.get(activity.thread)
                    for frame in activity.frames:
                        if frame.call is not None and not on_stack(frame.call, top):
                            self._release_frame(frame)  # the hooks are for the thread itself to pop

    def rest(self) -> None:
        """After a call of the whole model: no frame is left over, and nothing that was loaded ahead."""
        activity = self._activity()
        self._leave_dead_frames(activity, sys._getframe(1))
        if not activity.frames and torch._C._current_graph_task_id() == -1:
            self._drop_prefetched()

    @property
    def in_forward(self) -> bool:
        """Whether the current thread is within a forward of one of the roots."""
        activity = self._activity()
        self._leave_dead_frames(activity, sys._getframe(1))
        return bool(activity.frames)

    def end_step(self) -> None:
        """Before a step or `zero_grad`: nothing stays resident beyond what placement says."""
        self.unwind()
        self.reset()
        with self.lock:
            while self._held:
                self._residency.release(self._held.pop(), self)
            self._residency.drop_prefetched()
            self._residency.let_go()
        self._residency.settle()

    def weights_changed(self, records: Iterable[ParameterRecord], *, in_place: bool = False) -> None:
        """Counts a change of values that autograd has not seen as a write to the parameters.

        `in_place`: the new values are in the parameters, to be carried to the resting planes; else it is the other way
        round.
        """
        with self.lock, torch._C.DisableTorchFunctionSubclass():
            for record in records:
                increment_version(record.parameter)
                if not in_place:
                    record.version = record.parameter._version

    # Saved tensors

    @contextmanager
    def using(self, units: Sequence[Unit]) -> Iterator[None]:
        """Plain parameters of `units` within the context, outside the units' own forwards."""
        holder = object()
        # Checkpointing compares what is saved in a forward with what its recompute saves. It may run a part of a unit
        # for itself in the recompute, and must then see the weights as it saw them within the unit's forward.
        outer = top_pair()
        checkpointed = outer is not None and getattr(outer[0], "__module__", "") == "torch.utils.checkpoint"
        in_backward = torch._C._current_graph_task_id() != -1
        if self.visitor is not None and not in_backward and units:
            self.visitor.entering(units, graded=torch.is_grad_enabled())
        with contextlib.ExitStack() as stack:
            for unit in units:
                self._join_backward(unit)
                stack.callback(self._residency.release, unit, holder)
                self._residency.acquire(unit, holder, opened=True)
            if self.visitor is not None:
                self.visitor.leased(units)
            if not checkpointed:
                stack.callback(pop_hooks, self._saved.enter())
            yield

    def _join_backward(self, unit: Unit) -> None:
        """Within a backward a unit stays for the next operation, up to the backward's end."""
        with self.lock:
            task = self._task()
            if task is not None:
                self._lease(task, unit, task)

    def _resolve(self, handle: WeightHandle) -> Tensor:
        unit, record, version = handle[:3]
        if self.visitor is not None and self._misses(unit):
            self.visitor.reaching([unit])
        with self.lock:
            with _no_function():
                now = record.parameter._version
            if version != now + record.replaced:
                raise StaleWeightsError(
                    f"{record.name}: its value changed after the forward whose backward is running "
                    "(by step(), gathered(modify=True) or a write in place); run the forward again"
                )
            task = self._tasks.get(_graph_task())
            if task is not None and unit.index in task.leases and not torch.is_grad_enabled():
                loaded = unit.flats[record.flat].loaded
                if loaded is not None and handle[6]:  # as a rule
                    return (loaded.views or loaded.show())[record.position].detach()
                return view_of(handle)
            return self._lease_and_view(handle)

    def _lease_and_view(self, handle: WeightHandle) -> Tensor:
        unit, task = handle.unit, self._task()
        if task is None:
            holder = object()
            self._residency.acquire(unit, holder)
            try:
                with torch.no_grad():
                    return view_of(handle)
            finally:
                self._residency.release(unit, holder)
        if unit.index not in task.leases:
            self._lease(task, unit, task)
            if self.visitor is not None:
                self.visitor.leased([unit])
        if torch.is_grad_enabled():  # create_graph: the graph being built refers to the weights afterwards
            self._hold_until_step(unit)
        with torch.no_grad():
            return view_of(handle)

    def _misses(self, unit: Unit) -> bool:
        """Whether the running backward has to lease the unit for a saved view."""
        with self.lock:
            task = self._task()
            return task is not None and unit.index not in task.leases
