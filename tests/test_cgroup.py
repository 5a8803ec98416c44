"""Out of core, enforced by the kernel: training inside a memory control group smaller than the training state."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RUNNER = ROOT / "examples" / "run_in_cgroup.py"
LIMIT = 768 << 20
NO_GROUP = 125


def in_group(*command: str, limit: int = LIMIT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(RUNNER), "--memory", f"{limit}B", "--", *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def groups() -> None:
    """Skips where this process may not make a memory control group."""
    if in_group("true").returncode == NO_GROUP:
        pytest.skip("no memory control group can be made here")


@pytest.mark.cgroup
def test_the_limit_is_enforced(groups: None) -> None:
    done = in_group(sys.executable, "-c", "bytearray(200 << 20)", limit=64 << 20)
    assert done.returncode == 137, done.stderr
    assert "killed by the kernel 1 times" in done.stderr


@pytest.mark.cgroup
@pytest.mark.timeout(600)
def test_a_model_trains_in_less_memory_than_its_state(groups: None, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = in_group(
        sys.executable,
        "-m",
        "offload",
        "train",
        str(ROOT / "examples" / "one_billion.toml"),
        "--run-dir",
        str(run),
        "model.layers=4",
        "model.hidden_size=1024",
        "model.intermediate_size=4096",
        "model.heads=16",
        "model.vocab_size=8192",
        "data.context=32",
        "train.steps=2",
        "train.eval_batches=1",
        "memory.host=192MiB",
        "memory.device=192MiB",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "killed by the kernel 0 times" in done.stderr
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 2 and summary["skipped_steps"] == 0
    parameters = 2 * 8192 * 1024 + 4 * (2 * 1024**2 + 2 * 1024 * 256 + 3 * 1024 * 4096)
    # bf16 weight, fp32 master and two fp32 moments.
    assert parameters * 14 > LIMIT
    assert summary["nvme_write_bytes"] > 2 * parameters * 12
    assert summary["peak_rss_bytes"] < LIMIT
    assert summary["eval_loss"] is not None
