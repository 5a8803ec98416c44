"""Loading of the native kernels and choice of their instruction set, once per process.

`OFFLOAD_ISA` forces an instruction set by name, or `reference` for plain torch; unset or `auto` takes the best that the
processor has. A missing or broken extension is no error: `reference.py` gives the same bits, slower, with one warning.
"""

from __future__ import annotations

import functools
import importlib
import os
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from optimizer_cpu import reference
from optimizer_cpu.formats import StateFormat
from optimizer_cpu.reference import AdamWHyper, AdamWScalars
from optimizer_cpu.threads import get_threads

INTERFACE = 4
REFERENCE = "reference"
FORMAT_CODES = {"fp32": 0, "split": 1, "compact": 2}
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
NO_WEIGHT = 3
_PER_THREAD = 16 * 1024  # elements below which waking another thread costs more than it saves


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """The loaded extension and the instruction set it runs."""

    module: Any
    isa: str

    @staticmethod
    def threads(elements: int) -> int:
        """Threads for a call over `elements` elements."""
        return max(1, min(get_threads(), elements // _PER_THREAD))

    def step(
        self,
        state_format: str,
        *,
        weight: Tensor | None,
        master: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        grad: Tensor,
        hyper: AdamWHyper,
        grad_scale: float,
        exp_avg_scale: Tensor | None = None,
        exp_avg_sq_scale: Tensor | None = None,
    ) -> None:
        """A step over checked CPU tensors; `master` is the master or remainder plane."""
        planes = (weight, master, exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale)
        places = [(address(x), 0, 1) for x in planes]
        self._steps(state_format, weight, places, [self._range(0, grad.numel(), grad, 0, 0)], [hyper], grad_scale)

    def steps(
        self,
        fmt: StateFormat,
        planes: Mapping[str, Tensor],
        parts: Sequence[tuple[int, int, Tensor, int, AdamWHyper]],
        grad_scale: float,
    ) -> None:
        """Steps over ranges of checked CPU planes of `fmt`, by name, in one call: `parts` as for `kernels.steps_`."""
        weight: Tensor | None = planes["weight"]
        named = {"master" if name == "remainder" else name: (name, tensor) for name, tensor in planes.items()}
        if "master" not in named:
            named["master"], weight = named.pop("weight"), None  # the weights are their own masters
        groups = {spec.name: spec.group for spec in fmt.planes(planes["weight"].dtype)}
        places = []
        for name in ("weight", "master", "exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale"):
            plane, tensor = named.get(name, ("", None))
            places.append((0, 0, 1) if tensor is None else (tensor.data_ptr(), tensor.element_size(), groups[plane]))
        hypers: list[AdamWHyper] = []
        ranges = []
        for start, count, gradients, first, hyper in parts:
            # Those of one group are the same object, and mostly follow one another.
            if not hypers or hyper is not hypers[-1]:
                hypers.append(hyper)
            ranges.append(self._range(start, count, gradients, first, len(hypers) - 1))
        self._steps(fmt.name, weight, places, ranges, hypers, grad_scale)

    @staticmethod
    def _range(start: int, count: int, gradients: Tensor, first: int, hyper: int) -> tuple[int, int, int, int, int]:
        at = gradients.data_ptr() + first * gradients.element_size()
        return start, count, at, DTYPE_CODES[gradients.dtype], hyper

    def _steps(
        self,
        state_format: str,
        weight: Tensor | None,
        places: Sequence[tuple[int, int, int]],
        ranges: Sequence[tuple[int, int, int, int, int]],
        hypers: Sequence[AdamWHyper],
        grad_scale: float,
    ) -> None:
        """`places`: of each plane its address, bytes per entry and elements per entry. `ranges`: first element, number
        of elements, address and code of the dtype of the gradient, index in `hypers`.
        """
        self.module.steps(
            self.isa,
            FORMAT_CODES[state_format],
            NO_WEIGHT if weight is None else DTYPE_CODES[weight.dtype],
            places,
            ranges,
            [_scalars(hyper, grad_scale) for hyper in hypers],
            [hyper.step & 0xFFFFFFFF for hyper in hypers],
            get_threads(),
            _PER_THREAD,
        )

    def convert(
        self,
        state_format: str,
        *,
        encode: bool,
        weight: Tensor,
        remainder: Tensor,
        master: Tensor,
        codes: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
        moments: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Encode or decode planes; `codes` = (exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale) of `compact`."""
        planes = [weight, remainder, *(codes or (None, None, None, None)), None]
        self.module.convert(
            self.isa,
            FORMAT_CODES[state_format],
            encode,
            [address(x) for x in planes],
            [address(x) for x in (master, *(moments or (None, None)))],
            weight.numel(),
            self.threads(weight.numel()),
        )

    def round_weight(self, master: Tensor, weight: Tensor) -> None:
        count = master.numel()
        self.module.round_weight(
            self.isa, DTYPE_CODES[weight.dtype], address(master), address(weight), count, self.threads(count)
        )

    def square_sums(self, grad: Tensor, out: Tensor | None = None) -> tuple[Tensor, int | None]:
        """`out`: where to copy `grad` on the way."""
        count = grad.numel()
        partials = torch.empty(-(-count // reference.BLOCK), dtype=torch.float64)
        first = self.module.square_sums(
            self.isa,
            DTYPE_CODES[grad.dtype],
            address(grad),
            address(out),
            address(partials),
            count,
            self.threads(count),
        )
        return partials, None if first < 0 else int(first)

    def square_sums_of(self, parts: Sequence[tuple[Tensor, int, int]]) -> list[Tensor]:
        """`parts`: as for `kernels.square_sums_of`, checked."""
        ranges = []
        blocks = []
        for plane, start, count in parts:
            ranges.append((plane.data_ptr() + start * plane.element_size(), DTYPE_CODES[plane.dtype], count))
            blocks.append(-(-count // reference.BLOCK))
        partials = torch.empty(sum(blocks), dtype=torch.float64)
        self.module.square_sums_of(self.isa, ranges, address(partials), get_threads(), _PER_THREAD)
        return list(torch.split(partials, blocks))

    def accumulate(self, acc: Tensor, contribution: Tensor) -> None:
        count = acc.numel()
        self.module.accumulate(
            self.isa,
            DTYPE_CODES[contribution.dtype],
            address(acc),
            address(contribution),
            count,
            self.threads(count),
        )


@functools.lru_cache(maxsize=64)  # as many groups of parameters as there may be in a step
def _scalars(hyper: AdamWHyper, grad_scale: float) -> list[float]:
    s = AdamWScalars.of(hyper, grad_scale)
    return [
        s.grad_scale,
        s.l2,
        s.decay,
        s.beta1,
        s.one_minus_beta1,
        s.beta2,
        s.one_minus_beta2,
        s.root_scale,
        s.eps,
        s.step_size,
    ]


def address(tensor: Tensor | None) -> int:
    """Address of the first element, 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def choose_isa(forced: str | None, compiled: list[str], supported: list[str]) -> str:
    """The instruction set to use; ValueError if `forced` is unknown or this machine cannot run it."""
    if forced in (None, "", "auto"):
        return supported[0]
    assert forced is not None
    if forced in supported:
        return forced
    usable = ", ".join(["auto", *supported, REFERENCE])
    if forced in compiled:
        raise ValueError(f"OFFLOAD_ISA={forced}: this processor does not support it; usable here: {usable}")
    raise ValueError(f"OFFLOAD_ISA={forced} is not a known instruction set; usable here: {usable}")


def _import() -> ModuleType:
    """The extension; ImportError with the first cause if it is missing, broken or built from other sources."""
    module = importlib.import_module("optimizer_cpu._native")
    found = getattr(module, "interface", None)
    if found != INTERFACE:
        raise ImportError(f"optimizer_cpu._native has interface {found}, these sources need {INTERFACE}: reinstall")
    return module


def _self_test(backend: Backend) -> None:
    """Compare one small odd-sized step with the reference; RuntimeError naming what differs."""
    count = 77
    grad = torch.linspace(-3.0, 2.0, count).to(torch.bfloat16)
    hyper = AdamWHyper(lr=1e-3, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, step=2)
    results = []
    for native in (False, True):
        planes = [torch.linspace(-1.0, 1.0, count), torch.linspace(0.5, -0.5, count), torch.linspace(0.0, 1.0, count)]
        weight = torch.zeros(count, dtype=torch.bfloat16)
        values = dict(
            zip(("master", "exp_avg", "exp_avg_sq"), planes, strict=True), grad=grad, hyper=hyper, grad_scale=0.5
        )
        if native:
            backend.step("fp32", weight=weight, **values)  # type: ignore[arg-type]
        else:
            reference.adamw_(weight=weight, **values)  # type: ignore[arg-type]
        results.append([*planes, weight])
    if not all(torch.equal(a, b) for a, b in zip(*results, strict=True)):
        raise RuntimeError(f"native kernels ({backend.isa}) do not reproduce the reference on this machine")
    partials, bad = backend.square_sums(grad)
    if bad is not None or not torch.equal(partials, reference.square_sums(grad)):
        raise RuntimeError(f"native sums of squares ({backend.isa}) do not reproduce the reference on this machine")
    if not torch.equal(backend.square_sums_of([(grad, 3, count - 3)])[0], reference.square_sums(grad[3:])):
        raise RuntimeError(f"native sums of ranges ({backend.isa}) do not reproduce the reference on this machine")


_lock = threading.Lock()
_loaded = False
_backend: Backend | None = None


def load(forced: str | None) -> Backend | None:
    """Load and choose; None (after a warning, unless asked for) where the reference must serve.

    Raises ValueError for an instruction set that is unknown or not supported here, and RuntimeError where one was
    forced and does not reproduce the reference.
    """
    if forced == REFERENCE:
        return None
    try:
        module = _import()
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "optimizer_cpu._native"
        cause = "they were not built (no C++ compiler at install time?)" if missing else f"{error}"
        if forced not in (None, "", "auto"):
            raise ValueError(f"OFFLOAD_ISA={forced}, but the native kernels cannot be loaded: {cause}") from error
        warnings.warn(
            f"native code is not available: {cause}; using the slower plain-torch optimizer, which gives the same "
            "results, and threads for swap files. Reinstall with a C++17 compiler to get it.",
            RuntimeWarning,
            stacklevel=3,
        )
        return None
    backend = Backend(module=module, isa=choose_isa(forced, module.compiled_isas(), module.supported_isas()))
    try:
        _self_test(backend)
    except RuntimeError as error:
        if forced not in (None, "", "auto"):
            raise
        warnings.warn(f"{error}; using the slower plain-torch reference", RuntimeWarning, stacklevel=3)
        return None
    return backend


def backend() -> Backend | None:
    """The process's backend, loaded on first use; None means the reference."""
    global _backend, _loaded
    if not _loaded:
        with _lock:
            if not _loaded:
                _backend = load(os.environ.get("OFFLOAD_ISA"))
                _loaded = True
    return _backend


def for_tensors(*tensors: Tensor | None) -> Backend | None:
    """The backend where all `tensors` are in host memory, else None: the reference works on any device."""
    if any(x is not None and x.device.type != "cpu" for x in tensors):
        return None
    return backend()


def active_isa() -> str:
    """Name of the instruction set in use, `reference` for plain torch."""
    chosen = backend()
    return REFERENCE if chosen is None else chosen.isa


def force(isa: str | None) -> None:
    """Choose again, as if `OFFLOAD_ISA` were `isa`: for tests and benchmarks."""
    global _backend, _loaded
    chosen = load(isa)
    with _lock:
        _backend, _loaded = chosen, True


__all__ = ["Backend", "active_isa", "backend", "choose_isa", "for_tensors", "force", "load"]
