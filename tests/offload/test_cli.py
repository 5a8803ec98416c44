"""``offload train`` as users run it: in a process of its own, on a tiny model, with real swap files."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import offload as package
from offload.cli import main
from offload.config import load_config
from swap import FaultPlan
from swap.files import host_name
from tests import programs

TINY = (
    "model.hidden_size=32",
    "model.layers=2",
    "model.heads=2",
    "data.context=32",
    "train.batch_size=2",
    "train.eval_batches=2",
    "train.threads=1",
    "placement.parameters=nvme",
    "placement.gradients=nvme",
    "placement.optimizer=nvme",
    "log.predict=false",
)
RUN_FILES = ["config.toml", "metrics.jsonl", "summary.json"]


class Command:
    """Runs ``python -m offload`` in an empty working directory with its own temporary directory."""

    def __init__(self, directory: Path) -> None:
        self.cwd = directory / "cwd"
        self.tmp = directory / "tmp"
        self.cwd.mkdir()
        self.tmp.mkdir()
        root = Path(__file__).resolve().parents[2]
        path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
        # torch makes an empty cache below TMPDIR unless it is given a place.
        cache = {"TORCHINDUCTOR_CACHE_DIR": str(directory / "inductor")}
        self.environment = os.environ | {"TMPDIR": str(self.tmp), "PYTHONPATH": path} | cache

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "offload", *arguments],
            cwd=self.cwd,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def apart(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs the command in a process of its own."""
        process = self.start(*arguments)
        out, err = process.communicate(timeout=100)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def forked(self, *arguments: str, before: str = "") -> programs.Program:
        """Starts the command in a process that need not import torch, and runs `before` first."""
        return programs.Program("-m", "offload", *arguments, cwd=self.cwd, env=self.environment, before=before)

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs the command in this process: most of the time of a tiny run is the import of torch."""
        result = CliRunner().invoke(main, arguments, prog_name="offload")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return subprocess.CompletedProcess(arguments, result.exit_code, result.stdout, result.stderr)

    def tree(self) -> list[str]:
        """Every file and directory below the working and the temporary directory."""
        roots = (self.cwd, self.tmp)
        return sorted(str(path.relative_to(root)) for root in roots for path in root.rglob("*"))


@pytest.fixture
def offload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    command = Command(tmp_path)
    monkeypatch.chdir(command.cwd)
    monkeypatch.setattr(tempfile, "tempdir", str(command.tmp))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", command.environment["TORCHINDUCTOR_CACHE_DIR"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    return command


def read_run(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    records = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return json.loads((path / "summary.json").read_text()), records


def test_a_run_writes_one_directory(offload: Command) -> None:
    arguments = ["train", *TINY, "train.steps=6", "train.micro_batches=2", "train.eval_interval=3", "log.interval=2"]
    done = offload.apart(*arguments, "optimizer.lr=1e-2", "--run-dir", "run")
    assert done.returncode == 0, done.stderr
    assert offload.tree() == ["run", *(f"run/{name}" for name in RUN_FILES)]
    assert "held-out loss" in done.stdout and "run directory run" in done.stdout and "nvme" in done.stdout
    assert "nothing that was trained is kept: checkpoint.interval saves it" in done.stdout
    summary, records = read_run(offload.cwd / "run")
    assert summary["steps"] == 6 and summary["skipped_steps"] == 0 and summary["tokens"] == 6 * 2 * 2 * 32
    assert summary["last_loss"] < summary["first_loss"] and summary["eval_loss"] < summary["eval_loss_first"]
    assert summary["tokens_per_second"] == pytest.approx(summary["tokens"] / summary["seconds"])
    assert summary["seconds"] <= summary["total_seconds"]
    assert summary["nvme_read_bytes"] > 0 and summary["nvme_write_bytes"] > 0 and summary["peak_rss_bytes"] > 0
    assert set(summary["step_seconds_median_by_phase"]) == {"micro-batches and step", "evaluation"}
    assert summary["memory"] and summary["interrupted"] is False and summary["error"] is None
    steps = [record for record in records if "loss" in record]
    assert [record["step"] for record in steps] == [2, 4, 6]
    assert [record["step"] for record in records if "eval_loss" in record] == [0, 3, 6]
    assert steps[-1]["loss"] == summary["last_loss"] and all(record["grad_norm"] > 0 for record in steps)
    # The built-in recipe warms up over ten steps.
    assert [record["lr"] for record in steps] == pytest.approx([2e-3, 4e-3, 6e-3])
    assert load_config(offload.cwd / "run" / "config.toml").train.steps == 6


def test_the_written_configuration_repeats_the_run(offload: Command) -> None:
    first = offload("train", *TINY, "train.steps=3", "--run-dir", "a", "--json")
    assert first.returncode == 0, first.stderr
    summary = json.loads(first.stdout)
    assert summary == read_run(offload.cwd / "a")[0]
    second = offload("train", "a/config.toml", "placement.optimizer=host", "--run-dir", "b", "--json")
    assert second.returncode == 0, second.stderr
    for key in ("first_loss", "last_loss", "eval_loss_first", "eval_loss"):
        assert json.loads(second.stdout)[key] == summary[key]


def test_text_and_swap_directory_of_the_user(offload: Command) -> None:
    (offload.cwd / "swap").mkdir()
    for name in ("one.txt", "two.txt"):
        (offload.cwd / name).write_text("abcdefgh" * 400)
    done = offload(
        "train", *TINY, "train.steps=30", "optimizer.lr=1e-2", "data.files=*.txt", "memory.nvme_paths=swap", "run_dir=r"
    )
    assert done.returncode == 0, done.stderr
    summary, _ = read_run(offload.cwd / "r")
    assert summary["eval_loss"] < 2.5 < summary["eval_loss_first"], "eight letters in a fixed order are easy"
    assert os.listdir(offload.cwd / "swap") == []


def test_a_factory_beside_the_configuration(offload: Command) -> None:
    (offload.cwd / "own_model.py").write_text(
        "from offload.models import Llama, LlamaConfig\n"
        "def build():\n"
        "    return Llama(LlamaConfig(vocab_size=256, hidden_size=32, layers=2, heads=2, max_positions=32))\n"
    )
    settings = [text for text in TINY if not text.startswith("model.")]
    done = offload(
        "train",
        *settings,
        "model.factory=own_model:build",
        "optimizer.scheduler=none",
        "optimizer.warmup_steps=0",
        "train.steps=2",
        "--run-dir",
        "run",
    )
    assert done.returncode == 0, done.stderr
    assert read_run(offload.cwd / "run")[0]["steps"] == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["none.toml"], "none.toml: no such configuration file"),
        (["train.stesp=3"], "train.stesp: unknown key; did you mean 'train.steps'?"),
        (["train.steps=many"], "command line: train.steps = 'many': must be a whole number"),
        (["memory.host=12 parsecs"], "memory.host = '12 parsecs'"),
        (["memory.nvme_paths=missing"], "missing"),
        ([*TINY, "memory.nvme=64KiB"], "memory.nvme"),
        (["data.files=*.missing"], "data.files: '*.missing'"),
        (["data.context=1000000"], "data.context"),
        (["model.preset=9b"], "model.preset = '9b'"),
        (["model.preset=none", "model.factory=absent:build"], "absent"),
        ([*TINY, "optimizer.no_decay=['nothing*']"], "optimizer.no_decay"),
        ([*TINY, "units.wrap=['NoSuchBlock']"], "NoSuchBlock"),
        (["checkpoint.keep_every=5"], "keep_every = 5"),
        ([*TINY, "checkpoint.interval=1", "train.steps=1000000000"], "checkpoint.directory"),
        (["train.steps=3", "stray"], "'stray'"),
    ],
)
def test_user_errors_are_one_line_and_leave_nothing(offload: Command, arguments: list[str], said: str) -> None:
    done = offload("train", *arguments)
    assert done.returncode == 2, (done.stdout, done.stderr)
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and said in lines[0], done.stderr
    assert offload.tree() == []


def test_several_problems_are_several_lines(offload: Command) -> None:
    done = offload("train", "train.steps=0", "seed=x", "--run-dir", "run")
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 2
    assert all(line.startswith("error: ") for line in done.stderr.strip().splitlines())


def test_a_used_run_directory_is_left_alone(offload: Command) -> None:
    (offload.cwd / "run").mkdir()
    (offload.cwd / "run" / "summary.json").write_text("{}")
    done = offload("train", *TINY, "--run-dir", "run")
    assert done.returncode == 2 and "already holds a run" in done.stderr
    assert offload.tree() == ["run", "run/summary.json"]


def wait_for(path: Path, count: int, process: subprocess.Popen[str] | programs.Program) -> None:
    """Until ``path`` has ``count`` lines."""
    while process.poll() is None:
        if path.exists() and len(path.read_text().splitlines()) >= count:
            return
        time.sleep(0.05)
    pytest.fail(f"ended early: {process.communicate()}")


@pytest.mark.parametrize("records", [0, 1, 4], ids=["set-up", "first step", "training"])
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_a_run_in_order(offload: Command, signum: int, records: int) -> None:
    start = offload.start if records == 0 else offload.forked  # set-up imports
    process = start("train", *TINY, "train.steps=1000000", "train.eval_interval=7", "--run-dir", "run")
    wait_for(offload.cwd / "run" / "metrics.jsonl", records, process)
    process.send_signal(signum)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 128 + signum, (out, err)
    assert err == ""
    summary, lines = read_run(offload.cwd / "run")
    assert sorted(path.name for path in (offload.cwd / "run").iterdir() if path.name != "checkpoints") == RUN_FILES
    if signum == signal.SIGINT:
        assert summary["checkpoint"] is None
    assert (offload.cwd / "run" / "checkpoints").exists() == (summary["checkpoint"] is not None)
    assert summary["interrupted"] == signal.Signals(signum).name and summary["error"] is None
    assert summary["steps"] == len([line for line in lines if "loss" in line])
    if records == 4:
        assert summary["steps"] >= 1 and summary["nvme_write_bytes"] > 0


def test_a_killed_run_leaves_no_swap_file(offload: Command) -> None:
    process = offload.forked("train", *TINY, "train.steps=1000000", "--run-dir", "run")
    wait_for(offload.cwd / "run" / "metrics.jsonl", 2, process)
    process.kill()
    process.communicate(timeout=30)
    sizes = {path.name: path.stat().st_size for path in (offload.cwd / "run").rglob("*") if path.is_file()}
    assert sum(sizes.values()) < 1 << 20, sizes


def test_a_fault_of_the_disk_is_one_line(offload: Command) -> None:
    small_files = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, 64 << 10))"
    done = offload.forked("train", *TINY, "train.steps=3", "--run-dir", "run", before=small_files)
    _, said = done.communicate(timeout=100)
    assert done.returncode in (1, 2), said
    lines = said.strip().splitlines()
    assert len(lines) == 1 and "File too large" in lines[0] and "run/swap" in lines[0], said
    assert "swap" not in [Path(name).name for name in offload.tree()]


@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_fault_in_mid_run_is_one_line_and_in_the_summary(
    offload: Command, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    plan = FaultPlan()
    real = package.initialize

    def initialize(*arguments: Any, **named: Any) -> Any:
        engine = real(*arguments, **named, faults=plan)
        plan.fail(operation, errno=errno.EIO, nth=plan.calls[operation] + 60)
        return engine

    monkeypatch.setattr(package, "initialize", initialize, raising=False)
    threads = threading.active_count()
    done = offload("train", *TINY, "train.steps=1000", "--run-dir", "run")
    assert done.returncode == 1, (done.stdout, done.stderr)
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "Input/output error" in lines[0] and "run/swap" in lines[0], done.stderr
    assert "Traceback" not in done.stderr
    summary, _ = read_run(offload.cwd / "run")
    assert summary["steps"] >= 1 and lines[0] == f"error: {summary['error']}" and summary["interrupted"] is False
    assert offload.tree() == ["run", *(f"run/{name}" for name in RUN_FILES)]
    assert threading.active_count() == threads


def test_a_step_that_is_skipped_is_said_and_counted(offload: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def poisoned(self: Any, loss: Any, *arguments: Any, **named: Any) -> None:
        calls.append(loss)
        real(self, loss * float("inf") if len(calls) == 2 else loss, *arguments, **named)

    real = package.Engine.backward
    monkeypatch.setattr(package.Engine, "backward", poisoned)
    done = offload("train", *TINY, "train.steps=3", "--run-dir", "run")
    assert done.returncode == 0, done.stderr
    summary, records = read_run(offload.cwd / "run")
    assert summary["steps"] == 3 and summary["skipped_steps"] == 1
    skipped = [record for record in records if record.get("stepped") is False]
    assert [record["step"] for record in skipped] == [2] and "is not finite" in skipped[0]["skipped_reason"]
    assert "step 2 skipped: " in done.stdout
    steps = [record for record in records if "loss" in record]
    assert steps[1]["lr"] == steps[2]["lr"], "a skipped step does not move the schedule"


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_an_interrupt_before_the_run_is_one_line(offload: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload.cli.train._config", interrupt)
    done = offload("train")
    assert done.returncode == 130 and done.stderr == "error: interrupted by SIGINT\n" and done.stdout == ""


def test_an_interrupt_during_imports_is_one_line(offload: Command) -> None:
    # A module that the command imports early, replaced by one that is interrupted.
    (offload.cwd / "tomli.py").write_text("raise KeyboardInterrupt\n")
    done = offload.apart("train")
    assert done.returncode == 130 and done.stderr == "error: interrupted by SIGINT\n", done.stderr


def test_version(offload: Command) -> None:
    done = offload("version", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["torch"].startswith("2.")
    assert offload("version").stdout.splitlines()[0].startswith("offload ")


def test_help_names_the_commands(offload: Command) -> None:
    done = offload.apart("--help")
    assert done.returncode == 0 and "train" in done.stdout
    assert offload("nonsense").returncode == 2


def leave_behind(directory: Path) -> Path:
    """What a run that was killed at the wrong moment leaves."""
    found = directory / f"offload-{host_name()}-{2**22}-{'0a' * 8}"
    found.mkdir(parents=True)
    (found / "lock").write_text("")
    (found / "swap").write_bytes(b"x" * 8192)
    return found


def test_clean_removes_leftovers_and_nothing_else(offload: Command) -> None:
    left = leave_behind(offload.cwd / "swap")
    (offload.cwd / "swap" / "mine").write_text("keep")
    listed = offload("clean", "swap", "--dry-run", "--json")
    assert listed.returncode == 0 and json.loads(listed.stdout) == {"found": {f"swap/{left.name}": 8192}}
    assert left.exists()
    done = offload("clean", "swap")
    assert done.returncode == 0 and "1 removed, 8.19 KB" in done.stdout
    assert offload.tree() == ["swap", "swap/mine"]


def test_clean_of_a_run_directory(offload: Command) -> None:
    leave_behind(offload.cwd / "run" / "swap")
    (offload.cwd / "run" / "metrics.jsonl").write_text("")
    assert offload("clean", "run").returncode == 0
    assert offload.tree() == ["run", "run/metrics.jsonl"]


def test_clean_leaves_a_live_run_alone(offload: Command) -> None:
    left = leave_behind(offload.cwd / "swap")
    with open(left / "lock", "r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = offload("clean", "swap", "--json")
    assert done.returncode == 0 and json.loads(done.stdout) == {"removed": {}}
    assert (left / "swap").exists()


def test_clean_of_a_path_that_is_not_there(offload: Command) -> None:
    done = offload("clean", "none")
    assert done.returncode == 2 and done.stderr == "error: none: no such directory\n"
