"""``offload bench io``, ``offload doctor``, the wear of a run, and what DeepSpeed's keys are told."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from offload import machine
from offload.bench import fio, io
from offload.cli import main
from offload.config import ConfigError, load_config
from offload.doctor import Check, examine, report, text, worst

KEYS = ("read_bytes_per_s", "write_bytes_per_s", "mixed_bytes_per_s")


def bench(*arguments: str) -> dict[str, Any]:
    done = CliRunner().invoke(main, ["bench", "io", *arguments, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io, "SWEEP_SECONDS", 0.05)
    monkeypatch.setattr(io, "SWEEP_BYTES", 8 << 20)


def test_bench_io_prints_the_keys_of_its_contract(tmp_path: Path) -> None:
    found = bench(str(tmp_path), "--bytes", "16MiB", "--no-fio", "--quick")
    assert all(found[key] > 0 for key in KEYS) and found["mixing_penalty"] >= 0 and found["cpu_seconds_per_gb"] > 0
    assert set(found["best"]) == {"engine", "block", "queue_depth"}
    assert found["best"]["engine"] in found["engines"] and {"threads", "aiofiles"} <= set(found["engines"])
    for row in found["engines"].values():
        assert all(row[key] > 0 for key in (*KEYS, "cpu_seconds_per_gb")) and row["mixing_penalty"] >= 0
    assert found["fio"] is None
    # The printed section is a configuration.
    section = found["toml"].partition("\n")[2]
    overrides = [f"swap.{line.replace(' ', '')}" for line in section.splitlines()]
    assert load_config(None, overrides).swap.block == found["best"]["block"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(fio.available() is None, reason="fio is not installed")
def test_bench_io_beside_fio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = subprocess.run
    commands: list[list[str]] = []

    def run(command: list[str], **options: Any) -> Any:
        commands.append(command)
        return real([part.replace("--runtime=1", "--runtime=0.1") for part in command], **options)

    monkeypatch.setattr(subprocess, "run", run)
    found = bench(str(tmp_path), "--bytes", "16MiB", "--quick", "--engine", "threads", "--rounds", "2")
    assert all(found["fio"][key] > 0 for key in (*KEYS, "cpu_seconds_per_gb"))
    assert found["ratio_to_fio"]["read"] == pytest.approx(found["read_bytes_per_s"] / found["fio"]["read_bytes_per_s"])
    assert list(found["engines"]) == ["threads"]
    assert any("--rw=rw" in command for command in commands) and list(tmp_path.iterdir()) == []


def test_bench_io_over_two_paths_as_a_table(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    paths = [str(tmp_path / name) for name in ("a", "b")]
    arguments = ["--bytes", "16MiB", "--no-fio", "--quick", "--engine", "threads"]
    done = CliRunner().invoke(main, ["bench", "io", *paths, *arguments], catch_exceptions=False)
    assert done.exit_code == 0
    assert "[swap]" in done.output and "delta" in done.output and "fio did not run" in done.output


@pytest.mark.parametrize(("version", "needed"), [(None, "900 TiB"), ("fio-3", "1.76 PiB")])
def test_bench_io_counts_the_space_that_fio_takes_too(
    version: str | None, needed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fio, "available", lambda: version)
    done = CliRunner().invoke(main, ["bench", "io", str(tmp_path), "--bytes", "900TiB"])
    assert done.exit_code == 2 and f"needs {needed} but" in done.output, done.output



@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["/nowhere", "--no-fio"], ["/nowhere", "memory.nvme_paths"]),
        (["{path}", "--bytes", "900TiB", "--no-fio"], ["needs 900 TiB", "--bytes"]),
        (["{path}", "--bytes", "many"], ["many"]),
        (["{path}", "--request", "1000B", "--no-fio"], ["whole pages"]),
    ],
)
def test_bench_io_refuses_with_one_line(arguments: list[str], words: list[str], tmp_path: Path) -> None:
    arguments = [argument.replace("{path}", str(tmp_path)) for argument in arguments]
    done = CliRunner().invoke(main, ["bench", "io", *arguments], catch_exceptions=False)
    assert done.exit_code == 2 and all(word in done.output for word in words), done.output
    assert "Traceback" not in done.output


def test_doctor_lines_and_statuses(tmp_path: Path) -> None:
    checks = examine([str(tmp_path), str(tmp_path / "missing")])
    assert worst(checks) == "failure" == report(checks)["status"]
    assert all(check.remedy for check in checks if check.status != "ok")
    lines = text(checks).splitlines()
    assert any(line.startswith("failure") and "missing" in line for line in lines)
    assert worst([Check(name="a", status="ok", detail="")]) == "ok"
    runner = CliRunner()
    assert runner.invoke(main, ["doctor", str(tmp_path / "missing")]).exit_code == 1
    done = runner.invoke(main, ["doctor", "--json", str(tmp_path)])
    assert done.exit_code == 0 and {"kernel", "io_uring", f"space {tmp_path}"} <= {
        check["name"] for check in json.loads(done.output)["checks"]
    }


def test_cpu_quotas_of_both_cgroup_versions(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/a/b\n")
    inner = tmp_path / "sys/fs/cgroup/a/b"
    inner.mkdir(parents=True)
    (inner / "cpu.max").write_text("max 100000\n")
    assert machine.cpu_quota(tmp_path) is None
    (inner.parent / "cpu.max").write_text("150000 100000\n")
    assert machine.cpu_quota(tmp_path) == 1.5
    (tmp_path / "proc/self/cgroup").write_text("4:cpu,cpuacct:/job\n")
    job = tmp_path / "sys/fs/cgroup/cpu/job"
    job.mkdir(parents=True)
    (job / "cpu.cfs_quota_us").write_text("-1\n")
    (job / "cpu.cfs_period_us").write_text("100000\n")
    assert machine.cpu_quota(tmp_path) is None
    (job / "cpu.cfs_quota_us").write_text("50000\n")
    assert machine.cpu_quota(tmp_path) == 0.5


def test_deepspeed_aio_keys_are_translated() -> None:
    aio = {"block_size": 262144, "queue_depth": 32, "intra_op_parallelism": 2, "single_submit": False}
    with pytest.raises(ConfigError) as caught:
        load_config({"aio": aio}, [])
    (line,) = caught.value.problems
    for words in ("DeepSpeed", "swap.block = 262144", "swap.queue_depth = 64", "single_submit", "bench io"):
        assert words in line
    with pytest.raises(ConfigError, match=r"swap\.queue_depth = 8"):
        load_config({"aio": {}}, [])


def test_a_run_records_what_it_writes_to_each_path(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    arguments = [
        "train",
        "--run-dir",
        str(tmp_path / "run"),
        "model.vocab_size=256",
        "model.hidden_size=32",
        "model.intermediate_size=64",
        "model.layers=2",
        "model.heads=2",
        "model.kv_heads=1",
        "train.steps=2",
        "data.context=16",
        "train.eval_batches=0",
        f"memory.nvme_paths={[str(path) for path in paths]}",
        "placement.optimizer=nvme",
        "swap.endurance_tbw=0.001",
        "swap.checksum=true",
    ]
    done = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert set(summary["wear"]) == {str(path) for path in paths}
    assert sum(entry["written_bytes"] for entry in summary["wear"].values()) == summary["nvme_write_bytes"] > 0
    for entry in summary["wear"].values():
        assert entry["percent_of_life"] == pytest.approx(entry["written_bytes"] / 1e9 * 100)
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    for record in records:
        assert sum(record["nvme_write_bytes_by_path"].values()) == record["nvme_write_bytes"]
