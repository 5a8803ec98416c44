"""The planner: floors and bytes by hand, bytes against counters of real runs, shapes, and the command."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import offload
from offload.build import draw_up
from offload.cli import main
from offload.config import load_config
from offload.models import Llama, LlamaConfig
from offload.planner import machine
from offload.planner.floors import PHASES, Rates, Work, disk_seconds, floor_of, side_by_side
from offload.planner.heap import Heap, heap_peak
from offload.planner.machine import Disk, OperationCosts, measure_operations
from offload.planner.settings import layer_major, schedule_of
from offload.planner.shapes import trace_step
from offload.planner.work import Course, step_work
from offload.units import split_units
from swap.errors import SwapError
from swap.tuning import DriveProbe, Tuning
from tests.engine.common import VOCABULARY, Case, config_of, decoder, token_batches

plan_module: Any = importlib.import_module("offload.planner.plan")
RATES = Rates(stream=10.0, disk_read=2.0, disk_write=1.0, mixing=0.5, link=4.0)


def test_compute_and_disk_side_by_side_by_hand() -> None:
    rates = Rates(stream=1.0, compute_beside=1.25, disk_beside=2.0)
    # The disk's 2 s take 4; in these the processor does 3.2 s of its 8, and the rest alone.
    assert side_by_side(rates, 8.0, 2.0) == pytest.approx((4 + 4.8, 4.0))
    # The processor's 4 s take 5, in which the disk does 2.5 s of its 10.
    assert side_by_side(rates, 4.0, 10.0) == pytest.approx((5.0, 5 + 7.5))
    assert side_by_side(rates, 3.0, 0.0) == (3.0, 0.0) and side_by_side(rates, 0.0, 3.0) == (0.0, 3.0)
    assert side_by_side(Rates(stream=1.0), 3.0, 2.0) == (3.0, 2.0)


def test_drives_are_measured_as_they_are_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drive = DriveProbe(
        engine="aiofiles",
        block=1 << 20,
        queue_depth=4,
        read_bytes_per_s=1e15,
        write_bytes_per_s=1e15,
        mixed_bytes_per_s=1e15,
        mixing_penalty=1.0,
    )
    known = Tuning(block=1 << 20, queue_depth=4, weights=(1e15,), burst=0, drives=(drive,))
    monkeypatch.setattr(machine, "tune", lambda *_, **__: known)
    monkeypatch.setattr(machine, "PATTERN_SECONDS", 0.01)
    monkeypatch.setattr(machine, "PROBE_BYTES", 16 << 20)
    disk = machine.disk_of([str(tmp_path)], "aiofiles", shared_cores=True)
    assert disk is not None and 0 < disk.read < 1e14 and 0 < disk.write < 1e14 and 0 < disk.mixed < 1e14
    assert disk.compute_beside >= 1 and disk.disk_beside >= 1
    assert not list(tmp_path.iterdir())
    apart = machine.disk_of([str(tmp_path)], "aiofiles", shared_cores=False)
    assert apart is not None and (apart.compute_beside, apart.disk_beside) == (1.0, 1.0)

    def full(*_: object, **__: object) -> None:
        raise SwapError("no room")

    monkeypatch.setattr(machine, "Bench", full)
    kept = machine.disk_of([str(tmp_path)], "aiofiles", shared_cores=True)
    assert kept is not None and kept.read == 1e15 and kept.compute_beside == 1
    assert machine.disk_of([], "aiofiles", shared_cores=True) is None


def test_floors_by_hand() -> None:
    assert disk_seconds(RATES, 4, 3) == 3 + 0.5 * 2
    assert disk_seconds(RATES, 0, 0) == 0 and disk_seconds(Rates(stream=1.0), 1, 0) == math.inf
    assert disk_seconds(Rates(stream=1.0, disk_read=1.0, disk_write=1.0, mixing=3.0), 1, 1) == 2  # taking turns
    phases = {
        "forward": Work(compute=2.0, disk_read=2.0),
        "backward": Work(compute=5.0, disk_write=1.0),
        "optimizer": Work(kernel=10.0, disk_read=4.0, disk_write=4.0),
    }
    barrier = floor_of("barrier", phases, RATES)
    assert barrier.seconds == 2 + 5 + (4 + 0.5 * 2)
    assert [resource for _, resource, _ in barrier.windows] == ["compute", "compute", "disk"]
    deferred = floor_of("deferred", phases, RATES)
    assert deferred.seconds == 5 + max(2 + 1, 4 + 0.5 * 3) and deferred.binding == "disk"
    eager = floor_of("eager", phases, RATES)
    assert eager.seconds == 2 + max(5 + 1, 5 + 0.5 * 2) and eager.binding == "compute"
    apart = floor_of("barrier", {**phases, "optimizer": Work(kernel=100.0)}, Rates(stream=10.0, shared_cores=False))
    assert apart.resources["memory"] == 10 and apart.resources["compute"] == 7


def test_scaling_work() -> None:
    work = Work(compute=1.0, disk_read=4.0) + Work(kernel=2.0, disk_read=2.0).scaled(0.5)
    assert work == Work(compute=1.0, kernel=1.0, disk_read=5.0)


RUNS = [
    {"parameters": "nvme", "gradients": "nvme", "optimizer": "nvme", "fmt": "compact", "count": 1},
    {"parameters": "host", "gradients": "host", "optimizer": "nvme", "fmt": "compact", "count": 1},
    {"parameters": "nvme", "gradients": "host", "optimizer": "nvme", "fmt": "fp32", "count": 3},
    {"parameters": "nvme", "gradients": "nvme", "optimizer": "nvme", "fmt": "split", "count": 3},
    {"parameters": "nvme", "gradients": "nvme", "optimizer": "host", "fmt": "fp32", "count": 2, "schedule": "barrier"},
    {"parameters": "nvme", "gradients": "nvme", "optimizer": "nvme", "fmt": "fp32", "count": 2, "order": "batch_major"},
]


def model_of_blocks() -> Llama:
    """Blocks of several layout blocks per matrix, so that what shares blocks does not matter."""
    torch.manual_seed(0)
    return Llama(LlamaConfig(vocab_size=VOCABULARY, hidden_size=192, layers=3, heads=3, max_positions=32))


def settings(run: dict[str, Any], folder: Path) -> dict[str, Any]:
    case = Case(
        parameters=run["parameters"],
        gradients=run["gradients"],
        optimizer=run["optimizer"],
        dtype="bf16",
        chunk=64 << 10,
    )
    eager = run.get("schedule") == "eager"
    return config_of(
        case,
        folder,
        max_grad_norm=None if eager else 1.0,
        optimizer={"state_format": run["fmt"], "check_finite": not eager},
        schedule={"optimizer_step": run.get("schedule", "auto"), "micro_batch_order": run.get("order", "auto")},
        swap={"staging": 4 << 20},
    )


@pytest.mark.parametrize("run", RUNS, ids=lambda run: "-".join(str(v) for v in run.values()))
def test_bytes_are_those_that_a_run_counts(run: dict[str, Any], tmp_path: Path) -> None:
    config = load_config(settings(run, tmp_path))
    blueprint = draw_up(model_of_blocks(), config, None, None)
    course = Course(
        schedule=schedule_of(blueprint),
        layer_major=layer_major(blueprint, run["count"]),
        micro_batches=run["count"],
        visits=[[spec.index, *spec.borrows] for spec in blueprint.specs],
        aliases_host=True,
    )
    work = step_work(blueprint.layouts, blueprint.plan, blueprint.fmt, blueprint.accumulate, course)
    total = sum((work[name] for name in PHASES), Work())
    batches = [{"input_ids": ids, "labels": ids} for ids in token_batches(run["count"])]
    with offload.initialize(model_of_blocks(), config) as engine:
        seen = []
        for _ in range(10):
            engine.train_batch(batches)
            seen.append(engine.counters())
        engine.synchronize()
        assert engine.counters()["steps"] == 10
    for key, expected in (("nvme_read_bytes", total.disk_read), ("nvme_write_bytes", total.disk_write)):
        # A step's updates run beside the next one, and how far they are when a step returns differs from one to the
        # other (a drain would not help: it takes away weights that wait for their update, and costs reads). Over
        # eight steps that difference counts an eighth.
        measured = (seen[9][key] - seen[1][key]) / 8
        # Now and then a unit that was being loaded gives way, and its weights are read once more.
        again = 0.04 * expected if key == "nvme_read_bytes" else 0.0
        assert 0.98 * expected <= measured <= 1.02 * expected + again, key


def test_shapes_of_a_step() -> None:
    model = decoder()
    specs = split_units(model)
    ids = token_batches(1, size=2, time=12)[0]
    shapes = trace_step(model, specs, {}, {"input_ids": ids, "labels": ids}, device=torch.device("cpu"))
    assert shapes.tokens == 24 and all(p.grad is None for p in model.parameters())
    assert [visit[0] for visit in shapes.visits] == [spec.index for spec in specs]
    matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2)  # the tied table is only multiplied by once
    attention = 4 * 2 * 12 * 12 * 24 * 3
    assert shapes.flops(shapes.forward) == 2 * matrices * 24 + attention
    assert 2 * shapes.flops(shapes.forward) <= shapes.flops(shapes.backward) <= 2.6 * shapes.flops(shapes.forward)
    assert 0 < shapes.boundaries < shapes.kept < shapes.peak <= shapes.heap
    costs = measure_operations(shapes.operations, device=torch.device("cpu"), stream=1e9, repeats=1)
    assert set(costs.seconds) == set(shapes.operations) and costs.total(shapes.backward) > 0


def test_meta_parameters_and_frozen_ones() -> None:
    with offload.empty_init():
        model = decoder()
    names = frozenset(name for name, _ in model.named_parameters() if "layers.2" in name)
    ids = token_batches(1)[0]
    batch = {"input_ids": ids, "labels": ids}
    dtypes = {name: torch.bfloat16 for name, _ in model.named_parameters()}
    device = torch.device("cpu")
    whole = trace_step(model, split_units(model), dtypes, batch, device=device)
    part = trace_step(model, split_units(model), dtypes, batch, device=device, trainable=names)
    assert part.flops(part.backward) < whole.flops(whole.backward) / 2 and part.kept < whole.kept
    assert next(model.parameters()).device.type == "meta"


class _Peeks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y * 2 if y.sum().item() > 0 else y


def test_models_that_cannot_be_traced_are_named() -> None:
    model = _Peeks()
    with pytest.raises(offload.OffloadError, match="_Peeks cannot be traced without its numbers"):
        trace_step(model, split_units(model), {}, torch.ones(2, 4), device=torch.device("cpu"))
    with pytest.raises(ValueError, match="the plan needs a loss"):
        trace_step(nn.Linear(4, 4), [], {}, torch.ones(2, 4), device=torch.device("cpu"))


def _unmeasured(operations: dict[str, Any], **_: Any) -> OperationCosts:
    return OperationCosts(seconds=dict.fromkeys(operations, 1e-6), flops_per_s=1e11)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements that take no time."""
    monkeypatch.setattr(plan_module, "base_bytes", lambda _model: 300 << 20)
    monkeypatch.setattr(plan_module, "stream_rate", lambda: 10e9)
    monkeypatch.setattr(plan_module, "kernel_seconds", lambda *_: 2e-9)
    monkeypatch.setattr(plan_module, "measure_operations", _unmeasured)
    monkeypatch.setattr(plan_module, "disk_of", lambda *_, **__: Disk(read=2e9, write=1e9, mixed=1.2e9))


def test_the_plan_of_a_model(quick: None, tmp_path: Path) -> None:
    ids = token_batches(1)[0]
    run = {"parameters": "nvme", "gradients": "nvme", "optimizer": "nvme", "fmt": "fp32"}
    config = settings(run, tmp_path)
    report = offload.plan(model_of_blocks, config, sample_batch={"input_ids": ids, "labels": ids})
    assert report.parameters == sum(p.numel() for p in model_of_blocks().parameters())
    with offload.initialize(model_of_blocks(), config) as engine:
        for _ in range(3):  # the first pass shows what follows what, and so what to load ahead
            engine.backward(engine(ids, labels=ids).loss)
            engine.step()
        engine.synchronize()
        memory = engine.memory()
    for tier, kinds in report.planned.items():
        assert sum(kinds.values()) == pytest.approx(sum(memory.peak[tier].values()), rel=0.04), tier
    prediction = report.prediction
    assert prediction.seconds >= prediction.floor.seconds > 0 and prediction.disk_read > 0
    assert prediction.peak_rss == max(report.peaks["step"], report.peaks["setup"])
    smallest = report.smallest["host"]
    assert smallest is not None and 0 < smallest <= sum(report.planned["host"].values())
    helped = {change.key: change.relative_seconds for change in report.changes}
    assert "optimizer.state_format=compact" in helped and all(value < 1 for value in helped.values())
    text = str(report)
    for said in ("floor/step", "what would help", "nvme", "resident at most", "deferred"):
        assert said in text
    assert json.loads(json.dumps(report.to_dict()))["prediction"]["binding"] == prediction.binding


def test_the_smallest_budget_works_and_less_does_not(quick: None, tmp_path: Path) -> None:
    ids = token_batches(1)[0]
    config = settings({"parameters": "host", "gradients": "host", "optimizer": "nvme", "fmt": "compact"}, tmp_path)
    report = offload.plan(model_of_blocks(), config, sample_batch={"input_ids": ids, "labels": ids})
    smallest = report.smallest["host"]
    assert smallest is not None
    config["memory"]["host"] = smallest
    offload.initialize(model_of_blocks(), config).close()
    config["memory"]["host"] = smallest - (2 << 20)
    with pytest.raises(offload.PlanError, match=r"memory\.host"):
        offload.initialize(model_of_blocks(), config)


def test_the_command(quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.toml").write_text(
        '[model]\nhidden_size = 64\nlayers = 2\nheads = 2\n[data]\ncontext = 32\n[placement]\noptimizer = "nvme"\n'
    )
    done = CliRunner().invoke(main, ["plan", "small.toml", "train.micro_batches=2", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["micro_batches"] == 2 and found["prediction"]["disk_write"] > 0
    assert {"phases", "binding", "floor", "achieved_over_floor", "peak_rss"} <= set(found["prediction"])
    text = CliRunner().invoke(main, ["plan", "small.toml"])
    assert text.exit_code == 0 and "step " in text.stdout
    wrong = CliRunner().invoke(main, ["plan", "small.toml", "placement.optimizer=tape"])
    assert wrong.exit_code == 2
    tight = CliRunner().invoke(main, ["plan", "small.toml", "memory.nvme=1MiB"])
    assert tight.exit_code == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["small.toml"]


def test_the_heap_keeps_what_is_freed_below_its_top() -> None:
    heap = Heap()
    for name in range(3):
        heap.take(name, 1 << 20)
    heap.give(1)
    heap.take(3, 1 << 19)  # carved from what 1 left
    heap.take(4, 1 << 20)  # does not fit there
    assert heap.top == 4 << 20 and heap.peak == 4 << 20
    heap.take(5, 64 << 20)
    heap.give(5)
    assert heap.apart == 0 and heap.peak == 68 << 20
    for name in (0, 2, 3, 4):
        heap.give(name)
    heap.take(6, 4 << 20)  # neighbours were joined
    heap.take(7, 5 << 20)
    assert heap.top == 9 << 20
    heap.take(8, 100)
    assert heap.top == (9 << 20) + 128
    heap.give(8)
    heap.give(9)


def test_the_peak_of_a_sequence() -> None:
    events = [(0, 8 << 20), (1, 8 << 20), (0, -1), (2, 4 << 20), (3, 6 << 20), (1, -1), (2, -1), (3, -1)]
    assert heap_peak(events, repeats=1) == 22 << 20
    assert heap_peak(events) >= 22 << 20
