"""When updates are carried out changes nothing but time: not the numbers, not what anybody sees."""

from __future__ import annotations

import errno
import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from offload.config import ConfigError
from offload.errors import OffloadError, StaleWeightsError
from offload.schedule.updates import Stage, UnitUpdate
from swap.errors import SwapIOError
from swap.faults import FaultPlan

from .common import (
    CLIP,
    TIERS,
    Case,
    Reference,
    Trace,
    assert_states_equal,
    decoder,
    pairwise,
    placed,
    product,
    running,
    states_of,
    token_batches,
    two_groups,
    warmup_cosine,
)
from .resources import nothing_left_of

FACTORS: dict[str, Any] = {
    "schedule": ("barrier", "deferred"),
    "parameters": TIERS,
    "gradients": TIERS,
    "optimizer": TIERS,
    "device": ("cpu", "sim"),
    "prefetch": (0, 1, 3),
    "staging": (160 << 10, 2 << 20),
    "dtype": ("fp32", "bf16"),
    "micro_batches": (1, 4),
    "clip": (None, CLIP, 1e6),
    "bad_step": (None, 2),
    "dropout": (0.0, 0.2),
    "delay": (1e-4, 2e-3),
}
STEPS = 4  # the third may be bad


def one_run(
    row: dict[str, Any], steps: int, batch: Callable[[int, int], Tensor], loss_of: Callable[..., Tensor], step: Any
) -> list[float]:
    losses = []
    for number in range(steps):
        for k in range(row["micro_batches"]):
            torch.manual_seed(1000 * number + k)  # plain calls never touch random state
            loss = loss_of(batch(number, k)) / row["micro_batches"]
            if number == row["bad_step"] and k == row["micro_batches"] - 1:
                loss = loss * float("nan")
            losses.append(float(loss.detach()))
            step(loss, last=k == row["micro_batches"] - 1)
    return losses


def check_row(row: dict[str, Any], folder: Path, steps: int = STEPS, wide: bool = True, **options: Any) -> None:
    row = dict(row)
    batches = token_batches(steps * row["micro_batches"])
    fields = {k: v for k, v in row.items() if k not in ("micro_batches", "clip", "bad_step", "dropout")}

    def batch(number: int, k: int) -> Tensor:
        return batches[number * row["micro_batches"] + k]

    model = decoder(wide=wide, dropout=row["dropout"])
    twin = Reference(
        model,
        groups=two_groups(model),
        dtype=row["dtype"],
        max_grad_norm=row["clip"],
        lr_scheduler=warmup_cosine,
    )
    norms: list[float | None] = []

    def twin_step(loss: Tensor, *, last: bool) -> None:
        twin.backward(loss)
        if last:
            norms.append(twin.step())

    right = one_run(row, steps, batch, lambda ids: model(ids, labels=ids).loss, twin_step)
    expected = Trace(losses=right, norms=norms, states=twin.states())

    ours, found = decoder(wide=wide, dropout=row["dropout"]), []
    with running(
        ours,
        Case(**fields, wide=wide),
        folder,
        max_grad_norm=row["clip"],
        param_groups=two_groups(ours),
        lr_scheduler=warmup_cosine,
        **options,
    ) as engine:

        def step(loss: Tensor, *, last: bool) -> None:
            engine.backward(loss)
            if last:
                found.append(engine.step().grad_norm)

        losses = one_run(row, steps, batch, lambda ids: engine(ids, labels=ids).loss, step)
        assert str(losses) == str(expected.losses) and str(found) == str(expected.norms)  # NaN equals NaN as text
        assert_states_equal(states_of(engine), expected.states)


@pytest.mark.parametrize("row", pairwise(FACTORS), ids=lambda row: "-".join(str(v) for v in row.values()))
def test_every_pair_of_choices_equals_training_in_memory(row: dict[str, Any], swap_folder: Path) -> None:
    check_row(row, swap_folder)


@pytest.mark.acceptance
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("device", FACTORS["device"])
@pytest.mark.parametrize("schedule", FACTORS["schedule"])
def test_all_combinations_equal_training_in_memory(device: str, schedule: str, swap_folder: Path) -> None:
    fixed = {"device": (device,), "schedule": (schedule,), "staging": (160 << 10,), "delay": (1e-4,)}
    for number, row in enumerate(product({**FACTORS, **fixed})):
        try:
            check_row({**row, "seed": number}, swap_folder, steps=3, wide=number % 2 == 0)
        except Exception as error:
            raise AssertionError(f"{row}: {error}") from error


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_reordered_slow_transfers_change_nothing(device: str, swap_folder: Path) -> None:
    row = {key: values[0] for key, values in FACTORS.items()}
    row |= {"schedule": "deferred", "parameters": "nvme", "gradients": "nvme", "optimizer": "nvme", "device": device}
    faults = FaultPlan(seed=3).delay(2e-3)
    check_row(row, swap_folder, steps=3, faults=faults)


# What is chosen


@pytest.mark.parametrize(
    ("case", "options", "name", "reason"),
    [
        (placed("cpu", "nvme"), {}, "deferred", "max_grad_norm"),
        (placed("cpu", "nvme"), {"max_grad_norm": None}, "deferred", "check_finite"),
        (placed("cpu", "nvme"), {"max_grad_norm": None, "optimizer": {"check_finite": False}}, "eager", "no setting"),
        (placed("cpu", "host"), {}, "barrier", "rest where the update computes"),
        (placed("sim", "host"), {}, "deferred", "max_grad_norm"),
        (placed("sim", "device"), {}, "barrier", "rest where the update computes"),
        (placed("cpu", "nvme", schedule="barrier"), {}, "barrier", "as configured"),
        (placed("cpu", "nvme", dtype="fp16"), {"max_grad_norm": None, "optimizer": {"check_finite": False}},
         "deferred", "fp16"),
    ],
)  # fmt: skip
def test_auto_chooses_and_says_why(
    case: Case, options: dict[str, Any], name: str, reason: str, swap_folder: Path
) -> None:
    with running(decoder(), case, swap_folder, **options) as engine:
        lines = [line for line in engine.describe().splitlines() if line.startswith("optimizer step: ")]
        assert len(lines) == 1 and lines[0].startswith(f"optimizer step: {name} (") and reason in lines[0]


def test_eager_is_refused_where_the_norm_is_needed(swap_folder: Path) -> None:
    with nothing_left_of(swap_folder), pytest.raises(ConfigError, match=r"eager.*max_grad_norm.*'deferred'"):
        running(decoder(), placed("cpu", "nvme", schedule="eager"), swap_folder).__enter__()


# What is pending, and who sees it


class _Held:
    """Keeps updates from being carried out until released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate = threading.Event()
        self.finished: list[int] = []
        finish = UnitUpdate.finish_next

        def wait_first(update: UnitUpdate, *arguments: Any) -> None:
            self.gate.wait(20)
            finish(update, *arguments)
            self.finished.append(update.index)

        monkeypatch.setattr(UnitUpdate, "finish_next", wait_first)


def stepped(engine: offload.Engine, model: Reference | None = None, seed: int = 1) -> None:
    """One forward, backward and step on both."""
    ids = token_batches(1, seed=seed)[0]
    engine.backward(engine(ids, labels=ids).loss)
    engine.step()
    if model is not None:
        model.backward(model.model(ids, labels=ids).loss)
        model.step()


def deferred(swap_folder: Path, **changes: Any) -> Any:
    case = placed(changes.pop("device", "cpu"), "nvme", wide=True, schedule="deferred", **changes)
    return running(decoder(wide=True), case, swap_folder)


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_step_does_not_wait_for_the_updates(device: str, swap_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = _Held(monkeypatch)
    with deferred(swap_folder, device=device) as engine:
        stepped(engine)
        assert not engine._updates.idle and held.finished == []
        held.gate.set()
        engine.synchronize()
        assert engine._updates.idle and held.finished


def _gathered(engine: offload.Engine, name: str) -> Tensor:
    with engine.gathered(name):
        return dict(engine.module.named_parameters())[name].detach().clone()


def first_matrix(model: nn.Module) -> str:
    return next(name for name, p in model.named_parameters() if name.startswith("layers.1.") and p.dim() > 1)


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("how", ["get_full", "gathered", "operation", "data", "moments", "optimizer_state"])
def test_a_read_sees_the_step_and_costs_its_own_unit_only(how: str, device: str, swap_folder: Path) -> None:
    model = decoder(wide=True)
    twin = Reference(model)
    name = first_matrix(model)
    with deferred(swap_folder, device=device, prefetch=0) as engine:
        stepped(engine, twin)
        parameter = dict(engine.module.named_parameters())[name]
        right = twin.states()[name]
        if how == "moments":
            assert torch.equal(engine.get_full(name, "exp_avg"), right["exp_avg"])
        elif how == "optimizer_state":
            number = [n for n, _ in model.named_parameters()].index(name)
            assert torch.equal(engine.optimizer.state_dict()["state"][number]["exp_avg_sq"], right["exp_avg_sq"])
            return  # reads everything
        elif how == "get_full":
            assert torch.equal(engine.get_full(name), right["parameter"])
        elif how == "gathered":
            assert torch.equal(_gathered(engine, name), right["weight"])
        elif how == "data":
            assert torch.equal(parameter.data.cpu(), right["weight"])
        else:
            assert torch.equal((parameter * 1.0).detach().cpu(), right["weight"])
        # Nothing asked for the other units: theirs have nowhere to be delivered to, so they still wait.
        waiting = {u.name for u in engine._updates._pending.values() if u.stage is Stage.WAITING}
        assert "layers.1" not in waiting and {"layers.0", "layers.2"} <= waiting
        assert_states_equal(states_of(engine), twin.states())


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_evaluation_between_step_and_forward_sees_new_weights(device: str, swap_folder: Path) -> None:
    model = decoder(wide=True)
    twin, ids = Reference(model), token_batches(1, seed=9)[0]
    with deferred(swap_folder, device=device) as engine:
        for number in range(3):
            stepped(engine, twin, seed=number)
            with torch.inference_mode():
                assert torch.equal(engine(ids, labels=ids).loss.cpu(), model(ids, labels=ids).loss)
        assert engine._updates.idle


def test_edits_after_a_step_come_after_its_update(swap_folder: Path) -> None:
    model = decoder(wide=True)
    twin, name = Reference(model), first_matrix(model)
    with deferred(swap_folder) as engine:
        stepped(engine, twin)
        engine.set_full(name, "exp_avg", torch.zeros_like(model.get_parameter(name)))
        twin.moments[name][0].zero_()
        with engine.gathered(name, modify=True), torch.no_grad():
            engine.module.get_parameter(name).mul_(2)
        with torch.no_grad():
            model.get_parameter(name).mul_(2)
        for group in engine.optimizer.param_groups:
            group["lr"] = 0.0  # hyperparameters are those in force at step(), not when the update is carried out
        for group in twin.optimizer.param_groups:
            group["lr"] = 0.0
        assert_states_equal(states_of(engine), twin.states())
        stepped(engine, twin, seed=2)
        assert_states_equal(states_of(engine), twin.states())


def test_a_graph_from_before_the_step_is_stale_at_once(swap_folder: Path) -> None:
    ids = token_batches(1)[0]
    with deferred(swap_folder) as engine:
        old = engine(ids, labels=ids).loss
        stepped(engine)
        assert not engine._updates.idle
        with pytest.raises(StaleWeightsError):
            engine.backward(old)


def test_gradients_of_the_step_are_not_seen_after_it(swap_folder: Path) -> None:
    model = decoder(wide=True)
    twin, name = Reference(model), first_matrix(model)
    with deferred(swap_folder) as engine:
        stepped(engine, twin)
        assert engine.get_full(name, "grad") is None and engine.module.get_parameter(name).grad is None
        engine.zero_grad()
        # A gradient set by hand must not take the place of the one that the pending update still needs.
        value = torch.ones_like(model.get_parameter(name))
        engine.module.get_parameter(name).grad = value
        twin.gradients[name] = (value.reshape(-1), 1)
        engine.step(), twin.step()
        assert_states_equal(states_of(engine), twin.states())


class Sometimes(nn.Module):
    """Blocks of which the middle ones are used every other time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(96, 96) for _ in range(4))
        self.all = True

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            if self.all or index in (0, 3):
                x = layer(x).tanh()
        return x


@pytest.mark.parametrize("staging", [120 << 10, 2 << 20])
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_units_that_later_passes_do_not_use_stay_pending_and_right(
    device: str, staging: int, swap_folder: Path
) -> None:
    ours, model = Sometimes(), Sometimes()
    twin = Reference(model)
    case = placed(device, "nvme", schedule="deferred", staging=staging)
    with running(ours, case, swap_folder) as engine:
        for number in range(6):
            ours.all = model.all = number % 3 == 0
            x = torch.full((3, 96), 0.1 * (number + 1))
            engine.backward(engine(x).square().sum())
            engine.step()
            twin.backward(model(x).square().sum())
            twin.step()
        assert_states_equal(states_of(engine), twin.states())


# Bytes


def test_a_forward_does_not_read_what_the_update_has_in_memory(swap_folder: Path) -> None:
    """With bf16 weights and split states, all on nvme: the forward of the next step reads no weights of its own."""
    read = {}
    for schedule in ("barrier", "deferred"):
        case = placed("cpu", "nvme", wide=True, dtype="bf16", schedule=schedule, staging=2 << 20, prefetch=1)
        with running(decoder(wide=True), case, swap_folder, optimizer={"state_format": "split"}) as engine:
            stepped(engine)
            engine.synchronize()
            before = engine.counters()["nvme_read_bytes"]
            stepped(engine)
            stepped(engine)
            engine.synchronize()
            read[schedule] = engine.counters()["nvme_read_bytes"] - before
            weights = sum(u.load_bytes for u in engine._residency.units)
    # Two steps read 2 x (forward + backward + update); deferred spares the second step's forward.
    saved = read["barrier"] - read["deferred"]
    assert 0.9 * weights <= saved <= weights


def test_gradients_for_nvme_are_written_once_per_backward_and_unit(swap_folder: Path) -> None:
    case = placed("cpu", "nvme", wide=True, dtype="bf16", schedule="barrier", staging=2 << 20)
    with running(decoder(wide=True), case, swap_folder) as engine:
        ids = token_batches(1)[0]
        loss = engine(ids, labels=ids).loss
        before = engine.counters()["nvme_write_bytes"]
        engine.backward(loss)
        engine._gradient_queue.drain()
        written = engine.counters()["nvme_write_bytes"] - before
        large = sum(-(-r.slot.numel // 4096) * 4096 * 2 for r in engine._trainable.values() if r.slot.numel >= 4096)
        # The last unit's stay in memory for the update.
        assert 0 < written <= large


# Faults


@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("engine_name", ["threads", "aiofiles"])
def test_a_failed_transfer_of_an_update_fails_the_engine(operation: str, engine_name: str, swap_folder: Path) -> None:
    faults = FaultPlan(seed=0)
    case = placed("cpu", "nvme", wide=True, schedule="deferred", engine=engine_name)
    with nothing_left_of(swap_folder), running(decoder(wide=True), case, swap_folder, faults=faults) as engine:
        stepped(engine)
        engine.synchronize()
        faults.fail(operation, errno.EIO, nth=faults.calls[operation] + 30)
        with pytest.raises((SwapIOError, OffloadError)) as raised:
            for number in range(8):
                stepped(engine, seed=number)
            engine.synchronize()
        assert isinstance(raised.value, SwapIOError) and raised.value.errno == errno.EIO
        with pytest.raises((SwapIOError, OffloadError)):
            stepped(engine)


def test_closing_gives_up_what_is_pending(swap_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = _Held(monkeypatch)
    with nothing_left_of(swap_folder):
        with deferred(swap_folder) as engine:
            stepped(engine)
            timer = threading.Timer(0.05, held.gate.set)
            timer.start()
        with pytest.raises(OffloadError, match="closed"):
            engine.synchronize()
        timer.join()


def test_a_forgotten_engine_with_pending_updates_is_collected(swap_folder: Path) -> None:
    with nothing_left_of(swap_folder):
        engine = offload.initialize(
            decoder(wide=True), {"memory": {"nvme_paths": [str(swap_folder)]}, "placement": {
                "parameters": "nvme", "optimizer": "nvme", "gradients": "nvme"}, "schedule": {
                "optimizer_step": "deferred"}},
        )  # fmt: skip
        stepped(engine)
        store = weakref.ref(engine._memory.store)
        del engine
        gc.collect()  # ends the engine, and with it the thread that holds what is pending
        gc.collect()
        assert store() is None
