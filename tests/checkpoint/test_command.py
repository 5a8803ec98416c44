"""Resuming with the command line: signals, kills, and full disks, each followed by --resume auto."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

import offload
from offload.checkpoint import complete_checkpoints, tensorfile
from offload.checkpoint import run as checkpoint_run
from offload.checkpoint.run import RunCheckpoints
from offload.cli import main
from tests.forked import Command

TINY = (
    "model.hidden_size=32",
    "model.layers=2",
    "model.heads=2",
    "model.dropout=0.1",
    "data.context=32",
    "train.batch_size=2",
    "train.micro_batches=2",
    "train.eval_batches=2",
    "train.eval_interval=4",
    "train.threads=1",
    "train.steps=12",
    "placement.parameters=nvme",
    "placement.gradients=host",
    "placement.optimizer=nvme",
    "checkpoint.keep=2",
    "log.predict=false",
)


def start(cwd: Path, *arguments: str) -> Command:
    return Command(cwd, ["train", *TINY, *arguments])


def run(cwd: Path, *arguments: str, status: int = 0) -> str:
    process = start(cwd, *arguments)
    out, err = process.communicate()
    assert process.returncode == status, (out, err)
    return out + err


def records(directory: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    kept = ("step", "loss", "eval_loss", "grad_norm", "lr", "tokens")
    return [{key: line[key] for key in kept if key in line} for line in lines]


def tensors(directory: Path) -> dict[str, Any]:
    (_, path) = complete_checkpoints(directory / "checkpoints")[-1]
    (file,) = path.glob("*.safetensors")
    return {key: value.tolist() for key, value in load_file(file).items() if not key.startswith("pad/")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[dict[str, Any]], dict[str, Any]]]:
    """Records and final state of the uninterrupted run."""
    cwd = tmp_path_factory.mktemp("whole")
    run(cwd, "--run-dir", "run", "checkpoint.interval=12", "checkpoint.dry_run=true")
    yield records(cwd / "run"), tensors(cwd / "run")


def wait_for_step(directory: Path, count: int, process: Command) -> None:
    while process.poll() is None:
        path = directory / "metrics.jsonl"
        if path.exists() and len(path.read_text().splitlines()) >= count:
            return
        time.sleep(0.01)
    pytest.fail(f"ended early: {process.communicate()}")


Whole = tuple[list[dict[str, Any]], dict[str, Any]]


def test_a_signal_saves_and_the_run_continues(tmp_path: Path, whole: Whole) -> None:
    signum = signal.SIGTERM
    process = start(tmp_path, "--run-dir", "run")
    wait_for_step(tmp_path / "run", 4, process)
    process.send_signal(signum)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signum, (out, err)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["interrupted"] == signal.Signals(signum).name and summary["checkpoint"] is not None
    assert Path(summary["checkpoint"]).name == f"step-{summary['steps']:08d}"
    said = run(tmp_path, "--run-dir", "run", "--resume", "auto", "checkpoint.interval=12")
    assert f"after {summary['steps']} steps" in said
    assert records(tmp_path / "run") == whole[0]
    assert tensors(tmp_path / "run") == whole[1]


@pytest.fixture
def threads() -> Iterator[None]:
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


@pytest.mark.parametrize("phase", ["__call__", "backward", "step", "eval", "save_checkpoint"])
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1], ids=["TERM", "USR1"])
def test_signals_in_every_phase(
    tmp_path: Path, whole: Whole, monkeypatch: pytest.MonkeyPatch, threads: None, phase: str, signum: int
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    calls: list[int] = []
    real = getattr(offload.Engine, phase)

    def signalling(self: offload.Engine, *arguments: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == (2 if phase in ("eval", "save_checkpoint") else 7):
            signal.raise_signal(signum)
        return real(self, *arguments, **named)

    monkeypatch.setattr(offload.Engine, phase, signalling)
    common = ["train", *TINY, "--run-dir", "run"]
    result = CliRunner().invoke(main, [*common, "checkpoint.interval=3"])
    assert result.exit_code == 128 + signum, (result.stdout, result.exception)
    monkeypatch.setattr(offload.Engine, phase, real)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert 0 < summary["steps"] < 12 and summary["checkpoint"].endswith(f"step-{summary['steps']:08d}")
    result = CliRunner().invoke(main, [*common, "--resume", "auto", "checkpoint.interval=12"])
    assert result.exit_code == 0, (result.stdout, result.exception)
    assert records(tmp_path / "run") == whole[0]
    assert tensors(tmp_path / "run") == whole[1]


def kill_until_done(cwd: Path, times: int, seed: int) -> None:
    """Kills the run `times` times at random moments after it has made a record, then lets it finish."""
    generator = random.Random(seed)
    metrics = cwd / "run" / "metrics.jsonl"
    for _ in range(times):
        before = metrics.stat().st_mtime_ns if metrics.exists() else 0
        process = start(cwd, "--run-dir", "run", "--resume", "auto", "checkpoint.interval=1")
        while process.poll() is None and not (metrics.exists() and metrics.stat().st_mtime_ns != before):
            time.sleep(0.005)
        time.sleep(generator.uniform(0.0, 0.4))
        process.kill()
        process.communicate()
        for _, path in complete_checkpoints(cwd / "run" / "checkpoints"):
            assert (path / "manifest.json").stat().st_size > 0
    run(cwd, "--run-dir", "run", "--resume", "auto", "checkpoint.interval=1")


def test_killed_at_random_moments(tmp_path: Path, whole: Whole) -> None:
    kill_until_done(tmp_path, 5, seed=1)
    assert tensors(tmp_path / "run") == whole[1]
    assert records(tmp_path / "run") == whole[0]


@pytest.mark.acceptance
def test_killed_at_fifty_random_moments(tmp_path: Path, whole: Whole) -> None:
    for round_ in range(10):
        cwd = tmp_path / str(round_)
        cwd.mkdir()
        kill_until_done(cwd, 5, seed=100 + round_)
        assert tensors(cwd / "run") == whole[1]


def test_a_run_whose_saves_fail_goes_on(
    tmp_path: Path, whole: Whole, monkeypatch: pytest.MonkeyPatch, threads: None
) -> None:
    monkeypatch.chdir(tmp_path)
    real, calls = tensorfile.write_all, []

    def write_all(*arguments: Any) -> None:
        calls.append(arguments)
        if 2 <= len(calls) <= 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(*arguments)

    monkeypatch.setattr(tensorfile, "write_all", write_all)
    done = CliRunner().invoke(main, ["train", *TINY, "--run-dir", "run", "checkpoint.interval=3"])
    assert done.exit_code == 0, done.stderr
    warned = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
    assert warned and all("No space left on device" in line for line in warned), done.stderr
    assert "older checkpoints are as they were" in done.stderr and "warning" not in done.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["failed_checkpoints"] == len(warned) and summary["checkpoint"].endswith("step-00000012")
    assert "could not be saved (the last: " in done.stdout and not summary["last_checkpoint_failed"]
    assert tensors(tmp_path / "run") == whole[1]


def full_disk(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


FEW = ("train.steps=4", "optimizer.warmup_steps=0", "train.eval_interval=0", "train.eval_batches=0")


@pytest.mark.parametrize("background", ["true", "false"])
def test_the_last_step_is_saved_between_intervals_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: None, background: str
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = ["checkpoint.interval=3", f"checkpoint.background={background}", "--run-dir", "run", "--resume", "auto"]
    common = ["train", *TINY, *FEW, "train.micro_batches=1", *settings]
    for steps, saved in ((4, [3, 4]), (4, [3, 4]), (5, [4, 5])):
        assert CliRunner().invoke(main, [*common, f"train.steps={steps}"]).exit_code == 0
        assert [step for step, _ in complete_checkpoints(tmp_path / "run" / "checkpoints")] == saved
        summary = json.loads((tmp_path / "run" / "summary.json").read_text())
        assert summary["checkpoint"].endswith(f"step-{steps:08d}")


@pytest.mark.parametrize(
    ("last", "left", "interval", "count"), [(4, 4, 3, 2), (6, 6, 3, 2), (10, 5, 4, 2), (10, 1, 4, 1), (10, 0, 4, 1)]
)
def test_the_last_checkpoint_counts_among_those_that_need_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: int, left: int, interval: int, count: int
) -> None:
    config = offload.load_config({"train": {"steps": last}, "checkpoint": {"interval": interval}})
    checkpoints = RunCheckpoints(config, tmp_path, print, print)
    engine: Any = SimpleNamespace(checkpoint_bytes=lambda: 1000)
    monkeypatch.setattr(checkpoint_run, "free_bytes", lambda _: 1000 * count)
    checkpoints.check_space(engine, left)
    monkeypatch.setattr(checkpoint_run, "free_bytes", lambda _: 1000 * count - 1)
    with pytest.raises(offload.ConfigError, match=r"checkpoint\.directory"):
        checkpoints.check_space(engine, left)


@pytest.mark.parametrize("background", ["true", "false"])
def test_a_run_whose_last_save_fails_says_so_in_its_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: None, background: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tensorfile, "write_all", full_disk)
    settings = ["checkpoint.interval=2", f"checkpoint.background={background}"]
    done = CliRunner().invoke(main, ["train", *TINY, *FEW, *settings, "--run-dir", "run"])
    assert done.exit_code == 3, (done.stderr, done.exception)
    assert done.stderr.count("warning: ") == 2 and "No space left on device" in done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "could not be saved" in line]
    assert line.startswith("2 checkpoints could not be saved (the last: ") and "No space left on device" in line
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 4 and summary["last_checkpoint_failed"] and summary["checkpoint"] is None


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGTERM, 3), (signal.SIGUSR1, 3), (signal.SIGINT, 130)])
def test_a_signal_whose_save_fails_says_so_in_its_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: None, signum: int, status: int
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tensorfile, "write_all", full_disk)
    real = offload.Engine.train_batch

    def signalling(self: offload.Engine, *arguments: Any, **named: Any) -> Any:
        signal.raise_signal(signum)
        return real(self, *arguments, **named)

    monkeypatch.setattr(offload.Engine, "train_batch", signalling)
    done = CliRunner().invoke(main, ["train", *TINY, *FEW, "--run-dir", "run"])
    assert done.exit_code == status, (done.stderr, done.exception)
    assert ("1 checkpoint could not be saved (the last: " in done.stdout) == (status == 3)


def test_where_nothing_can_be_saved_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: None
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    for directory in ("/proc/checkpoints", "/sys/none", "file", "file/below"):
        done = CliRunner().invoke(main, ["train", *TINY, f"checkpoint.directory={directory}", "--run-dir", "run"])
        (line,) = done.stderr.splitlines()
        assert done.exit_code == 2 and line.startswith(f"error: checkpoint.directory = '{directory}': "), line
        assert done.stdout == "" and os.listdir(tmp_path) == ["file"]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("")  # the default directory
    done = CliRunner().invoke(main, ["train", *TINY, "--run-dir", "run"])
    (line,) = done.stderr.splitlines()
    assert done.exit_code == 2 and "checkpoint.directory = 'run/checkpoints': " in line and "not a directory" in line
    assert os.listdir(tmp_path / "run") == ["checkpoints"]


def test_a_run_starts_from_exported_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: None) -> None:
    monkeypatch.chdir(tmp_path)
    few = ["train.steps=2", "train.eval_interval=0"]
    first = ["train", *TINY, *few, "checkpoint.interval=2", "--run-dir", "first"]
    assert CliRunner().invoke(main, first).exit_code == 0
    assert CliRunner().invoke(main, ["convert", "first/checkpoints", "weights", "--json"]).exit_code == 0
    result = CliRunner().invoke(main, ["train", *TINY, *few, "model.weights=weights", "--run-dir", "second"])
    assert result.exit_code == 0, result.stderr
    before, after = records(tmp_path / "first"), records(tmp_path / "second")
    assert before[-1]["eval_loss"] == after[0]["eval_loss"] != before[0]["eval_loss"]
    result = CliRunner().invoke(main, ["train", *TINY, "model.weights=absent", "--run-dir", "third"])
    assert result.exit_code == 2 and "no such file" in result.stderr and not (tmp_path / "third").exists()


def test_the_run_that_saved_last_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: None) -> None:
    monkeypatch.chdir(tmp_path)
    common = ["train", *TINY, "train.eval_batches=0", "checkpoint.interval=2"]
    for name in ("a", "b"):
        assert CliRunner().invoke(main, [*common, "train.steps=2", "--run-dir", f"runs/{name}"]).exit_code == 0
    # Without CONFIG as that run was configured, but for what the command line says.
    result = CliRunner().invoke(main, ["train", "--resume", "auto", "train.steps=4"])
    assert result.exit_code == 0 and "resumed from runs/b/checkpoints/step-00000002" in result.stdout, result.stdout
    assert [record["step"] for record in records(tmp_path / "runs" / "b")] == [1, 2, 3, 4]
    # A directory in the configuration is the one that is meant.
    result = CliRunner().invoke(main, [*common, "train.steps=3", "run_dir=elsewhere", "--resume", "auto"])
    assert result.exit_code == 0 and "resumed" not in result.stdout, result.stdout
    assert [record["step"] for record in records(tmp_path / "elsewhere")] == [1, 2, 3]


def test_resume_of_what_is_not_there(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        main, ["train", *TINY, "--resume", str(tmp_path / "none"), "--run-dir", str(tmp_path / "r")]
    )
    assert result.exit_code == 2 and result.stderr.count("error:") == 1, result.stderr
    assert "--resume:" in result.stderr and "none: no such directory" in result.stderr
    assert not (tmp_path / "r").exists()
