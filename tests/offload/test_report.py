"""`offload report`, and predictions beside what a run measured."""

from __future__ import annotations

import builtins
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from offload import report
from offload.cli import main
from offload.config import ConfigError, load_config
from offload.planner import comparison
from offload.telemetry import Progress, RunDirectory
from offload.telemetry.trace import COMPUTE, DISK_READ, DISK_WRITE, OPTIMIZER, STEP, WAIT, Span, write_trace

SECOND = 10**9
PLAN = {
    "planned": {"device": {}, "host": {"staging": 100}, "nvme": {"optimizer": 1000}},
    "prediction": {
        "seconds": 2.0,
        "disk_read": 500,
        "disk_write": 400,
        "peak_rss": 10_000,
        "floor": {"seconds": 1.5, "resources": {"compute": 1.5, "memory": 0.1, "disk": 0.4, "host to device": 0.0}},
    },
}
SPANS = [
    Span(STEP, "step 1", 0, 2 * SECOND, 0),
    Span(COMPUTE, "forward a", 0, SECOND // 2, 0),
    Span(WAIT, "wait", SECOND // 2, SECOND, 0),
    Span(COMPUTE, "backward a", SECOND, 2 * SECOND, 0),
    Span(OPTIMIZER, "update a", SECOND, SECOND + SECOND // 10, 0),
    Span(DISK_READ, "a weight", SECOND // 4, SECOND, 500),
    Span(DISK_WRITE, "a weight", SECOND + SECOND // 2, 3 * SECOND, 400),
]


def recorded(folder: Path, *, trace: bool = True, steps: int = 4) -> Path:
    """A run directory as a run leaves it."""
    run = RunDirectory(folder)
    for step in range(1, steps + 1):
        in_use = {"device": 0, "host": 10**8 * step, "nvme": 10**9}
        run.record({"step": step, "loss": 1.0, "seconds": 2.0, "bytes_by_tier": in_use, "rss_bytes": 10**9})
    run.record({"step": steps, "eval_loss": 1.0})
    compared = {
        "step_seconds": {"predicted": 2.0, "measured": 2.1},
        "nvme_bytes": {"predicted": 1000, "measured": 1000},
    }
    run.write_summary({"steps": steps, "plan": PLAN, "predicted_against_measured": compared, "peak_rss_bytes": 10**9})
    run.close()
    if trace:
        samples = [(0, {"host": 10, "nvme": 10**9}), (SECOND, {"host": 10**8, "nvme": 10**9})]
        write_trace(run.path / "trace.json", SPANS, samples, began=0, about={})
    return run.path


def test_figures_of_a_run_with_a_trace(tmp_path: Path) -> None:
    found = report.figures(report.read_run(recorded(tmp_path / "run")))
    assert found["steps"] == 4 and found["achieved_over_floor"] == 0.75
    tracks = found["step_seconds_by_track"]
    assert tracks["compute"] == 1.5 and tracks["wait"] == 0.5 and tracks["other"] == 0
    assert tracks["disk"] == 1.25 and tracks["disk beside compute"] == 0.75
    assert found["resources"]["disk"] == {"floor_seconds": 0.4, "busy_seconds": 1.25}
    assert found["resources"]["compute"]["busy_seconds"] == 1.5


def test_figures_of_a_run_without_one(tmp_path: Path) -> None:
    found = report.figures(report.read_run(recorded(tmp_path / "run", trace=False)))
    assert found["step_seconds_by_track"] == {} and found["resources"]["disk"]["busy_seconds"] is None
    assert json.loads(json.dumps(found)) == found


def test_spans_count_in_every_step_that_they_reach_into(tmp_path: Path) -> None:
    run = report.read_run(recorded(tmp_path / "run"))
    steps = [Span(STEP, "step", begun, begun + 10 * SECOND, 0) for begun in (20 * SECOND, 0, 10 * SECOND)]
    spans = [(-5, -1), (-1, 1), (2, 3), (9, 21), (12, 13), (10, 20), (29, 40), (30, 31)]
    run.spans = [*steps, *(Span(COMPUTE, "x", low * SECOND, high * SECOND, 0) for low, high in reversed(spans))]
    assert [row["compute"] for row in report.step_seconds(run)] == [3.0, 21.0, 2.0]


@pytest.mark.parametrize("trace", [True, False])
def test_pictures(tmp_path: Path, trace: bool) -> None:
    pytest.importorskip("matplotlib")
    run = recorded(tmp_path / "run", trace=trace)
    done = CliRunner().invoke(main, ["report", str(run), "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    names = ["report_memory.png", "report_steps.png", "report_resources.png", "report.html"]
    assert [Path(line).name for line in done.stdout.split()] == names
    for name in names[:-1]:
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("<img") == 3 and "floor/step 0.75" in page and ("log.trace" in page) is not trace


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str, *rest: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return builtins.__import__(name, *rest)

    monkeypatch.setattr(report.importlib, "import_module", absent)
    done = CliRunner().invoke(main, ["report", str(recorded(tmp_path / "run"))])
    assert done.exit_code == 2 and "pip install matplotlib" in done.stderr
    assert CliRunner().invoke(main, ["report", str(tmp_path / "run"), "--json"]).exit_code == 0


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "not the directory of a run"),
        ({"metrics.jsonl": ""}, "has not finished a step"),
        ({"metrics.jsonl": "{"}, "line 1: not JSON"),
        ({"metrics.jsonl": '{"seconds": 1, "step": 1}', "summary.json": "{"}, "summary.json: not JSON"),
        ({"metrics.jsonl": '{"seconds": 1, "step": 1}', "trace.json": "{}"}, "no trace of a run"),
    ],
)
def test_what_is_no_run(tmp_path: Path, files: dict[str, str], said: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    done = CliRunner().invoke(main, ["report", str(tmp_path)])
    assert done.exit_code == 2 and said in done.stderr and len(done.stderr.splitlines()) == 1


def test_comparing() -> None:
    found = comparison.compare(
        PLAN,
        seconds=[9.0, 8.0, 2.0, 2.2, 2.1],
        disk_read=[0, 1, 500, 510, 520],
        disk_write=[0, 1, 400, 400, 400],
        memory={"host": {"staging": 100}, "nvme": {"optimizer": 900, "gradients": 100}},
        peak_rss=9_000,
    )
    assert found["step_seconds"] == {"predicted": 2.0, "measured": 2.1}
    assert found["disk_read_bytes"]["measured"] == 510 and found["nvme_bytes"] == {"predicted": 1000, "measured": 1000}
    text = "\n".join(comparison.comparison_lines(found))
    assert "-5 %" in text and "+11 %" in text and "device" not in text


def test_a_plan_that_fails_is_no_error(tmp_path: Path) -> None:
    said = comparison.plan_apart(tmp_path / "none.toml", [])
    assert isinstance(said, str) and "none.toml: no such configuration file" in said


def test_a_run_is_compared_with_its_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train: Any = importlib.import_module("offload.train")
    monkeypatch.setattr(comparison, "plan_apart", lambda *_: PLAN)
    text = "the quick brown fox jumps over the lazy dog; " * 200
    (tmp_path / "text.txt").write_text(text)
    config = load_config(
        {
            "model": {"hidden_size": 32, "layers": 2, "heads": 2},
            "data": {"context": 32, "files": [str(tmp_path / "text.txt")]},
            "train": {"steps": 6, "batch_size": 2, "eval_batches": 0},
            "placement": dict.fromkeys(("parameters", "gradients", "optimizer"), "nvme"),
            "log": {"trace": True},
        }
    )
    run = RunDirectory(tmp_path / "run")
    run.write_config(config)
    from offload.interruption import Interruption

    progress = Progress(total=6, stream=sys.stderr, errors=sys.stderr)
    summary = train.train(config, run=run, progress=progress, interruption=Interruption())
    run.close()
    assert summary["plan"] == PLAN and summary["predicted_against_measured"]["disk_read_bytes"]["measured"] > 0
    record = report.read_run(run.path)
    assert len(record.spans) > 0 and len(report.step_seconds(record)) == 6
    assert all(row["compute"] > 0 for row in report.step_seconds(record))
    assert record.steps[-1]["busy_seconds"]["disk read"] > 0 and record.steps[-1]["bytes_by_tier"]["nvme"] > 0
    with pytest.raises(ConfigError):
        report.read_run(tmp_path)
