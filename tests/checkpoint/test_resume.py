"""Straight on equals stop and resume, bit for bit, over placements, formats and everything else that has a state."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import offload
from tests.engine.common import (
    Case,
    assert_states_equal,
    config_of,
    decoder,
    pairwise,
    product,
    running,
    states_of,
    token_batches,
    two_groups,
    warmup_cosine,
)

FACTORS: dict[str, list[Any]] = {
    "parameters": ["device", "host", "nvme"],
    "optimizer": ["device", "host", "nvme"],
    "device": ["cpu", "sim"],
    "form": [("fp32", "fp32"), ("fp32", "bf16"), ("split", "bf16"), ("compact", "bf16"), ("fp32", "fp16")],
    "accumulate": [1, 3],
    "wait": [True, False],
    "schedule": ["barrier", "deferred"],
}


def engine_for(model: nn.Module, case: Case, folder: Path, **options: Any) -> Any:
    options.setdefault("param_groups", two_groups(model))
    options.setdefault("lr_scheduler", warmup_cosine)
    return running(model, case, folder, **options)


def train(engine: offload.Engine, first: int, last: int, *, accumulate: int = 1) -> list[tuple[float, str, float]]:
    """Steps `first` to `last` with dropout on the global generators: losses, norms (as text, since fp16 may overflow to
    nan) and loss scales, which change no bits as long as nothing overflows.
    """
    record = []
    for step in range(first, last):
        total = 0.0
        for ids in token_batches(accumulate, seed=100 + step):
            loss = engine(ids, labels=ids).loss
            engine.backward(loss)
            total += float(loss.detach())
        result = engine.step()
        record.append((total, str(result.grad_norm), result.loss_scale))
    return record


def seed() -> None:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)


def disturb() -> None:
    """What another process would have drawn by now."""
    random.seed(77)
    np.random.seed(78)
    torch.manual_seed(79)


def label(row: dict[str, Any]) -> str:
    return "-".join(str(v) for v in row.values())


@pytest.mark.parametrize("row", pairwise(FACTORS), ids=label)
def test_four_steps_equal_two_and_two(tmp_path: Path, row: dict[str, Any]) -> None:
    straight_equals_resumed(tmp_path, row, 2)


@pytest.mark.acceptance
@pytest.mark.parametrize("row", list(product({**FACTORS, "device": ["cpu"], "accumulate": [2]})), ids=label)
def test_twenty_steps_equal_ten_and_ten(tmp_path: Path, row: dict[str, Any]) -> None:
    straight_equals_resumed(tmp_path, row, 10)


def straight_equals_resumed(tmp_path: Path, row: dict[str, Any], half: int) -> None:
    state_format, dtype = row["form"]
    case = Case(
        device=row["device"],
        parameters=row["parameters"],
        optimizer=row["optimizer"],
        staging=4 << 20,
        chunk=64 << 10,
        dtype=dtype,
        delay=0.0,
    )
    sections = {
        "optimizer": {"state_format": state_format},
        "precision": {"loss_scale_window": 3},
        "schedule": {"optimizer_step": row["schedule"]},
    }
    accumulate = row["accumulate"]
    model = decoder(wide=True, dropout=0.1)
    seed()
    with engine_for(copy.deepcopy(model), case, tmp_path, **sections) as engine:
        expected = train(engine, 0, 2 * half, accumulate=accumulate)
        states = states_of(engine)
    seed()
    with engine_for(copy.deepcopy(model), case, tmp_path, **sections) as engine:
        found = train(engine, 0, half, accumulate=accumulate)
        saved = engine.save_checkpoint(tmp_path / "ck", data={"at": half}, wait=row["wait"])
        assert saved.step == half and saved.path.name == f"step-{half:08d}"
        if not row["wait"]:
            # Beside training: the steps that go on must not reach the snapshot.
            assert train(engine, half, half + 2, accumulate=accumulate) == expected[half : half + 2]
            engine.wait_checkpoint()
    disturb()
    other = decoder(wide=True, dropout=0.1, seed=9)
    with engine_for(other, case, tmp_path, **sections) as engine:
        report = engine.load_checkpoint(tmp_path / "ck")
        assert report.step == half and report.data == {"at": half} and not report.converted
        found += train(engine, half, 2 * half, accumulate=accumulate)
        assert found == expected
        assert_states_equal(states_of(engine), states)
        assert engine.counters()["steps"] + engine.counters()["skipped_steps"] == 2 * half


def test_groups_in_another_order(tmp_path: Path) -> None:
    """Options and what the scheduler has for each group go with the parameters."""
    case = Case(parameters="host", gradients="host", optimizer="host")
    by_order: list[Any] = [two_groups, lambda model: two_groups(model)[::-1]]
    with engine_for(decoder(), case, tmp_path) as engine:
        train(engine, 0, 3)
        engine.save_checkpoint(tmp_path / "ck")
        expected = train(engine, 3, 8)
        states = states_of(engine)
        rates = [group["lr"] for group in engine.optimizer.param_groups]
    for number, order in enumerate(by_order):
        other = decoder(seed=9)
        groups = order(other)
        groups[0]["lr"] = 0.5  # another start
        with engine_for(other, case, tmp_path, param_groups=groups) as engine:
            engine.load_checkpoint(tmp_path / "ck")
            assert train(engine, 3, 8) == expected
            found = [group["lr"] for group in engine.optimizer.param_groups]
            assert found == (rates if number == 0 else rates[::-1])
            assert_states_equal(states_of(engine), states)


def test_a_partial_accumulation_is_dropped_and_replayed(tmp_path: Path) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = decoder(dropout=0.2)
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
            self.calls += 1
            return self.inner(ids, labels=labels)

    case = Case(parameters="host", optimizer="nvme")
    seed()
    with running(Counting(), case, tmp_path) as engine:
        expected = train(engine, 0, 4, accumulate=2)
        states, calls = states_of(engine), engine.module.calls.clone()
    seed()
    with running(Counting(), case, tmp_path) as engine:
        train(engine, 0, 2, accumulate=2)
        ids = token_batches(2, seed=102)[0]
        engine.backward(engine(ids, labels=ids).loss)
        engine.save_checkpoint(tmp_path / "ck")
    disturb()
    with running(Counting(), case, tmp_path) as engine:
        engine.load_checkpoint(tmp_path / "ck")
        assert train(engine, 2, 4, accumulate=2) == expected[2:]
        assert_states_equal(states_of(engine), states)
        assert torch.equal(engine.module.calls, calls)


def test_before_the_first_step_and_right_after_a_load(tmp_path: Path) -> None:
    case = Case(parameters="nvme", optimizer="host")
    seed()
    with running(decoder(dropout=0.1), case, tmp_path) as engine:
        engine.save_checkpoint(tmp_path / "a")
        expected = train(engine, 0, 3)
        states = states_of(engine)
    disturb()
    with running(decoder(dropout=0.1, seed=5), case, tmp_path) as engine:
        engine.load_checkpoint(tmp_path / "a")
        engine.save_checkpoint(tmp_path / "b")
    disturb()
    with running(decoder(dropout=0.1, seed=6), case, tmp_path) as engine:
        engine.load_checkpoint(tmp_path / "b" / "step-00000000")
        assert train(engine, 0, 3) == expected
        assert_states_equal(states_of(engine), states)


def test_parameters_registered_in_another_order(tmp_path: Path) -> None:
    class Pair(nn.Module):
        def __init__(self, names: str) -> None:
            super().__init__()
            torch.manual_seed(0)
            made = {"a": nn.Linear(8, 70), "b": nn.Linear(70, 90), "c": nn.Linear(90, 1)}
            for name in names:
                setattr(self, name, made[name])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.c(torch.relu(self.b(torch.relu(self.a(x))))).mean()

    def go(engine: offload.Engine, count: int, start: int = 0) -> None:
        for i in range(start, start + count):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(i))
            engine.backward(engine(x))
            engine.step()

    case = Case(parameters="nvme", optimizer="nvme")
    with running(Pair("abc"), case, tmp_path) as engine:
        go(engine, 3)
        engine.save_checkpoint(tmp_path / "ck")
        go(engine, 3, 3)
        states = states_of(engine)
    with running(Pair("cab"), case, tmp_path) as engine:
        engine.load_checkpoint(tmp_path / "ck")
        go(engine, 3, 3)
        assert_states_equal(states_of(engine), states)


def test_config_of_is_saved_as_resolved(tmp_path: Path) -> None:
    case = Case()
    with running(decoder(), case, tmp_path) as engine:
        saved = engine.save_checkpoint(tmp_path / "ck")
        with offload.checkpoint.Source(saved.path) as source:
            assert offload.load_config(dict(source.manifest.config)) == engine.config
            assert source.manifest.versions["torch"] == torch.__version__.partition("+")[0] or True
    assert config_of(case, tmp_path)
