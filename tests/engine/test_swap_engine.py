"""Training through each I/O engine while the disk misbehaves, next to other runs, and until the process is killed."""

from __future__ import annotations

import errno
import gc
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from swap import SwapIOError
from swap.faults import FaultPlan
from swap.files import find_leftovers, remove_leftovers
from swap.native import probe_io_uring
from tests import programs
from tests.engine.common import decoder, token_batches
from tests.engine.resources import (
    descriptors,
    nothing_left_of,
    on_nvme,
    pinned,
    rss,
    start_script,
    threads,
    tiny,
)

ENGINES = ("io_uring", "threads", "aiofiles")
BATCH = token_batches(1)[0]

pytestmark = pytest.mark.skipif(not probe_io_uring().usable, reason=f"io_uring: {probe_io_uring().text}")


def train(engine: offload.Engine, steps: int = 3) -> list[Any]:
    """Losses and, at the end, all parameters."""
    found: list[Any] = []
    for _ in range(steps):
        loss = engine(BATCH, labels=BATCH).loss
        found.append(float(loss.detach()))
        engine.backward(loss)
        engine.step()
    return [*found, *(value for _, value in sorted(engine.named_full_parameters()))]


def same(found: list[Any], expected: list[Any]) -> bool:
    return len(found) == len(expected) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(found, expected, strict=True)
    )


def run(folder: Path, engine: str, faults: FaultPlan | None = None, **swap: Any) -> list[Any]:
    config = on_nvme(folder, engine, swap={"block": 4096, **swap})
    with offload.initialize(decoder(), config, faults=faults) as running:
        return train(running)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("seed", "burst"), [(1, 0), (2, 12288)])
def test_delays_and_reorderings_of_every_request_change_no_bit(
    engine: str, seed: int, burst: int, swap_folder: Path
) -> None:
    expected = run(swap_folder, "threads")
    plan = FaultPlan(seed)
    for operation in ("read", "write"):
        plan.delay(0.002, operation=operation).reorder(0.002, operation=operation)
    assert same(run(swap_folder, engine, plan, checksum=True, queue_depth=8, burst=burst), expected)
    assert plan.injected["delay"] == plan.injected["reorder"] > 500


FAULTS = {
    "EIO": (lambda plan, operation: plan.fail(operation, errno.EIO, nth=40), errno.EIO),
    "ENOSPC": (lambda plan, operation: plan.fail(operation, errno.ENOSPC, nth=40), errno.ENOSPC),
    "stuck": (lambda plan, operation: plan.stick(operation, nth=40), errno.ETIMEDOUT),
    "flip": (lambda plan, operation: plan.flip(operation, nth=40), errno.EBADMSG),
    "never": (lambda plan, operation: plan.short(operation, nbytes=0, nth=40, times=None), errno.EIO),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("kind", FAULTS)
def test_each_fault_at_each_kind_of_request_is_one_exception(
    kind: str, operation: str, engine: str, swap_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swap.store._CLOSE_SECONDS", 0.2)
    arm, number = FAULTS[kind]
    plan = arm(FaultPlan(7), operation)
    config = on_nvme(swap_folder, engine, swap={"block": 4096, "checksum": True, "timeout": 0.5})
    before = threads(), len(descriptors())
    error = first_error(config, plan)
    plan.release()
    assert error.errno == number and error.nbytes > 0
    text = str(error)
    assert str(swap_folder) in text and f"offset {error.offset}" in text and errno.errorcode[number] in text
    # A stuck call outlives the engine's close: what it holds goes when it returns.
    deadline = time.monotonic() + 20
    while (not threads() <= before[0] or len(descriptors()) > before[1]) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert threads() <= before[0] and len(descriptors()) <= before[1]
    assert list(swap_folder.iterdir()) == []


def first_error(config: dict[str, Any], plan: FaultPlan) -> SwapIOError:
    """What ends a training run under ``plan``, without the frames that raised it."""
    try:
        with offload.initialize(decoder(), config, faults=plan) as running:
            train(running, 20)
    except SwapIOError as error:
        return error.clone()
    raise AssertionError("the run went well")


def test_a_short_transfer_changes_nothing(swap_folder: Path) -> None:
    expected = run(swap_folder, "threads")
    for nbytes in (100, 4096, 5000):
        plan = FaultPlan(3)
        for operation in ("read", "write"):
            # Fewer than the attempts without progress that end a request: all of them may meet the same one.
            plan.short(operation, nbytes=nbytes, nth=30, times=8)
        assert same(run(swap_folder, "io_uring", plan, block=16384), expected)
        assert plan.injected["short"] == 16


def test_two_engines_of_one_process_train_at_once(swap_folder: Path) -> None:
    expected = run(swap_folder, "threads")
    configs = [on_nvme(swap_folder, "io_uring", swap={"checksum": True}) for _ in range(2)]
    first, second = (offload.initialize(decoder(), config) for config in configs)
    with first, second:
        losses: list[list[float]] = [[], []]
        for _ in range(3):
            for index, engine in enumerate((first, second)):
                loss = engine(BATCH, labels=BATCH).loss
                losses[index].append(float(loss.detach()))
                engine.backward(loss)
                engine.step()
        assert losses[0] == losses[1] == expected[:3]


TRAINING = """
    import sys, time, torch, offload
    from tests.engine.common import decoder, token_batches
    from tests.engine.resources import on_nvme
    torch.set_num_threads(1)
    batch = token_batches(1)[0]
    config = on_nvme(sys.argv[1], "io_uring", swap={"checksum": True})
    with offload.initialize(decoder(), config) as engine:
        step = 0
        while True:
            engine.backward(engine(batch, labels=batch).loss)
            engine.step()
            step += 1
            if step == 2:
                print("training", flush=True)
"""


@pytest.mark.timeout(100)
def test_a_neighbour_killed_in_mid_training_changes_nothing(swap_folder: Path) -> None:
    expected = run(swap_folder, "threads")
    status = os.statvfs(swap_folder)
    neighbour = start_script(TRAINING, str(swap_folder))
    try:
        assert neighbour.stdout is not None and neighbour.stdout.readline().strip() == "training"
        config = on_nvme(swap_folder, "io_uring", swap={"checksum": True})
        with offload.initialize(decoder(), config) as engine:
            loss = engine(BATCH, labels=BATCH).loss
            os.kill(neighbour.pid, signal.SIGKILL)
            neighbour.wait(20)
            first = float(loss.detach())
            engine.backward(loss)
            engine.step()
            assert same([first, *train(engine, 2)], expected)
            remove_leftovers(swap_folder)
            assert find_leftovers(swap_folder) == []
        assert list(swap_folder.iterdir()) == []  # its anonymous file went with it
        assert os.statvfs(swap_folder).f_files == status.f_files
    finally:
        neighbour.kill()
        neighbour.communicate()


IN_FLIGHT = """
    import os, signal, sys, threading, time, torch
    from swap import SwapStore, HostPool, Budget
    path, how, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
    store = SwapStore([path], owner="exit")
    extent = store.allocate(size)
    memory = HostPool(Budget({}), "host", "test").take(64 << 20)
    tickets = [store.write(extent, memory, offset=at) for at in range(0, size, memory.numel())]
    print("in flight", store.engine, flush=True)
    if how == "exception":
        raise RuntimeError("on purpose")
    if how == "wait":
        for _ in range(600):  # a signal between the print and one long sleep would be seen after the sleep only
            time.sleep(0.1)
"""


TORCH_ALONE = """
    import torch
    print("in flight", flush=True)
    raise RuntimeError("on purpose")
"""


def time_to_end(folder: Path, how: str, size: int, script: str = IN_FLIGHT) -> tuple[float, int]:
    """(seconds from the signal, or the print, to the end of the process, exit status)."""
    process = start_script(script, str(folder), "wait" if how.startswith("SIG") else how, str(size))
    try:
        assert process.stdout is not None and process.stdout.readline().startswith("in flight")
        if how.startswith("SIG"):
            process.send_signal(signal.Signals[how])
        begun = time.monotonic()
        code = process.wait(60)
        return time.monotonic() - begun, code
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("how", ["success", "exception", "SIGINT", "SIGTERM"])
def test_a_process_ends_with_io_in_flight(how: str, swap_folder: Path) -> None:
    _, code = time_to_end(swap_folder, how, 512 << 20)
    assert (code == 0) == (how == "success")
    assert list(swap_folder.iterdir()) == []


@pytest.mark.acceptance
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["success", "exception", "SIGINT", "SIGTERM"])
def test_a_process_ends_with_eight_gigabytes_in_flight(how: str, swap_folder: Path) -> None:
    """The time is printed, to be compared with two seconds; machines are too noisy to assert it.

    Beside it that of a process that has imported torch and does nothing: the interpreter's own part.
    """
    free = os.statvfs(swap_folder)
    if free.f_bavail * free.f_frsize < 12 << 30:
        pytest.skip("no room for 8 GiB")
    seconds, _ = time_to_end(swap_folder, how, 8 << 30)
    alone, _ = time_to_end(swap_folder, "exception", 0, TORCH_ALONE)
    print(f"{how}: {seconds:.2f} s, torch alone {alone:.2f} s", file=sys.stderr)
    assert list(swap_folder.iterdir()) == []


@pytest.mark.acceptance
@pytest.mark.timeout(1800)
def test_two_thousand_steps_keep_everything_constant(swap_folder: Path) -> None:
    config = on_nvme(swap_folder, "io_uring", swap={"checksum": True})
    with offload.initialize(tiny(), config) as engine:

        def steps(count: int) -> None:
            for _ in range(count):
                engine.backward(engine(torch.ones(2, 8)).sum())
                engine.step()

        def held() -> tuple[Any, ...]:
            gc.collect()
            store = engine._memory.store
            assert store is not None
            used = (engine.memory().current, store.file_bytes, store.used_bytes)
            return threads(), len(descriptors()), *used, pinned()

        steps(200)
        before, memory = held(), rss()
        staging = engine._memory.staging
        assert staging is not None
        assert before[-1][0] >= staging.memory.numel(), "the staging pool is registered with the ring"
        steps(2000)
        assert held() == before
        assert abs(rss() - memory) < 0.01 * memory


def test_a_path_on_a_full_disk_is_refused_with_the_remedy(swap_folder: Path) -> None:
    config = on_nvme(swap_folder, "io_uring")
    plan = FaultPlan().fail("allocate", errno.ENOSPC)
    with (
        nothing_left_of(swap_folder),
        pytest.raises(SwapIOError, match=r"ENOSPC.*memory\.nvme") as caught,
    ):
        offload.initialize(decoder(), config, faults=plan)
    assert caught.value.operation == "allocate"


def test_the_doctor_announces_what_a_run_then_does(swap_folder: Path) -> None:
    found = programs.run("-m", "offload", "doctor", "--json", str(swap_folder), "/dev/shm", "/nowhere")
    report = json.loads(found.stdout)
    by_name = {check["name"]: check for check in report["checks"]}
    assert found.returncode == 1 and report["status"] == "failure", found
    assert by_name["swap path /nowhere"]["status"] == "failure"
    assert by_name["swap path /dev/shm"]["status"] == "warning" and by_name["swap path /dev/shm"]["remedy"]
    assert by_name["io_uring"]["detail"].startswith("usable")
    assert all(check["remedy"] for check in report["checks"] if check["status"] != "ok")
    for name in ("kernel", "memlock", "host memory", "NUMA", "processors", "kernels", "device"):
        assert name in by_name, name
