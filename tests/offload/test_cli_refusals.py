"""What the command cannot do: one ``error:`` line for each problem, status 2, and nothing left behind."""

from __future__ import annotations

import errno
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from offload.checkpoint import export
from offload.cli import main

TINY = (
    "model.hidden_size=32",
    "model.layers=1",
    "model.heads=2",
    "data.context=32",
    "train.batch_size=2",
    "train.eval_batches=0",
    "train.threads=1",
    "log.predict=false",
)


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(main, arguments, prog_name="offload")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def refused(*arguments: str, lines: int = 1) -> str:
    result = run(*arguments)
    assert result.exit_code == 2, (result.stdout, result.stderr)
    found = result.stderr.splitlines()
    assert len(found) == lines and all(line.startswith("error: ") for line in found), result.stderr
    return result.stderr


@pytest.fixture(scope="module")
def a_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run with two checkpoints."""
    directory = tmp_path_factory.mktemp("runs") / "one"
    result = run("train", *TINY, "train.steps=4", "checkpoint.interval=2", "--run-dir", str(directory))
    assert result.exit_code == 0, result.stderr
    return directory


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["convert", "RUN", "x", "--max-shard-size", "foo"], "'foo' is not a size"),
        (["convert", "RUN", "x", "--max-shard-size", "0B"], "at least one byte"),
        (["convert", "RUN", "x", "--to", "pickle"], "'pickle' is not one of"),
        (["convert", "RUN", "x", "--dtype", "fp32", "--to", "dcp"], "--dtype fp32"),
        (["convert", "RUN", "x", "--carry", "absent"], "absent: no such directory"),
        (["convert", "RUN"], "Missing argument 'TARGET'"),
        (["convert", "absent", "x"], "absent: no such file or directory"),
        (["convert", "RUN", "file/x"], "file is not a directory"),
        (["convert", "RUN", "/proc/x"], "nothing can be written in /proc"),
        (["convert", "file", "x"], "file"),
        (["inspect", "absent"], "absent: no such directory"),
        (["inspect", "file"], "file: not a directory"),
        (["verify", "file"], "file: not a directory"),
        (["train", "--resume", "absent"], "--resume: absent: no such directory"),
        (["train", "--resume", "file"], "--resume: file: not a directory"),
        (["train", "--run-dir", "file"], "run_dir = 'file'"),
        (["train", "--nonsense"], "--nonsense"),
        (["plan", "absent.toml"], "absent.toml: no such configuration file"),
        (["report", "absent"], "absent"),
        (["report", "RUN", "--out", "file"], "file"),
        (["report", "file"], "file"),
        (["clean", "file"], "file: no such directory"),
        (["bench", "io", "absent", "--quick", "--no-fio"], "absent"),
        (["bench", "io", ".", "--bytes", "many"], "'many' is not a size"),
        (["bench", "io", ".", "--request", "-1"], "-1"),
        (["bench", "io", ".", "--rounds", "0"], "--rounds"),
        (["bench", "overhead", "absent"], "absent"),
        (["bench", "overhead", "/proc"], "nothing can be written in /proc"),
        (["bench", "models", "--write", "absent"], "absent"),
        (["bench", "models", "--mode", "sideways"], "sideways"),
        (["bench", "step", "--model", "9b"], "9b"),
        (["bench", "step", "--disk-bytes", "12 parsecs"], "parsecs"),
        (["bench", "step", "--swap", "absent"], "absent"),
        (["bench", "step", "--peers", "--peers-python", "absent"], "absent"),
        (["bench", "optimizer", "--elements", "many"], "--elements"),
        (["bench", "memory", "--layers", "0"], "--layers"),
        (["nonsense"], "nonsense"),
    ],
)
def test_every_option_is_refused_in_one_line(a_run: Path, arguments: list[str], said: str) -> None:
    Path("file").write_text("neither weights nor a checkpoint")
    assert said in refused(*(str(a_run) if text == "RUN" else text for text in arguments))
    assert os.listdir() == ["file"]


def test_a_comparison_without_its_libraries_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "peft" else find(name))
    Path("table").write_text("as it was")
    assert "not installed: peft; pip install peft" in refused("bench", "models", "--write", "table")
    assert Path("table").read_text() == "as it was"


def test_an_export_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(export, "_write_shard", full)
    Path("file").write_text("")
    for directory in ("new", "file"):  # in one of them not even names can be removed
        with pytest.raises(export.CheckpointSaveError, match="the export failed"):
            export.export_tensors([], directory)


def test_the_directory_of_a_run_stands_for_its_checkpoints(a_run: Path) -> None:
    newest = str(a_run / "checkpoints" / "step-00000004")
    shown = run("inspect", str(a_run))
    listed = [line.partition(":")[0] for line in shown.stdout.splitlines()]
    assert shown.exit_code == 0 and listed == [str(a_run / "checkpoints" / "step-00000002"), newest]
    assert run("verify", str(a_run)).stdout.startswith(f"{newest}: whole")
    assert f"from {newest}" in run("convert", str(a_run), "weights").stdout
    resumed = run("train", *TINY, "train.steps=5", "--resume", str(a_run), "--run-dir", "next")
    assert resumed.exit_code == 0 and f"resumed from {newest}" in resumed.stdout


def test_the_directory_of_a_run_without_checkpoints_is_called_that(a_run: Path) -> None:
    Path("bare").mkdir()
    Path("bare/metrics.jsonl").write_text("")
    for arguments in (["inspect", "bare"], ["verify", "bare"], ["convert", "bare", "x"], ["train", "--resume", "bare"]):
        assert "bare: the directory of a run that has no checkpoint" in refused(*arguments)
    Path("empty").mkdir()
    assert "empty: no .safetensors file in it" in refused("convert", "empty", "x")
    assert f"offload convert {a_run} TARGET" in refused("train", *TINY, f"model.weights={a_run}")


def test_the_version_is_an_option_too() -> None:
    assert run("--version").stdout == run("version").stdout.splitlines()[0] + "\n"


def test_what_needs_no_torch_is_refused_without_it() -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from offload.cli import main\n"
        "main(['train', 'checkpoint.directory=/proc/x', '--resume', 'absent', 'train.steps=3'])"
    )
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": root}, capture_output=True, text=True
    )
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 2, done.stderr


WITHOUT_TORCH = [
    ("model.preset=30m", "command line: model.preset = '30m': must be one of 20m"),
    ("model.hidden_size=7", "command line: model.hidden_size = 7 must be a multiple of heads = 8"),
    ("model.max_positions=16", "command line: model.max_positions = 16 is less than data.context = 128"),
    ("swap.block=3", "command line: swap.block = 3: must be a multiple of 4096 bytes"),
    ("data.context=1", "command line: data.context = 1: must be at least 2"),
    ("optimizer.state_format=compact precision.compute_dtype=fp32", "optimizer.state_format = 'compact'"),
    ("schedule.optimizer_step=eager", "optimizer.max_grad_norm = 1 needs the norm of all gradients"),
    ("schedule.optimizer_step=eager optimizer.max_grad_norm=none", "optimizer.check_finite needs the norm"),
    ("memory.nvme_paths=['absent']", "swap path 'absent'"),
    ("memory.nvme_paths=['/proc']", "swap path '/proc'"),
    ("memory.nvme_paths=['/etc/passwd']", "swap path '/etc/passwd' is not a directory"),
    ("model.weights=absent", "model.weights = 'absent': no such file or directory"),
    ("data.files=*.absent", "data.files: '*.absent'"),
]


def test_values_that_need_no_model_are_refused_before_torch_is_loaded() -> None:
    cases = [["train", *settings.split()] for settings, _ in WITHOUT_TORCH]
    cases += [["plan", *settings.split()] for settings, _ in WITHOUT_TORCH]
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from offload.cli import main\n"
        f"for arguments in {cases!r}:\n"
        "    try:\n        main(arguments)\n"
        "    except SystemExit as end:\n        print(end.code, file=sys.stderr)\n"
    )
    root = str(Path(__file__).resolve().parents[2])
    environment = os.environ | {"PYTHONPATH": root}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    lines = done.stderr.splitlines()
    assert done.returncode == 0 and done.stdout == "" and os.listdir() == [], (done.stdout, done.stderr)
    assert len(lines) == 2 * len(cases) and set(lines[1::2]) == {"2"}, done.stderr
    for line, (_, said) in zip(lines[::2], [*WITHOUT_TORCH, *WITHOUT_TORCH], strict=True):
        assert line.startswith("error: ") and said in line


def test_sections_that_are_wrong_together_are_told_together() -> None:
    said = refused("train", "train.steps=0", "model.preset=30m", lines=2)
    assert "train.steps" in said and "model.preset" in said
    said = refused("train", "schedule.optimizer_step=eager", "model.max_positions=16", lines=2)
    said = refused("train", "memory.nvme_paths=['absent']", "model.weights=absent", "--resume", "absent", lines=3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_what_fails_the_run_is_not_said_of_its_prediction_too() -> None:
    tiny = [text for text in TINY if not text.startswith("log.")]
    result = run("train", *tiny, "train.steps=5", "device=cuda")
    assert result.exit_code == 2 and "prediction" not in result.stdout + result.stderr, result.stdout
    assert len(result.stderr.splitlines()) == 1


def test_a_budget_that_cannot_be_is_refused_without_warnings(recwarn: pytest.WarningsRecorder) -> None:
    said = refused("train", *TINY, "memory.device=1KiB", "train.steps=2")
    assert "memory.device" in said and not [w for w in recwarn if issubclass(w.category, UserWarning)]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["memory.host=99TiB"], "memory.host = 99 TiB is more than the "),
        (["optimizer.warmup_steps=100"], "optimizer.warmup_steps = 100 is more than train.steps = 1"),
        (["parallel.shard_size=2"], "parallel.shard_size = 2 has no effect in a single process"),
    ],
)
def test_what_is_hardly_meant_is_a_warning(settings: list[str], said: str) -> None:
    quiet = ["optimizer.warmup_steps=0", "train.steps=1"]
    result = run("train", *TINY, *quiet, *settings, "--run-dir", "r")
    (line,) = result.stderr.splitlines()
    assert result.exit_code == 0 and line.startswith(f"warning: {said}"), line


def test_a_checkpoint_of_another_model_is_refused_with_what_the_command_has(a_run: Path) -> None:
    said = refused("train", *TINY, "model.layers=2", "--resume", str(a_run), "--run-dir", "r")
    assert "not in the checkpoint" in said and "model.weights" in said and "keep" not in said


def test_a_run_that_is_over_says_that_there_is_nothing_to_do(a_run: Path) -> None:
    result = run("train", *TINY, "train.steps=3", "--resume", str(a_run), "--run-dir", "r")
    assert result.exit_code == 0 and "nothing to do: the saved run has 4 steps, train.steps = 3" in result.stdout


def test_warnings_show_no_source_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    import warnings

    from offload.cli import failures

    @main.command("warns")
    def warns() -> None:
        with failures.reported(debug=False):
            warnings.simplefilter("always")
            warnings.warn("look\n  here", RuntimeWarning, stacklevel=1)

    try:
        assert run("warns").stderr == "warning: look here\n"
    finally:
        del main.commands["warns"]


def test_doctor_gives_advice_once() -> None:
    result = run("doctor", "/nonexistent")
    assert result.exit_code == 1 and result.stdout.count("create it") == 1, result.stdout


@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0)])
def test_one_rank_of_a_machine_says_what_all_find(monkeypatch: pytest.MonkeyPatch, rank: str, lines: int) -> None:
    for name, value in (("WORLD_SIZE", "2"), ("RANK", rank), ("LOCAL_RANK", rank)):
        monkeypatch.setenv(name, value)
    refused("train", "train.steps=0", lines=lines)
