"""Memory of saving, loading and exporting states that are much larger than it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).resolve().parent / "large_program.py"
ROOT = PROGRAM.parents[2]


def run(directory: Path, blocks: int, width: int, tier: str, rounds: int) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(directory), str(blocks), str(width), tier, str(rounds)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_a_state_in_swap_files_is_never_in_memory(tmp_path: Path) -> None:
    found = run(tmp_path / "work", 16, 2048, "nvme", 0)
    assert found["state_bytes"] > 900 * 10**6
    assert found["peak_resident_bytes"] - found["resident_before"] < found["state_bytes"] / 2


@pytest.mark.acceptance
def test_eight_gigabytes_of_state_in_one(tmp_path: Path) -> None:
    found = run(tmp_path / "work", 36, 4096, "nvme", 1)
    assert found["state_bytes"] > 8 * 10**9
    assert found["peak_resident_bytes"] < 1 << 30
    print(json.dumps(found))
