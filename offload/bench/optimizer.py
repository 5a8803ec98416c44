"""How fast the CPU optimizer runs, against the memory bandwidth of this machine and against other implementations.

All cases run in one process, interleaved: every round times the streaming yardstick (each element of a large fp32
buffer read and written once, in place) right before each case, so noise from other processes meets both alike. Reported
are medians over rounds; `fraction_of_stream` is the median of the per-round ratios. All buffers, the yardstick's, ours
and the other optimizers', are memory like the engine's: page-aligned, in huge pages where the system has them.
"""

from __future__ import annotations

import contextlib
import importlib
import json as json_module
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from optimizer_cpu import kernels, native
from optimizer_cpu.formats import format_names, get_format
from optimizer_cpu.reference import AdamWHyper
from swap.budget import Budget
from swap.slabs import HostPool

DEFAULT_ELEMENTS = 32 * 1024 * 1024
DEFAULT_ROUNDS = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One measured case; bytes count each plane's reads and writes once."""

    name: str
    state_format: str | None
    grad_dtype: str
    threads: int
    parameters_per_s: float
    bytes_per_parameter: float
    bytes_per_s: float
    fraction_of_stream: float


@dataclass(slots=True)
class _Case:
    name: str
    state_format: str | None
    grad_dtype: torch.dtype
    threads: int
    bytes_per_parameter: float
    call: Callable[[int], object]
    elements: int


def traffic(state_format: str, weight_dtype: torch.dtype, grad_dtype: torch.dtype) -> float:
    """Bytes per parameter that one step must move: states read and written, gradient read, weight written.

    The weight is also read where it is part of the master (`split`, `compact`, fp32 weights).
    """
    planes = get_format(state_format).planes(weight_dtype)
    states = sum(2 * plane.dtype.itemsize / plane.group for plane in planes[1:])
    reads_weight = state_format != "fp32" or weight_dtype == torch.float32
    return states + weight_dtype.itemsize * (2 if reads_weight else 1) + grad_dtype.itemsize


def _hyper(step: int) -> AdamWHyper:
    return AdamWHyper(lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=step)


def _grad(elements: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    part = torch.randn(min(elements, 1 << 20), generator=generator).mul_(1e-2).to(dtype)
    return _memory(part.repeat(-(-elements // part.numel()))[:elements])


def _memory(source: torch.Tensor) -> torch.Tensor:
    """A copy of a flat tensor in memory like the engine's."""
    pool = HostPool(Budget({}), "host", "bench")  # the tensor's storage outlives it
    return pool.take(source.numel() * source.element_size()).view(source.dtype).copy_(source)


def _zeros(elements: int, dtype: torch.dtype) -> torch.Tensor:
    return _memory(torch.zeros(1, dtype=dtype).expand(elements))


def _ours(state_format: str, grad_dtype: torch.dtype, threads: int, elements: int) -> _Case:
    planes = {
        plane.name: _zeros(plane.numel(elements), plane.dtype)
        for plane in get_format(state_format).planes(torch.bfloat16)
    }
    weight = _grad(elements, torch.float32)
    kernels.load_(state_format, planes, master=weight)
    grad = _grad(elements, grad_dtype)

    def call(step: int) -> None:
        kernels.set_threads(threads)
        kernels.step_(state_format, planes, grad=grad, hyper=_hyper(step))

    return _Case(
        name="offload",
        state_format=state_format,
        grad_dtype=grad_dtype,
        threads=threads,
        bytes_per_parameter=traffic(state_format, torch.bfloat16, grad_dtype),
        call=call,
        elements=elements,
    )


def _with_copies(name: str, make: Callable[[torch.nn.Parameter], Any], threads: int, elements: int) -> _Case:
    """An optimizer on fp32 tensors between the copy of bf16 gradients in and of bf16 weights out."""
    parameter = torch.nn.Parameter(_grad(elements, torch.float32))
    parameter.grad = _zeros(elements, torch.float32)
    weight = _zeros(elements, torch.bfloat16)
    grad = _grad(elements, torch.bfloat16)
    optimizer = make(parameter)

    def call(step: int) -> None:
        torch.set_num_threads(threads)
        assert parameter.grad is not None
        parameter.grad.copy_(grad)
        optimizer.step()
        weight.copy_(parameter.detach())

    call(1)
    state = optimizer.state[parameter]
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.numel() == elements:
            state[key] = _memory(value)

    # fp32 AdamW moves 28 bytes; the copies 2 + 4 and 4 + 2.
    return _Case(
        name=name,
        state_format=None,
        grad_dtype=torch.bfloat16,
        threads=threads,
        bytes_per_parameter=40.0,
        call=call,
        elements=elements,
    )


def _torch_fused(parameter: torch.nn.Parameter) -> Any:
    return torch.optim.AdamW([parameter], lr=1e-4, weight_decay=0.01, fused=True)


def _deepspeed(parameter: torch.nn.Parameter) -> Any:
    optimizer = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
    return optimizer([parameter], lr=1e-4, weight_decay=0.01, adamw_mode=True)


def _stream(elements: int, threads: int) -> Callable[[], float]:
    """Times one pass of reading and writing `elements` fp32 values in place; returns bytes per second."""
    data = _memory(torch.ones(1).expand(elements))
    backend = native.backend()

    def measure() -> float:
        start = time.perf_counter()
        if backend is None:
            data.mul_(1.0)
        else:
            backend.module.stream(backend.isa, data.data_ptr(), 1.0, elements, threads)
        return 8.0 * elements / (time.perf_counter() - start)

    return measure


def _cases(elements: int, threads: int, quick: bool) -> tuple[list[_Case], list[str]]:
    counts = [threads] if quick or threads == 1 else [1, threads]
    dtypes = [torch.bfloat16] if quick else [torch.bfloat16, torch.float32, torch.float16]
    cases = [
        _ours(fmt, dtype, count, elements)
        for fmt in format_names()
        for dtype in dtypes
        for count in counts
        if dtype == torch.bfloat16 or count == threads
    ]
    notes: list[str] = []
    for name, make in (("torch fused + copies", _torch_fused), ("DeepSpeedCPUAdam + copies", _deepspeed)):
        try:
            # DeepSpeed's logger writes to what standard output was at its import; ours is for the report alone.
            with contextlib.redirect_stdout(sys.stderr):
                case = _with_copies(name, make, threads, elements)
        except Exception as error:  # a peer that is absent or does not build is no fault of ours
            cause = (str(error).splitlines() or [""])[0]
            notes.append(f"{name}: not measured ({type(error).__name__}: {cause})")
            continue
        cases.append(case)
    return cases, notes


def measure(
    *, elements: int = DEFAULT_ELEMENTS, rounds: int = DEFAULT_ROUNDS, threads: int | None = None, quick: bool = False
) -> dict[str, Any]:
    """Measure and return the report: `stream_bytes_per_s`, `isa`, `threads`, `results`, `notes`.

    `elements` parameters per case (planes should be far larger than the last-level cache), `rounds` interleaved
    repetitions, `threads` for the multi-threaded cases (None: the kernels' default). `quick` measures bf16 gradients
    and one thread count only.
    """
    before = torch.get_num_threads()
    count = kernels.get_threads() if threads is None else threads
    try:
        cases, notes = _cases(elements, count, quick)
        streams = {n: _stream(4 * elements, n) for n in {count, *(case.threads for case in cases)}}
        seconds: list[list[float]] = [[] for _ in cases]
        fractions: list[list[float]] = [[] for _ in cases]
        rates: list[float] = []
        for index in range(rounds + 1):
            for i, case in enumerate(cases):
                stream = streams[count]()
                start = time.perf_counter()
                case.call(index + 2)
                elapsed = time.perf_counter() - start
                if index == 0:
                    continue  # first touch of pages and caches
                rates.append(stream)
                seconds[i].append(elapsed)
                fractions[i].append(case.bytes_per_parameter * case.elements / elapsed / stream)
    finally:
        torch.set_num_threads(before)
        kernels.set_threads(None)
    results = [
        Result(
            name=case.name,
            state_format=case.state_format,
            grad_dtype=str(case.grad_dtype).removeprefix("torch."),
            threads=case.threads,
            parameters_per_s=case.elements / statistics.median(times),
            bytes_per_parameter=case.bytes_per_parameter,
            bytes_per_s=case.bytes_per_parameter * case.elements / statistics.median(times),
            fraction_of_stream=statistics.median(parts),
        )
        for case, times, parts in zip(cases, seconds, fractions, strict=True)
    ]
    return {
        "stream_bytes_per_s": statistics.median(rates),
        "isa": kernels.active_isa(),
        "threads": count,
        "elements": elements,
        "rounds": rounds,
        "results": [asdict(result) for result in results],
        "notes": notes,
    }


def table(report: dict[str, Any]) -> str:
    """The report as text."""
    lines = [
        f"isa {report['isa']}, {report['threads']} threads, {report['elements']:,} parameters, "
        f"median of {report['rounds']} interleaved rounds",
        f"streaming read+write: {report['stream_bytes_per_s'] / 1e9:.1f} GB/s",
        "",
        f"{'':26}{'format':>9}{'grad':>10}{'threads':>9}{'Gparam/s':>10}{'B/param':>9}{'GB/s':>7}{'% stream':>10}",
    ]
    for row in report["results"]:
        lines.append(
            f"{row['name']:26}{row['state_format'] or '-':>9}{row['grad_dtype']:>10}{row['threads']:>9}"
            f"{row['parameters_per_s'] / 1e9:>10.2f}{row['bytes_per_parameter']:>9.3f}"
            f"{row['bytes_per_s'] / 1e9:>7.1f}{100 * row['fraction_of_stream']:>10.0f}"
        )
    return "\n".join([*lines, *report["notes"]])


def run(
    json: bool,
    *,
    elements: int = DEFAULT_ELEMENTS,
    rounds: int = DEFAULT_ROUNDS,
    threads: int | None = None,
    quick: bool = False,
) -> str:
    """Measure and return what the command prints: one JSON object, or a table."""
    for name, value, least in (("elements", elements, 4096), ("rounds", rounds, 1), ("threads", threads, 1)):
        if value is not None and value < least:
            raise ValueError(f"{name}={value} must be at least {least}")
    report = measure(elements=elements, rounds=rounds, threads=threads, quick=quick)
    return json_module.dumps(report, indent=2) if json else table(report)
