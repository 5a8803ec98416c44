"""What the README and `examples/` show works as it stands."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from offload.config import load_config
from tests import programs

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.name)
def test_configurations_are_valid(path: Path) -> None:
    assert load_config(path).model.preset


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_examples_stay_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 150


@pytest.mark.parametrize("state", ["host", "nvme"])
def test_the_plain_loop_learns(state: str, tmp_path: Path) -> None:
    arguments = ["--steps", "10", "--hidden", "32", "--state", state]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    done = programs.run(str(EXAMPLES / "plain_loop.py"), *arguments, env=environment)
    assert done.returncode == 0, done.stderr
    before, after = (
        float(line.rpartition(" ")[2]) for line in done.stdout.splitlines() if line.startswith("held-out loss")
    )
    assert after < before
    assert "largest weight" in done.stdout and "step 10: loss" in done.stdout
