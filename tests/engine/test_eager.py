"""Updates during backward: the bits of training in memory, units updated early, and errors that cannot be hidden."""

from __future__ import annotations

import threading
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import offload
from offload.errors import GradientError, OffloadError, PlanError
from offload.planes import Plane
from offload.schedule.updates import Updates
from swap.errors import BudgetError

from .common import (
    TIERS,
    Case,
    Trace,
    assert_equal,
    assert_states_equal,
    config_of,
    decoder,
    pairwise,
    placed,
    running,
    states_of,
    token_batches,
)

FACTORS: dict[str, Any] = {
    "parameters": TIERS,
    "gradients": TIERS,
    "optimizer": TIERS,
    "device": ("cpu", "sim"),
    "dtype": ("fp32", "bf16"),
    "prefetch": (0, 1, 3),
    "staging": (160 << 10, 2 << 20),
    "micro_batches": (1, 4),
    "order": ("layer_major", "batch_major"),
    "activations": ("keep", "recompute"),
    "dropout": (0.0, 0.2),
    "counted": (False, True),
}
STEPS = 3


def loss_and_count(outputs: Any, batch: Any) -> tuple[Tensor, int]:
    """A sum over tokens whose number differs between micro-batches."""
    count = batch["input_ids"].shape[1]
    return outputs.loss * count, count


def train(case: Case, folder: Path, row: dict[str, Any], schedule: str) -> Trace:
    model = decoder(wide=True, dropout=row["dropout"])
    losses, norms = [], []
    options = {
        "max_grad_norm": None,
        "optimizer": {"check_finite": False},
        "placement": {"activations": row["activations"]},
        "schedule": {"micro_batch_order": row["order"], "optimizer_step": schedule},
    }
    with running(model, case, folder, **options) as engine:
        for step in range(STEPS):
            sizes = [8 + k % 3 for k in range(row["micro_batches"])]
            ids = [token_batches(1, time=t, seed=10 * step + k)[0] for k, t in enumerate(sizes)]
            batches = [{"input_ids": x, "labels": x} for x in ids]
            result = engine.train_batch(batches, loss_and_count if row["counted"] else None)
            assert result.stepped
            losses.append(result.loss)
            norms.append(result.grad_norm)
            assert engine.resident_units() == []
        return Trace(losses=losses, norms=norms, states=states_of(engine))


@cache
def expected(dtype: str, micro_batches: int, dropout: float, counted: bool) -> Trace:
    row = {
        "dropout": dropout,
        "micro_batches": micro_batches,
        "counted": counted,
        "order": "batch_major",
        "activations": "keep",
    }
    return train(placed("cpu", "host", dtype=dtype, wide=True), Path("."), row, "barrier")


@pytest.mark.parametrize("row", pairwise(FACTORS), ids=lambda row: "-".join(str(v) for v in row.values()))
def test_every_pair_of_choices_equals_training_in_memory(row: dict[str, Any], swap_folder: Path) -> None:
    fields = {k: row[k] for k in ("parameters", "gradients", "optimizer", "device", "dtype", "prefetch", "staging")}
    found = train(Case(**fields, wide=True), swap_folder, row, "eager")
    assert_equal(found, expected(row["dtype"], row["micro_batches"], row["dropout"], row["counted"]))


def eager(model: nn.Module, folder: Path, device: str = "cpu", **options: Any) -> Any:
    case = placed(device, "nvme", schedule="eager")
    return running(model, case, folder, max_grad_norm=None, optimizer={"check_finite": False}, **options)


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_units_are_updated_before_the_backward_ends(
    device: str, micro_batches: int, swap_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted: list[list[str]] = []
    submit = Updates.submit

    def noted(self: Updates, updates: Any) -> None:
        submitted.append([update.name for update in updates])
        submit(self, updates)

    monkeypatch.setattr(Updates, "submit", noted)
    ids = token_batches(1)[0]
    with eager(decoder(wide=True), swap_folder, device) as engine:
        engine.train_batch([{"input_ids": ids, "labels": ids}] * micro_batches)
    early = [names[0] for names in submitted[:-1]]
    assert all(len(names) == 1 for names in submitted[:-1])
    # The tied embedding is final at the end; the last blocks come first.
    assert [name for name in early if name.startswith("layers.")] == ["layers.2", "layers.1", "layers.0"]


def test_gradients_for_nvme_never_go_there(swap_folder: Path) -> None:
    ids = token_batches(1)[0]
    where = {"parameters": "host", "optimizer": "host"}
    order = {"optimizer_step": "eager", "micro_batch_order": "layer_major"}
    with eager(decoder(wide=True), swap_folder, placement=where, schedule=order) as engine:
        for _ in range(3):
            engine.train_batch([{"input_ids": ids, "labels": ids}] * 2)
        engine.synchronize()
        assert engine.counters()["nvme_write_bytes"] == 0


def test_an_update_that_ends_while_backward_lets_gradients_rest(
    swap_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The optimizer's thread and backward may both come to give back the memory in which gradients were gathered."""
    ids, freed, met = token_batches(1)[0], Plane.free, []
    where = {"parameters": "host", "optimizer": "host"}
    with eager(decoder(wide=True), swap_folder, placement=where) as engine:
        gradients = [state.gradients for state in engine._states.values() if state.gradients is not None]

        def free(plane: Plane) -> None:
            if threading.current_thread().name == "offload-optimizer":
                met.append(plane)
                for each in gradients:
                    each.rest(engine._gradient_queue)
            freed(plane)

        monkeypatch.setattr(Plane, "free", free)
        for _ in range(2):
            engine.train_batch([{"input_ids": ids, "labels": ids}])
        engine.synchronize()
        assert met and engine.counters()["steps"] == 2
        monkeypatch.undo()


def test_a_disk_without_room_for_gradients_is_enough(swap_folder: Path) -> None:
    """The bits are those with room. A loop that lets gradients rest is told what there is no room for."""
    ids = token_batches(1)[0]
    batches = [{"input_ids": ids, "labels": ids}] * 2

    def states(**memory: Any) -> dict[str, Any]:
        with eager(decoder(wide=True), swap_folder, memory=memory) as engine:
            for _ in range(3):
                engine.train_batch(batches)
            return states_of(engine)

    with eager(decoder(wide=True), swap_folder) as engine:
        planned = engine.memory().planned["nvme"]
    least = planned["parameters"] + planned["optimizer"]
    assert_states_equal(states(nvme=least), states())
    with pytest.raises(PlanError, match=r"exceeds memory\.nvme"):
        states(nvme=least - 1)
    with eager(decoder(wide=True), swap_folder, memory={"nvme": least, "host": 1 << 20}) as engine:
        assert "gradients" not in engine.memory().planned["nvme"]
        with pytest.raises(BudgetError, match=r"gradient.*memory\.nvme"):
            engine.backward(engine(input_ids=ids, labels=ids).loss)
    with pytest.raises(PlanError, match=r"exceeds memory\.nvme.*gradients"):
        offload.initialize(decoder(wide=True), config_of(placed("cpu", "nvme"), swap_folder, memory={"nvme": least}))


class Unsteady(nn.Module):
    """Four blocks of which one is not used by every micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(80, 80) for _ in range(4))

    def forward(self, x: Tensor, skip: bool) -> Tensor:
        for index, layer in enumerate(self.layers):
            if not (skip and index == 2):
                x = layer(x).tanh()
        return x.square().sum()


def sums(outputs: Tensor, _batch: Any) -> Tensor:
    return outputs


def test_a_unit_without_all_contributions_waits_for_the_end(swap_folder: Path) -> None:
    states = {}
    for schedule in ("barrier", "eager"):
        case = placed("cpu", "nvme", schedule=schedule)
        with running(Unsteady(), case, swap_folder, max_grad_norm=None, optimizer={"check_finite": False}) as engine:
            for number in range(3):
                x = torch.full((2, 80), 0.1 * (number + 1))
                engine.train_batch([(x, False), (x * 2, True), (x * 3, number == 1)], sums)
            states[schedule] = states_of(engine)
    for name, entry in states["barrier"].items():
        assert all(torch.equal(torch.as_tensor(v), torch.as_tensor(states["eager"][name][k])) for k, v in entry.items())


class Mixed(nn.Module):
    """One layer used within reentrant checkpointing and outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(80, 80) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x.requires_grad_(), use_reentrant=True)
        return self.layers[2](x).square().sum()


def test_a_gradient_after_the_update_is_an_error_not_a_loss(swap_folder: Path) -> None:
    with eager(Mixed(), swap_folder) as engine:
        try:
            engine.train_batch([(torch.ones(2, 80),)], sums)
        except GradientError as error:
            assert "use_reentrant=False" in str(error) and "deferred" in str(error)
            with pytest.raises(OffloadError, match="failed"):
                engine.step()
        else:  # autograd came to the checkpointed use first: then the update had to wait
            assert engine._steps["layers.2.weight"] == 1


def test_an_error_after_the_first_update_fails_the_engine(swap_folder: Path) -> None:
    class Mine(Exception):
        pass

    def fail(_gradient: Tensor) -> None:
        raise Mine

    class Failing(Unsteady):
        def forward(self, x: Tensor, skip: bool) -> Tensor:
            x = self.layers[0](x)
            x.register_hook(fail)
            return super().forward(x, skip)

    with eager(Failing(), swap_folder) as engine:
        with pytest.raises(Mine):
            engine.train_batch([(torch.ones(2, 80), False)], sums)
        assert engine._status.value == "failed"
        with pytest.raises(OffloadError, match="partly old and partly new"):
            engine.train_batch([(torch.ones(2, 80), False)], sums)


def test_outside_train_batch_it_is_deferred(swap_folder: Path) -> None:
    ids = token_batches(1)[0]
    with eager(decoder(wide=True), swap_folder) as engine:
        for _ in range(2):  # two backwards for one step: no gradient was final after the first
            engine.backward(engine(ids, labels=ids).loss)
        assert engine._updates.idle
        assert engine.step().stepped
