"""Engines open, close, are forgotten and are interrupted, and nothing is left of them."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import offload
from offload.errors import OffloadError
from swap.errors import SwapIOError
from swap.faults import FaultPlan
from tests.engine.common import decoder, token_batches
from tests.engine.resources import descriptors, nothing_left_of, on_nvme, rss, start_script, threads, tiny

ENGINES = ("threads", "aiofiles")
DEVICES = ("cpu", "sim")


def open_tiny(folder: Path, **options: Any) -> offload.Engine:
    return offload.initialize(tiny(), on_nvme(folder, **options))


def step(engine: offload.Engine, x: Tensor | None = None) -> float:
    loss = engine(torch.ones(2, 8) if x is None else x).square().mean()
    engine.backward(loss)
    assert engine.step().stepped
    return float(loss.detach())


@pytest.mark.parametrize("device", DEVICES)
def test_two_hundred_engines_leave_nothing(device: str, swap_folder: Path) -> None:
    def one(number: int) -> None:
        with open_tiny(swap_folder, engine=ENGINES[number % 2], device=device) as engine:
            if number % 10 == 0:
                step(engine)

    count = 200 if device == "cpu" else 40
    for number in range(20):
        one(number)
    gc.collect()
    before, memory = (threads(), len(descriptors())), rss()
    for number in range(count):
        one(number)
    gc.collect()
    assert threads() <= before[0] and len(descriptors()) <= before[1]
    assert rss() - memory < 24 << 20
    assert list(swap_folder.iterdir()) == []


@pytest.mark.parametrize("device", DEVICES)
def test_hundreds_of_steps_keep_everything_constant(device: str, swap_folder: Path) -> None:
    count = 250 if device == "cpu" else 40
    with open_tiny(swap_folder, device=device) as engine:
        # The first half also fills what the process's heap has given back earlier; a leak would go on in the second.
        for _ in range(count):
            step(engine)
        gc.collect()
        before, memory = (threads(), len(descriptors()), engine.memory().current), rss()
        for _ in range(count):
            step(engine)
        gc.collect()
        after = threads(), len(descriptors()), engine.memory().current
        assert after[0] <= before[0] and after[1] <= before[1] and after[2] == before[2]
        assert engine.resident_units() == [] and rss() - memory < 24 << 20
        assert engine.counters()["steps"] == 2 * count


def test_close_is_idempotent_and_also_the_end_of_a_context(swap_folder: Path) -> None:
    engine = open_tiny(swap_folder)
    with engine as same:
        assert same is engine
        step(engine)
    engine.close()
    engine.close()
    with pytest.raises(ZeroDivisionError), open_tiny(swap_folder) as other:
        raise ZeroDivisionError
    with pytest.raises(OffloadError, match="the engine is closed"):
        other.step()


def test_use_after_close_is_a_clear_error(swap_folder: Path) -> None:
    model = tiny()
    engine = offload.initialize(model, on_nvme(swap_folder))
    loss = engine(torch.ones(2, 8)).sum()
    parameter = model[0].weight
    optimizer = engine.optimizer
    engine.close()
    uses: list[Callable[[], Any]] = [
        lambda: engine(torch.ones(2, 8)),
        lambda: engine.backward(loss),
        engine.step,
        engine.zero_grad,
        optimizer.step,
        lambda: engine.get_full("0.weight"),
        lambda: engine.gathered().__enter__(),
        lambda: list(engine.named_full_parameters()),
        lambda: engine.clip_grad_norm_(1.0),
        lambda: parameter + 1,
        lambda: parameter.sum(),
        lambda: parameter.data,
        lambda: model(torch.ones(2, 8)),
        lambda: parameter.detach(),
        lambda: loss.backward(),
        lambda: model.state_dict()["0.weight"].clone(),
    ]
    for number, use in enumerate(uses):
        with pytest.raises((OffloadError, RuntimeError), match="closed") as raised:
            use()
        assert isinstance(raised.value, OffloadError), (number, raised.value)
    assert tuple(parameter.shape) == (8, 8) and "closed" in repr(parameter)
    assert engine.memory().current["nvme"] == {}


@pytest.mark.parametrize("device", DEVICES)
def test_a_forgotten_engine_frees_everything(device: str, swap_folder: Path) -> None:
    with nothing_left_of(swap_folder):
        engine = open_tiny(swap_folder, device=device)
        step(engine)
        store = weakref.ref(engine._memory.store)
        model = weakref.ref(engine.module)
        del engine
        gc.collect()
        assert store() is None and model() is None


def test_a_forgotten_engine_lives_as_long_as_its_model(swap_folder: Path) -> None:
    with nothing_left_of(swap_folder):
        model = tiny()
        engine = offload.initialize(model, on_nvme(swap_folder))
        step(engine)
        del engine
        gc.collect()
        assert model(torch.ones(2, 8)).shape == (2, 2)
        del model


def test_an_init_fn_that_fails_in_the_third_unit_releases_everything(swap_folder: Path) -> None:
    real: list[nn.Module] = []

    def fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            if module.weight.device.type != "meta":
                real.append(module)
                if len(real) == 3:
                    raise LookupError("no values for you")
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)

    with offload.empty_init():
        model = tiny()
    with nothing_left_of(swap_folder):
        with pytest.raises(ValueError, match=r"2 \(Linear\): its initialiser failed: no values for you"):
            offload.initialize(model, on_nvme(swap_folder), init_fn=fill)
        assert len(real) == 3
    with pytest.raises(OffloadError, match="closed"):
        model[0].weight.sum()


@pytest.mark.parametrize("operation", ["write", "allocate"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_disk_that_fails_while_storing_releases_everything(device: str, operation: str, swap_folder: Path) -> None:
    plan = FaultPlan().fail(operation, errno.ENOSPC, nth=4 if operation == "write" else 1)
    model = decoder()
    with nothing_left_of(swap_folder), pytest.raises(SwapIOError, match="ENOSPC"):
        offload.initialize(model, on_nvme(swap_folder, device=device), faults=plan)


def test_a_scheduler_that_fails_releases_everything(swap_folder: Path) -> None:
    def scheduler(_optimizer: Any) -> Any:
        raise KeyError("warmup")

    with nothing_left_of(swap_folder), pytest.raises(KeyError, match="warmup"):
        offload.initialize(tiny(), on_nvme(swap_folder), lr_scheduler=scheduler)


BATCH = token_batches(1)[0]


def losses(engine: offload.Engine, steps: int = 1) -> list[float]:
    found = []
    for _ in range(steps):
        loss = engine(BATCH, labels=BATCH).loss
        found.append(float(loss.detach()))
        engine.backward(loss)
        engine.step()
    return found


@pytest.mark.parametrize("device", DEVICES)
def test_two_engines_on_one_path_train_as_if_alone(device: str, swap_folder: Path) -> None:
    alone = []
    for seed in (0, 1):
        with offload.initialize(decoder(seed=seed), on_nvme(swap_folder, device=device)) as engine:
            alone.append(losses(engine, 4))
    first = offload.initialize(decoder(seed=0), on_nvme(swap_folder, device=device))
    second = offload.initialize(decoder(seed=1), on_nvme(swap_folder, engine="aiofiles", device=device))
    together: tuple[list[float], list[float]] = ([], [])
    for _ in range(3):
        together[0].extend(losses(first))
        together[1].extend(losses(second))
    first.close()
    together[1].extend(losses(second))
    second.close()
    assert together[0] == alone[0][:3] and together[1] == alone[1]


def test_engines_in_threads_train_while_others_open_and_close(swap_folder: Path) -> None:
    with offload.initialize(decoder(), on_nvme(swap_folder)) as engine:
        expected = losses(engine, 6)
    found: list[list[float]] = []

    def run() -> None:
        with offload.initialize(model, on_nvme(swap_folder)) as engine:
            found.append(losses(engine, 6))

    model = decoder()
    thread = threading.Thread(target=run)
    thread.start()
    while thread.is_alive():
        with open_tiny(swap_folder) as other:
            step(other)
    thread.join()
    assert found == [expected]


def test_an_engine_beside_a_data_loader_with_forked_workers(swap_folder: Path) -> None:
    inputs = torch.arange(48.0).view(6, 8) / 48
    with open_tiny(swap_folder, seed=3) as engine:
        expected = [step(engine, x) for x in inputs.split(2)]
    loader = DataLoader(TensorDataset(inputs), batch_size=2, num_workers=2, multiprocessing_context="fork")
    torch.manual_seed(0)
    with nothing_left_of(swap_folder):
        model = tiny()
        with offload.initialize(model, on_nvme(swap_folder)) as engine:
            seen = [step(engine, x) for (x,) in loader]
        del engine, model
    assert len(seen) == len(expected) == 3


def test_a_forked_child_that_exits_does_not_disturb_the_parent(swap_folder: Path) -> None:
    with offload.initialize(decoder(), on_nvme(swap_folder)) as engine:
        expected = losses(engine, 4)
    with offload.initialize(decoder(), on_nvme(swap_folder)) as engine:
        seen = losses(engine, 2)
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                engine.close()
            os._exit(0)
        os.waitpid(child, 0)
        assert seen + losses(engine, 2) == expected


def test_an_engine_can_be_closed_from_another_thread_between_steps(swap_folder: Path) -> None:
    engine = open_tiny(swap_folder)
    step(engine)
    thread = threading.Thread(target=engine.close)
    thread.start()
    thread.join()
    with pytest.raises(OffloadError, match="closed"):
        step(engine)


def test_a_model_can_be_taken_over_again_only_if_built_anew(swap_folder: Path) -> None:
    model = tiny()
    message = r"parameter 0\.weight belongs to another engine"
    with offload.initialize(model, on_nvme(swap_folder)), pytest.raises(ValueError, match=message):
        offload.initialize(model, on_nvme(swap_folder))
    with pytest.raises(ValueError, match=message):
        offload.initialize(model, on_nvme(swap_folder))


INTERRUPTED = """
    import os, sys, threading
    import offload
    from tests.engine.common import decoder, token_batches
    from tests.engine.resources import on_nvme
    from swap.faults import FaultPlan

    folder, device, close = sys.argv[1:4]
    batch = token_batches(1)[0]
    faults = FaultPlan()
    run = offload.initialize(decoder(wide=True), on_nvme(folder, device=device), faults=faults)
    try:
        for step in range(100000):
            loss = run(batch, labels=batch).loss
            run.backward(loss)
            if step == 0:
                faults.delay(0.05)  # slow disks: the signal meets the main thread in a wait
                print("ready", flush=True)
            run.step()
    finally:
        if close == "close":
            run.close()
            names = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
            print("left", names, os.listdir(folder), flush=True)
"""


@pytest.mark.parametrize(("device", "close"), [("sim", "close"), ("cpu", "forget")])
def test_control_c_in_mid_step_ends_the_process(device: str, close: str, swap_folder: Path) -> None:
    process = start_script(INTERRUPTED, str(swap_folder), device, close)
    assert process.stdout is not None and process.stderr is not None
    try:
        assert process.stdout.readline().strip() == "ready"
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert errors.strip().splitlines()[-1].startswith("KeyboardInterrupt"), errors
    assert close == "forget" or out.strip() == "left [] []"
    assert list(swap_folder.iterdir()) == []
