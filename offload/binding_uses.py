"""One forward of a root as its backward sees it: where a gradient enters the unit, and where it leaves."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from offload.binding_recompute import Visit
from offload.calls import distinct_tensors
from offload.residency import Unit

if TYPE_CHECKING:
    from offload.binding import Binding


class Use:
    """One forward of a root, whose backward may come any number of times. The graph keeps it alive.

    Hooks on leaves outlive the graph, so they are removed with it and do not hold it.
    """

    __slots__ = ("__weakref__", "_binding", "_counts", "_entered", "_handles", "_nodes", "units", "visit")

    def __init__(self, binding: Binding, units: Sequence[Unit], inputs: Sequence[Tensor]) -> None:
        self._binding, self.units = binding, units
        self.visit: weakref.ref[Visit] | None = None
        self._counts: dict[int, list[int]] = {}
        self._handles: list[Any] = []
        self._nodes: list[Any] = []
        self._entered = {id(t): t.grad_fn for t in inputs}
        if not inputs:
            return
        this = weakref.ref(self)

        def arrived(_gradient: Tensor) -> None:
            use = this()
            if use is not None:
                use._input_arrived()

        if len(inputs) > 1:
            self._nodes = [torch.autograd.graph.get_gradient_edge(t).node for t in inputs]
        for tensor in inputs:
            handle = tensor.register_hook(arrived)  # type: ignore[no-untyped-call]
            _put_first(tensor, handle)
            if tensor.grad_fn is None:
                self._handles.append(handle)

    def expect(self, output: Any) -> None:
        """Begins the backward as soon as a gradient reaches one of the tensors in `output`."""
        for tensor in distinct_tensors(output):
            node = tensor.grad_fn
            # A leaf, or an input handed through as it is, has no node of the unit's own; unpacking covers it.
            if node is not None and self._entered.get(id(tensor)) is not node:
                tensor.register_hook(self.begin)  # type: ignore[no-untyped-call]

    def begin(self, _gradient: Tensor) -> None:
        self._binding.begin_backward(self)

    def _input_arrived(self) -> None:
        if self._nodes:
            graph_id = torch._C._current_graph_task_id()
            with self._binding.lock:
                if graph_id not in self._counts:
                    # An input that this backward does not reach gets no gradient to wait for.
                    expected = sum(map(torch._C._will_engine_execute_node, self._nodes))
                    self._counts[graph_id] = [expected]
                count = self._counts[graph_id]
                count[0] -= 1
                if count[0] > 0:
                    return
                del self._counts[graph_id]
        self._binding.end_backward(self)

    def __del__(self) -> None:
        for handle in self._handles:
            handle.remove()


def _put_first(tensor: Tensor, handle: Any) -> None:
    """Makes a hook the first of its tensor: the unit that used it is let go before the one that made it is leased."""
    hooks = tensor._backward_hooks
    if hooks is not None and len(hooks) > 1 and handle.id in hooks:
        rest = [(key, hook) for key, hook in hooks.items() if key != handle.id]
        own = hooks[handle.id]
        hooks.clear()  # torch keeps this very dictionary
        hooks[handle.id] = own
        hooks.update(rest)
