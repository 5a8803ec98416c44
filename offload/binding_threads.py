"""What torch keeps per thread, carried from the thread that asks for work to those that do it."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack, _push_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._python_dispatch import _push_mode as _push_dispatch_mode

from offload.binding_saved import all_pairs, push_pairs


class ThreadState:
    """The calling thread's grad mode, autocast, saved-tensor hooks, torch modes (with the default device), context
    variables, number of torch threads and, on CUDA, device and stream.

    `run` puts them in force in another thread for one call; the thread is expected to end after it.
    """

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._grad, self._inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        kinds = sorted({"cpu", device_type})
        self._autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
        self._cache = torch.is_autocast_cache_enabled()
        self._pairs = all_pairs()
        self._function_modes = list(_get_current_function_mode_stack())  # type: ignore[no-untyped-call]
        self._dispatch_modes = list(_get_current_dispatch_mode_stack())
        self._threads = torch.get_num_threads()
        self._stream = torch.cuda.current_stream() if device_type == "cuda" else None

    def run(self, context: contextvars.Context, function: Callable[..., Any], *args: Any) -> None:
        """Calls `function` with everything in force; `context` is a copy that no other thread uses."""
        context.run(self._run, function, args)

    def _run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        if self._stream is not None:
            torch.cuda.set_stream(self._stream)
        push_pairs(self._pairs)
        for mode in self._function_modes:
            _push_mode(mode)  # type: ignore[no-untyped-call]
        for mode in self._dispatch_modes:
            _push_dispatch_mode(mode)
        for kind, enabled, dtype in self._autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self._cache)
        # Here autograd's own thread for a device would wait in a hook of one micro-batch and block all others.
        with (
            torch.inference_mode(self._inference),
            torch.set_grad_enabled(self._grad),
            torch.autograd.set_multithreading_enabled(False),
        ):
            function(*args)
