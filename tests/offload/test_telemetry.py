"""Run directory, progress, phase timers, process memory."""

from __future__ import annotations

import io
import json
import os
import stat
from pathlib import Path

import pytest

from offload.config import DEFAULT_FILE, ConfigError, load_config
from offload.telemetry import PhaseTimers, Progress, RunDirectory, dump_json, format_bytes, peak_rss_bytes


def test_records_are_on_disk_at_once_and_valid_json(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "a" / "run")
    run.record({"step": 1, "loss": 2.5})
    run.record({"step": 2, "loss": float("nan"), "grad_norm": float("-inf"), "names": ("x", 1)})

    def no_constants(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    lines = (run.path / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line, parse_constant=no_constants) for line in lines]
    assert records == [
        {"step": 1, "loss": 2.5},
        {"step": 2, "loss": "nan", "grad_norm": "-inf", "names": ["x", 1]},
    ]
    run.close()
    run.close()


def test_the_written_configuration_gives_the_same_run(tmp_path: Path) -> None:
    config = load_config(DEFAULT_FILE, ["memory.host=3MiB"])
    run = RunDirectory(tmp_path / "run")
    run.write_config(config)
    run.close()
    assert load_config(run.path / "config.toml") == config


def test_the_summary_is_replaced_whole(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.write_summary({"steps": 1})
    run.write_summary({"steps": 2})
    with pytest.raises(TypeError):
        run.write_summary({"steps": object()})
    run.close()
    assert json.loads((tmp_path / "summary.json").read_text()) == {"steps": 2}
    assert sorted(os.listdir(tmp_path)) == ["metrics.jsonl", "summary.json"]
    assert stat.S_IMODE((tmp_path / "summary.json").stat().st_mode) == 0o644


def test_a_directory_holds_one_run(tmp_path: Path) -> None:
    RunDirectory(tmp_path / "run").close()
    with pytest.raises(ConfigError, match="already holds a run"):
        RunDirectory(tmp_path / "run")


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        RunDirectory(tmp_path / "run")


def test_default_directories_do_not_collide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [RunDirectory(None) for _ in range(3)]
    for run in runs:
        run.close()
    assert len({run.path for run in runs}) == 3
    assert all(run.path.parent == Path("runs") for run in runs)


def test_discard_removes_only_what_the_run_made(tmp_path: Path) -> None:
    fresh = RunDirectory(tmp_path / "above" / "fresh")
    fresh.write_config(load_config())
    fresh.discard()
    assert os.listdir(tmp_path) == []
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "note").write_text("mine")
    old = RunDirectory(tmp_path / "old")
    old.discard()
    assert os.listdir(tmp_path / "old") == ["note"]


def test_timers_add_up_within_a_step() -> None:
    timers = PhaseTimers()
    for _ in range(2):
        for _ in range(3):
            with timers.phase("forward"):
                pass
        with pytest.raises(RuntimeError), timers.phase("backward"):
            raise RuntimeError
        assert sorted(timers.end_step()) == ["backward", "forward"]
    with timers.phase("evaluation"):
        pass
    timers.end_step()
    assert sorted(timers.medians()) == ["backward", "evaluation", "forward"]
    assert all(seconds >= 0 for seconds in timers.medians().values())
    assert timers.end_step() == {}


def test_plain_progress_is_lines_without_control_characters() -> None:
    stream = io.StringIO()
    with Progress(total=100, stream=stream, errors=stream) as progress:
        with progress.phase("planning"):
            pass
        for step in range(1, 101):
            progress.step(step, loss=1.5, tokens_per_second=1234.5, read=2_000_000, written=0)
        progress.say("[bold]kept[/bold]")
    text = stream.getvalue()
    assert "\x1b" not in text
    lines = text.splitlines()
    assert lines[0] == "planning ..." and lines[-1] == "[bold]kept[/bold]"
    assert lines[1].startswith("step 1/100  loss 1.500  1,23") and "read 2.00 MB" in lines[1]
    assert lines[-2].startswith("step 100/100")
    assert len(lines) <= 2 + 22


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_the_phase_and_the_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    with Progress(total=2, stream=stream, errors=stream) as progress:
        with progress.phase("evaluating"):
            assert progress._bar is not None
            progress._bar.refresh()
        progress.step(2, loss=0.25, tokens_per_second=10.0, read=1, written=2)
    text = stream.getvalue()
    assert "evaluating" in text and "loss 0.250" in text and "2/2" in text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 KB"), (12_345, "12.3 KB"), (999_999, "1.00 MB"), (2.5e12, "2.50 TB")],
)
def test_bytes_have_three_digits(count: float, text: str) -> None:
    assert format_bytes(count) == text


def test_peak_memory_covers_what_was_touched() -> None:
    block = bytearray(64 << 20)
    block[::4096] = b"x" * len(block[::4096])
    assert peak_rss_bytes() > len(block)


def test_dump_json_is_strict() -> None:
    assert json.loads(dump_json({"a": float("inf"), "b": {1: (2,)}})) == {"a": "inf", "b": {"1": [2]}}
