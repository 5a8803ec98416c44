"""Broken disks: one exception that names path, offset and cause, and nothing left behind."""

from __future__ import annotations

import errno
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import offload
from offload.errors import OffloadError
from swap.errors import SwapIOError
from swap.faults import FaultPlan
from tests.engine.common import decoder, token_batches
from tests.engine.resources import nothing_left_of, on_nvme, run_script, start_script

ENGINES = ("threads", "aiofiles")
DEVICES = ("cpu", "sim")
BATCH = token_batches(1)[0]


def start(folder: Path, faults: FaultPlan | None = None, **options: Any) -> offload.Engine:
    return offload.initialize(decoder(wide=True), on_nvme(folder, **options), faults=faults)


def train(engine: offload.Engine, steps: int = 3) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = engine(BATCH, labels=BATCH).loss
        losses.append(float(loss.detach()))
        engine.backward(loss)
        engine.step()
    return losses


def check_message(error: SwapIOError, folder: Path, operation: str, number: int) -> None:
    text = str(error)
    assert error.operation == operation and error.errno == number
    assert error.path.startswith(str(folder)) and error.path in text
    assert f"at offset {error.offset}" in text and os.strerror(number) in text and errno.errorcode[number] in text


# Refused before the run


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_path_without_write_permission_is_refused(swap_folder: Path) -> None:
    swap_folder.chmod(0o500)
    try:
        with nothing_left_of(swap_folder), pytest.raises(ValueError, match=r"not writable.*memory\.nvme_paths"):
            start(swap_folder)
    finally:
        swap_folder.chmod(0o700)


@pytest.mark.parametrize("kind", ["read-only", "missing", "file"])
def test_unusable_paths_are_refused_and_leave_nothing(kind: str, tmp_path: Path, swap_folder: Path) -> None:
    path = {"read-only": Path("/proc/self"), "missing": tmp_path / "none", "file": tmp_path / "plain"}[kind]
    (tmp_path / "plain").touch()
    with nothing_left_of(swap_folder), pytest.raises(ValueError, match=r"memory\.nvme_paths") as raised:
        start(path)
    assert str(path) in str(raised.value)


def test_one_bad_path_among_several_is_refused_and_leaves_nothing(tmp_path: Path, swap_folder: Path) -> None:
    config = on_nvme(swap_folder)
    config["memory"]["nvme_paths"] = [str(swap_folder), str(tmp_path / "missing")]
    with nothing_left_of(swap_folder), pytest.raises(ValueError, match="missing"):
        offload.initialize(decoder(), config)


@pytest.mark.parametrize("direct", ["auto", False])
@pytest.mark.parametrize("engine", ENGINES)
def test_tmpfs_works_direct_or_not(engine: str, direct: str | bool, swap_folder: Path) -> None:
    """Newer kernels have direct I/O on tmpfs: what is possible is probed, and both ways give the same numbers."""
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK):
        pytest.skip("no /dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="offload-test-", dir=shm))
    try:
        with (
            nothing_left_of(folder),
            start(folder, engine=engine, swap={"direct": direct}) as run,
            start(swap_folder) as other,
        ):
            assert direct == "auto" or "buffered I/O" in run.describe()
            assert train(run) == train(other)
    finally:
        folder.rmdir()


# Faults in mid-run


def fail_in_forward(engine: offload.Engine, plan: FaultPlan, arm: Callable[[], Any]) -> None:
    arm()
    engine(BATCH, labels=BATCH)


def fail_in_backward(engine: offload.Engine, plan: FaultPlan, arm: Callable[[], Any]) -> None:
    loss = engine(BATCH, labels=BATCH).loss
    arm()
    engine.backward(loss)


def fail_in_plain_backward(engine: offload.Engine, plan: FaultPlan, arm: Callable[[], Any]) -> None:
    loss = engine(BATCH, labels=BATCH).loss
    arm()
    loss.backward()


def fail_in_step(engine: offload.Engine, plan: FaultPlan, arm: Callable[[], Any]) -> None:
    engine.backward(engine(BATCH, labels=BATCH).loss)
    arm()
    engine.step()
    engine.synchronize()


PHASES = {
    "forward": fail_in_forward,
    "backward": fail_in_backward,
    "loss.backward": fail_in_plain_backward,
    "step": fail_in_step,
}
CAUSES = [
    ("read", errno.EIO, "forward"),
    ("read", errno.EIO, "backward"),
    ("read", errno.EIO, "loss.backward"),
    ("read", errno.EIO, "step"),
    ("write", errno.ENOSPC, "backward"),
    ("write", errno.ENOSPC, "step"),
    ("write", errno.EIO, "loss.backward"),
    ("write", errno.EDQUOT, "step"),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("operation", "number", "phase"), CAUSES, ids=lambda v: str(v))
def test_a_fault_in_mid_run_is_one_exception_and_leaves_nothing(
    operation: str, number: int, phase: str, engine: str, device: str, swap_folder: Path
) -> None:
    plan = FaultPlan()
    with nothing_left_of(swap_folder):
        run = start(swap_folder, plan, engine=engine, device=device)
        train(run, 1)
        # A fault in a write is met at the latest when the step needs the bytes.
        with pytest.raises(SwapIOError) as raised:
            PHASES[phase](run, plan, lambda: plan.fail(operation, number))
            run.step()
            run.synchronize()
        check_message(raised.value, swap_folder, operation, number)
        for _ in range(2):
            with pytest.raises((SwapIOError, OffloadError)):
                train(run, 1)
        run.close()
        run.close()
        del run, raised


@pytest.mark.parametrize("nth", range(1, 12, 2))
@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_fault_at_any_call_of_a_step_leaves_nothing(operation: str, nth: int, swap_folder: Path) -> None:
    plan = FaultPlan()
    with nothing_left_of(swap_folder):
        run = start(swap_folder, plan, device="sim" if nth % 4 == 1 else "cpu")
        plan.fail(operation, errno.EIO, nth=plan.calls[operation] + nth, times=1)
        with pytest.raises(SwapIOError):
            train(run, 3)
        run.close()
        del run


@pytest.mark.parametrize("engine", ENGINES)
def test_a_disk_that_fills_up_while_the_model_is_stored_releases_everything(engine: str, swap_folder: Path) -> None:
    for operation in ("write", "allocate"):
        plan = FaultPlan().fail(operation, errno.ENOSPC, nth=2 if operation == "write" else 1)
        model = decoder(wide=True)
        with nothing_left_of(swap_folder):
            with pytest.raises(SwapIOError) as raised:
                offload.initialize(model, on_nvme(swap_folder, engine=engine), faults=plan)
            check_message(raised.value, swap_folder, operation, errno.ENOSPC)
            assert "memory.nvme_paths" in str(raised.value)
            del raised


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("engine", ENGINES)
def test_short_transfers_are_completed_exactly(engine: str, device: str, swap_folder: Path) -> None:
    with start(swap_folder, engine=engine) as clean:
        losses = train(clean)
        expected = {name: value.clone() for name, value in clean.named_full_parameters()}
    plan = FaultPlan()
    for nth in range(1, 60, 3):
        plan.short("read", nbytes=1000 + 512 * nth, nth=nth)
        plan.short("write", nbytes=4096 * (nth % 3) + nth, nth=nth)
    with start(swap_folder, plan, engine=engine, device=device) as run:
        assert train(run) == losses
        assert plan.injected["short"] >= 20
        assert all(torch.equal(value, expected[name]) for name, value in run.named_full_parameters())


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("operation", ["read", "write"])
def test_transfers_that_stay_short_are_an_error(operation: str, engine: str, swap_folder: Path) -> None:
    plan = FaultPlan()
    with nothing_left_of(swap_folder):
        run = start(swap_folder, plan, engine=engine)
        plan.short(operation, nbytes=0, times=None)
        with pytest.raises(SwapIOError) as raised:
            train(run)
        check_message(raised.value, swap_folder, operation, errno.EIO)
        assert ("end of file" if operation == "read" else "no progress") in str(raised.value)
        run.close()
        del run, raised


def test_an_engine_refuses_further_use_after_a_broken_step(swap_folder: Path) -> None:
    plan = FaultPlan()
    run = start(swap_folder, plan)
    with pytest.raises(SwapIOError):
        fail_in_step(run, plan, lambda: plan.fail("write", errno.ENOSPC, nth=plan.calls["write"] + 3))
    uses: list[Callable[[], Any]] = [
        lambda: run(BATCH),
        lambda: run.backward(torch.ones((), requires_grad=True)),
        run.step,
        run.optimizer.step,
        run.zero_grad,
        lambda: run.get_full("norm.weight"),
        lambda: list(run.named_full_parameters()),
        lambda: run.train_batch([{"input_ids": BATCH, "labels": BATCH}]),
    ]
    for use in uses:
        with pytest.raises(OffloadError, match=r"the engine is failed: an optimizer step or a load was cut short"):
            use()
    run.close()


@pytest.mark.parametrize("device", DEVICES)
def test_after_a_fault_that_passes_nothing_is_wrong_silently(device: str, swap_folder: Path) -> None:
    """One read fails and is caught: either the run stays refused, or its numbers are right. Never a third thing."""
    with start(swap_folder) as clean:
        losses = train(clean, 4)
    for nth in (1, 3, 6, 9):
        plan = FaultPlan()
        run = start(swap_folder, plan, device=device)
        plan.fail("read", errno.EIO, nth=plan.calls["read"] + nth, times=1)
        seen: list[float] = []
        failures = 0
        while len(seen) < 4 and failures < 6:
            try:
                run.zero_grad()
                seen += train(run, 1)
            except (SwapIOError, OffloadError):
                failures += 1
        assert seen == losses[: len(seen)] and failures
        run.close()


def test_errors_of_the_users_own_code_are_not_replaced(swap_folder: Path) -> None:
    class Mine(Exception):
        pass

    def fail(_gradient: Tensor) -> None:
        raise Mine("in a hook")

    with start(swap_folder) as run:
        output = run(BATCH, labels=BATCH)
        output.logits.register_hook(fail)
        with pytest.raises(Mine, match="in a hook"):
            run.backward(output.loss)
        run.zero_grad()
        assert run.resident_units() == []
        train(run, 1)


# Whole processes

SCRIPT = """
    import errno, os, sys
    import offload
    from swap.faults import FaultPlan
    from tests.engine.common import decoder, token_batches
    from tests.engine.resources import on_nvme

    folder, engine, device, operation, when = sys.argv[1:6]
    plan = FaultPlan()
    batch = token_batches(1)[0]
    run = offload.initialize(decoder(wide=True), on_nvme(folder, engine=engine, device=device), faults=plan)
    for step in range(1000):
        loss = run(batch, labels=batch).loss
        run.backward(loss)
        if step == 1:
            if when == "kill":
                print("ready", flush=True)
            else:
                plan.fail(operation, errno.EIO, nth=plan.calls[operation] + int(when))
        run.step()
"""


@pytest.mark.parametrize(
    ("operation", "when", "engine", "device"),
    [("read", "1", "threads", "sim"), ("write", "2", "aiofiles", "cpu")],
)
def test_the_process_ends_by_itself_with_the_error(
    operation: str, when: str, engine: str, device: str, swap_folder: Path
) -> None:
    """The script closes nothing: the interpreter's exit alone must neither hang nor leave anything."""
    ran = run_script(SCRIPT, str(swap_folder), engine, device, operation, when)
    assert ran.returncode == 1, ran.stderr
    last = ran.stderr.strip().splitlines()[-1]
    assert last.startswith("swap.errors.SwapIOError: swap") and str(swap_folder) in last and "EIO" in last
    assert list(swap_folder.iterdir()) == []


@pytest.mark.parametrize(
    ("signum", "engine"),
    [(signal.SIGKILL, "aiofiles"), (signal.SIGINT, "threads")],
    ids=lambda value: getattr(value, "name", value),
)
def test_signals_in_mid_run_leave_nothing_on_disk(signum: signal.Signals, engine: str, swap_folder: Path) -> None:
    process = start_script(SCRIPT, str(swap_folder), engine, "cpu", "read", "kill")
    assert process.stdout is not None and process.stderr is not None
    try:
        assert process.stdout.readline().strip() == "ready"
        time.sleep(0.05)
        process.send_signal(signum)
        process.wait(timeout=30)
    finally:
        process.kill()
        process.wait()
        errors = process.stderr.read()
        process.stdout.close()
        process.stderr.close()
    if signum is signal.SIGINT:
        assert "KeyboardInterrupt" in errors
    else:
        assert process.returncode == -signum
    assert list(swap_folder.iterdir()) == []


def test_no_thread_of_the_engine_keeps_the_interpreter_alive(swap_folder: Path) -> None:
    before = set(threading.enumerate())
    with start(swap_folder, device="sim") as run:
        train(run, 1)
        ours = [t for t in threading.enumerate() if t not in before]
        assert all(t.daemon for t in ours), [t.name for t in ours if not t.daemon]
