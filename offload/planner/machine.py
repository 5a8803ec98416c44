"""What this machine does, measured: memory stream, optimizer kernel, operations, drives, links."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map

from offload.planner.floors import Rates
from offload.planner.shapes import Operation, TensorShape
from optimizer_cpu import AdamWHyper, kernels, native
from optimizer_cpu.formats import get_format
from swap.devices import Device
from swap.errors import SwapError, SwapPathError
from swap.measure import Bench, Setting, mixing_penalty
from swap.tuning import PROBE_BYTES, PROBE_REQUEST, DriveProbe, tune

STREAM_ELEMENTS = 24 << 20
KERNEL_ELEMENTS = 4 << 20
LINK_BYTES = 64 << 20
LARGEST_OPERATION = 768 << 20
"""Bytes of arguments and results above which an operation is estimated instead of run."""
EVICTED = 96 << 20
"""Bytes that go through the caches before a matrix product is timed."""
PATTERN_SECONDS = 0.3
"""For which a drive is measured in each pattern."""
_CALL_SECONDS = 6e-6
"""Python and dispatch around one operation, beyond what running it by itself takes."""


def median_seconds(
    call: Callable[[], object], *, repeats: int = 3, warm: int = 1, before: Callable[[], object] | None = None
) -> float:
    """Median wall time of `call` after `warm` untimed ones; `before` runs, untimed, before each."""
    found = []
    for number in range(warm + repeats):
        if before is not None:
            before()
        start = time.perf_counter()
        call()
        if number >= warm:
            found.append(time.perf_counter() - start)
    return statistics.median(found)


def stream_rate(elements: int = STREAM_ELEMENTS, *, repeats: int = 5) -> float:
    """Bytes per second of reading and writing fp32 memory in place, with the optimizer kernel's threads."""
    data = torch.ones(elements)
    backend = native.backend()
    threads = kernels.get_threads()

    def call() -> None:
        if backend is None:
            data.mul_(1.0)
        else:
            backend.module.stream(backend.isa, data.data_ptr(), 1.0, elements, threads)

    return 8.0 * elements / median_seconds(call, repeats=repeats)


def kernel_seconds(
    state_format: str, dtype: torch.dtype, gradient: torch.dtype, elements: int = KERNEL_ELEMENTS
) -> float:
    """Seconds of one AdamW step for one parameter element on the CPU."""
    planes = {p.name: torch.zeros(p.numel(elements), dtype=p.dtype) for p in get_format(state_format).planes(dtype)}
    kernels.load_(state_format, planes, master=torch.rand(elements))
    grad = torch.rand(elements).to(gradient)

    def call() -> None:
        hyper = AdamWHyper(lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=2)
        kernels.step_(state_format, planes, grad=grad, hyper=hyper)

    return median_seconds(call, repeats=5) / elements


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationCosts:
    """Seconds of each kind of operation by key, and what the matrix products among them came to."""

    seconds: Mapping[str, float]
    flops_per_s: float

    def total(self, counts: Mapping[str, int]) -> float:
        """Seconds of `counts` calls each."""
        return sum((self.seconds[key] + _CALL_SECONDS) * count for key, count in counts.items())


def measure_operations(
    operations: Mapping[str, Operation], *, device: torch.device, stream: float, repeats: int = 3
) -> OperationCosts:
    """Runs each kind of operation on numbers of its own, and times it.

    One that is too large (`LARGEST_OPERATION`) or does not run on arbitrary numbers is taken to move its bytes at
    `stream` bytes per second and to compute at the rate of the others.
    """
    seconds: dict[str, float] = {}
    left: list[Operation] = []
    evict = torch.zeros(EVICTED // 4) if device.type == "cpu" else None
    for operation in operations.values():
        found = None if operation.nbytes > LARGEST_OPERATION else _timed(operation, device, repeats, evict)
        if found is None:
            left.append(operation)
        else:
            seconds[operation.key] = found
    flops = sum(operations[key].flops for key in seconds)
    busy = sum(took for key, took in seconds.items() if operations[key].flops)
    rate = flops / busy if busy else 0.0
    for operation in left:
        compute = operation.flops / rate if rate else 0.0
        seconds[operation.key] = max(compute, operation.nbytes / stream)
    return OperationCosts(seconds=seconds, flops_per_s=rate)


def _timed(operation: Operation, device: torch.device, repeats: int, evict: torch.Tensor | None) -> float | None:
    """Seconds of an operation, None if it does not run. A matrix product reads weights that no cache holds: before it
    `evict` is passed through the caches.
    """
    try:
        args, kwargs = tree_map(lambda leaf: _made(leaf, device), operation.arguments)

        def call() -> None:
            operation.function(*args, **kwargs)
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        with torch.no_grad():
            before = (lambda: evict.add_(1.0)) if evict is not None and operation.flops else None
            return median_seconds(call, repeats=repeats, before=before)
    except (RuntimeError, IndexError, TypeError, ValueError):
        return None


def _made(leaf: Any, device: torch.device) -> Any:
    if isinstance(leaf, torch.device):
        return device
    if not isinstance(leaf, TensorShape):
        return leaf
    value = torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device=device)
    if not leaf.dtype.is_floating_point:
        return value.zero_()  # indices: the only value that is always in range
    # Overlapping views cannot be filled in place; their storage can.
    whole = torch.empty(0, dtype=leaf.dtype, device=device).set_(value.untyped_storage())
    whole.uniform_(-1, 1)
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """The drives under the swap paths together, in bytes per second, and what they and the cores lose to each other.

    `compute_beside`: times as long that matrix products take while the drives are busy; `disk_beside`: times as long
    that the drives take while the processor multiplies. Drives whose requests are completed on the cores that compute
    lose most.
    """

    read: float
    write: float
    mixed: float
    compute_beside: float = 1.0
    disk_beside: float = 1.0

    @property
    def mixing(self) -> float:
        """delta: 0 duplex, 1 half-duplex."""
        return mixing_penalty(self.read, self.write, self.mixed)


def disk_of(paths: Sequence[str], engine: str, *, shared_cores: bool) -> Disk | None:
    """The drives under `paths` as they are now, measured for about a second each with the settings that suit them.

    What was found at a drive's first use gives the settings only: the rates of a drive that others use too differ from
    hour to hour. Where a measurement has no room, the rates found then. None where nothing is known. `shared_cores`:
    whether the model computes on the cores that serve the drives; else nothing is lost to each other.
    """
    tuning = tune(paths, engine=engine) if paths else None
    if tuning is None:
        return None
    setting = Setting(engine=engine, block=tuning.block, queue_depth=tuning.queue_depth)
    found = [_measured(path, setting, known) for path, known in zip(paths, tuning.drives, strict=True)]
    read, write, mixed = (sum(rates) for rates in zip(*found, strict=True))
    compute_beside, disk_beside = _beside(paths, setting) if shared_cores else (1.0, 1.0)
    return Disk(read=read, write=write, mixed=mixed, compute_beside=compute_beside, disk_beside=disk_beside)


def _measured(path: str, setting: Setting, known: DriveProbe) -> tuple[float, float, float]:
    """Bytes per second of reads, writes and both."""
    try:
        with Bench([path], setting, nbytes=PROBE_BYTES, request=PROBE_REQUEST) as bench:
            bench.run("write")
            read, write, mixed = (bench.run(p, seconds=PATTERN_SECONDS).bytes_per_s for p in ("read", "write", "mixed"))
    except (SwapError, SwapPathError):
        return known.read_bytes_per_s, known.write_bytes_per_s, known.mixed_bytes_per_s
    return read, write, mixed


def _beside(paths: Sequence[str], setting: Setting) -> tuple[float, float]:
    """How many times slower matrix products and mixed traffic of all drives are beside each other than alone."""
    left, right = torch.rand(256, 1024), torch.rand(1024, 4096)

    def products(done: Callable[[], bool]) -> float:
        """A product's seconds, over as many as there are until `done`."""
        count, start = 0, time.perf_counter()
        while not count or not done():
            torch.mm(left, right)
            count += 1
        return (time.perf_counter() - start) / count

    def for_a_while() -> float:
        until = time.perf_counter() + PATTERN_SECONDS
        return products(lambda: time.perf_counter() > until)

    try:
        with (
            Bench(paths, setting, nbytes=PROBE_BYTES, request=PROBE_REQUEST) as bench,
            ThreadPoolExecutor(1, thread_name_prefix="offload-probe") as thread,
        ):
            bench.run("write")
            disk_before, compute_before = bench.run("mixed", seconds=PATTERN_SECONDS), for_a_while()
            traffic = thread.submit(bench.run, "mixed", seconds=2 * PATTERN_SECONDS)
            compute, disk = products(traffic.done), traffic.result()
            # Before and after, so that another process that comes or goes is not taken for either.
            disk_after, compute_after = bench.run("mixed", seconds=PATTERN_SECONDS), for_a_while()
    except (SwapError, SwapPathError):
        return 1.0, 1.0
    disk_alone = (disk_before.bytes_per_s + disk_after.bytes_per_s) / 2
    compute_alone = (compute_before + compute_after) / 2
    return max(1.0, compute / compute_alone), max(1.0, disk_alone / disk.bytes_per_s)


def link_rate(device: Device) -> float:
    """Bytes per second from host to device; 0 where the device is the host."""
    if device.aliases_host:
        return 0.0
    nbytes = min(LINK_BYTES, device.memory_info()[0] // 4)
    source, target = torch.empty(nbytes, dtype=torch.uint8), device.empty(nbytes, what="probe of the link")
    return nbytes / median_seconds(lambda: device.copy_in(target, source).wait())


def rates_of(stream: float, disk: Disk | None, link: float, *, aliases_host: bool) -> Rates:
    """The rates for floors."""
    return Rates(
        stream=stream,
        disk_read=disk.read if disk else 0.0,
        disk_write=disk.write if disk else 0.0,
        mixing=disk.mixing if disk else 1.0,
        link=link,
        shared_cores=aliases_host,
        compute_beside=disk.compute_beside if disk else 1.0,
        disk_beside=disk.disk_beside if disk else 1.0,
    )
