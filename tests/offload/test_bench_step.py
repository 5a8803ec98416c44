"""`offload bench step`: what it runs and what it makes of it, not how fast anything is."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from offload.bench import step
from offload.cli import main
from offload.planner.floors import Rates
from offload.state import staging_bytes_per_chunk
from optimizer_cpu.formats import get_format

KEYS = {
    "name",
    "step_seconds",
    "peak_rss_bytes",
    "disk_read_bytes",
    "disk_write_bytes",
    "floor_seconds",
    "achieved_over_floor",
}
RATES = Rates(stream=10e9, disk_read=2e9, disk_write=1e9, mixing=0.5)


class _Instant(step.Machine):
    """A machine whose bandwidths are known."""

    def measure(self) -> None:
        return None

    def rates(self) -> Rates:
        return RATES


def test_two_real_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "Machine", _Instant)
    monkeypatch.chdir(tmp_path)  # the default of --swap
    arguments = ["--json", "--model", "20m", "--tokens", "8", "--rounds", "1", "--steps", "2", "--micro-batches", "1"]
    done = CliRunner().invoke(main, ["bench", "step", *arguments, "--only", "a"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    plain, ours = report["results"]
    assert plain["name"] == "plain 1x" and ours["name"] == "offload (a) 1x" and report["notes"] == []
    for row in (plain, ours):
        assert row.keys() >= KEYS and all(row[key] > 0 for key in ("step_seconds", "peak_rss_bytes", "floor_seconds"))
        assert row["achieved_over_floor"] == pytest.approx(row["floor_seconds"] / row["step_seconds"])
    states = 3.125 * 19_536_384
    # exact however slow the disk is: an update's bytes count even if they move when its step has ended
    for key in ("disk_read_bytes", "disk_write_bytes"):
        assert ours[key] == pytest.approx(states, rel=0.02)
    assert ours["schedule"] in ("deferred", "barrier")
    assert plain["times_plain"] == 1 and plain["disk_write_bytes"] < states / 10
    assert list(tmp_path.iterdir()) == []


def _recorded(contender: step.Contender, spec: Mapping[str, Any]) -> dict[str, Any]:
    if contender.system == "deepspeed-nvme":
        raise RuntimeError("ModuleNotFoundError: No module named 'deepspeed'")
    row: dict[str, float] = {"seconds": 2.0, "disk_read_bytes": 0, "disk_write_bytes": 0}
    if contender.system == "plain":
        row |= {"forward_seconds": 0.4, "backward_seconds": 0.8}
    warm = {**row, "seconds": 9.0}
    return {"steps": [warm, warm, row, row], "peak_rss_bytes": 1 << 30}


def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> dict[str, Any]:
    monkeypatch.setattr(step, "Machine", _Instant)
    monkeypatch.setattr(step, "in_process", _recorded)
    return step.measure(swap=str(tmp_path), rounds=2, steps=4, **options)


def test_all_rows_and_a_peer_that_is_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = measured(tmp_path, monkeypatch, peers=True)
    names = [row["name"] for row in report["results"]]
    assert names[:5] == ["plain 1x", "offload (a) 1x", "offload (b) 1x", "offload (c) 1x", "fsdp2-cpu 1x"]
    assert any("offload (b) 4x recompute" in text for text in (*names, *report["notes"]))
    assert not any("deepspeed-nvme" in name for name in names)
    assert len([note for note in report["notes"] if "No module named 'deepspeed'" in note]) == 2
    assert all(row["step_seconds"] == 2.0 for row in report["results"])
    text = step.table(report)
    assert "offload bench step --model 438m --tokens 256" in text and "offload (c) 4x" in text and "floor/step" in text


def test_floors_follow_from_rates_and_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {r["name"]: r for r in measured(tmp_path, monkeypatch, micro_batches=(1,))["results"]}
    parameters = 438_081_024
    assert rows["plain 1x"]["floor_seconds"] == pytest.approx(1.2 + 40 * parameters / 10e9)
    # compact states: 3.125 bytes read and written beside forward, which takes less, but for what is read in backward:
    # as many chunks of the first units as 192 MiB of staging have slots, less two
    slot = staging_bytes_per_chunk(get_format("compact"), [torch.bfloat16], torch.float32, 1 << 20)
    read = 3.125 * parameters - ((192 << 20) // slot - 2) * slot
    written = 3.125 * parameters
    disk = max(read / 2e9, written / 1e9) + 0.5 * min(read / 2e9, written / 1e9)
    assert rows["offload (a) 1x"]["schedule"] == "deferred"
    assert rows["offload (a) 1x"]["floor_seconds"] == pytest.approx(0.8 + disk, rel=0.003)
    assert rows["offload (a) 1x"]["binding"] == "disk"


def test_a_process_that_fails_says_why(tmp_path: Path) -> None:
    row = step.Contender(name="x", system="nothing", micro_batches=1)
    spec = {"system": "nothing", "model": "20m", "steps": 1, "tokens": 4, "micro_batches": 1, "swap": str(tmp_path)}
    with pytest.raises(RuntimeError, match="KeyError: 'nothing'"):
        step.in_process(row, spec)
    row.python = "/no/such/python"
    with pytest.raises(RuntimeError, match="No such file"):
        step.in_process(row, spec)


@pytest.mark.parametrize(
    ("options", "said"),
    [({"model": "9b"}, "--model 9b"), ({"tokens": 1}, "--tokens"), ({"tokens": 10**6}, "has positions for")],
)
def test_bad_options(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        step.measure(swap=str(tmp_path), **options)


def test_peers_run_under_their_own_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = step.contenders(
        str(tmp_path), [1], peers=True, peers_python="/other/python", recompute=True, only=["b"], schedule="barrier"
    )
    assert {row.name: row.python for row in rows if row.system in step.PEERS} == dict.fromkeys(
        [f"{peer} 1x" for peer in step.PEERS], "/other/python"
    )
    ours = [row for row in rows if row.config is not None]
    assert [row.name for row in ours] == ["offload (b) 1x"] and ours[0].python == sys.executable
    assert ours[0].config is not None and ours[0].config["schedule"] == {"optimizer_step": "barrier"}
