"""What `[parallel]` refuses, before anybody is waited for, and commands for one process under a launcher of several."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from click.testing import CliRunner
from torch import nn

import offload
from offload.cli import main
from offload.parallel.job import without_launcher
from tests.ranks.harness import run_torchrun

# Key, value, and what the message says is allowed.
BAD: list[tuple[str, Any, str]] = [
    ("stage", 4, "must be one of 0, 1, 2, 3, 'NO_SHARD'"),
    ("stage", "FULL_SHRAD", "did you mean 'FULL_SHARD'"),
    ("stage", True, "must be a number from 0 to 3"),
    ("shard_size", 0, "whole number of at least 1, or 'auto'"),
    ("shard_size", "two", "whole number of at least 1, or 'auto'"),
    ("replicate_size", 1.5, "whole number of at least 1, or 'auto'"),
    ("verify_every", -1, "must be at least 0"),
    ("accumulate", "globally", "must be one of 'auto', 'local' or 'reduced'"),
    ("reshard_after_forward", 0, "true, false or a number of ranks (at least 1)"),
    ("reshard_after_forward", "no", "true, false or a number of ranks (at least 1)"),
    ("limit_gathers", 0, "a size such as '8GiB'"),
    ("limit_gathers", "8", "has no unit"),
    ("timeout", 0, "must be greater than 0"),
    ("timeout", "long", "must be a number"),
    # Of four ranks, which the launcher's environment says:
    ("shard_size", 3, "must be the number of ranks, which is 4"),
    ("replicate_size", 8, "must be the number of ranks, which is 4"),
    ("reshard_after_forward", 3, "divisor of the number of ranks that divide weights, which is 4 (1, 2, 4)"),
    ("reshard_after_forward", 8, "divisor of the number of ranks that divide weights, which is 4 (1, 2, 4)"),
]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """As rank 1 of 4; nobody listens at the address."""
    for name, value in {"WORLD_SIZE": 4, "RANK": 1, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 4, "MASTER_PORT": 9}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")


@pytest.mark.parametrize(("key", "value", "allowed"), BAD, ids=[f"{key}={value!r}" for key, value, _ in BAD])
def test_bad_values_are_named_before_ranks_meet(key: str, value: Any, allowed: str, launched: None) -> None:
    stage = {} if key == "stage" else {"stage": 3}
    with pytest.raises(ValueError) as caught:
        offload.initialize(nn.Linear(4, 4), {"device": "cpu", "parallel": {**stage, key: value}})
    said = str(caught.value)
    assert f"parallel.{key} = {value!r}" in said and allowed in said, said
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("key", "value"), [("reshard_after_forward", False), ("reshard_after_forward", 2), ("limit_gathers", "1MiB")]
)
def test_what_has_no_effect_in_a_stage_is_refused(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"parallel: {key} = .* has no effect with stage = 2.*use stage = 3"):
        offload.Config(parallel={"stage": 2, key: value})


def test_a_misspelt_key_is_answered_with_the_right_one() -> None:
    with pytest.raises(ValueError, match=r"reshard_after_foward: unknown key; did you mean 'parallel.resh"):
        offload.Config(parallel={"reshard_after_foward": 2})


# Commands


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a small model."""
    root = tmp_path_factory.mktemp("one") / "checkpoint"
    with offload.initialize(nn.Linear(70, 70), {"device": "cpu"}) as engine:
        engine.save_checkpoint(root)
    return root


def commands(checkpoint: Path, folder: Path) -> list[list[str]]:
    return [
        ["version"],
        ["doctor", str(folder)],
        ["inspect", str(checkpoint)],
        ["verify", str(checkpoint)],
        ["convert", str(checkpoint), str(folder / "converted")],
        ["clean", str(folder)],
    ]


@pytest.mark.parametrize("which", range(6), ids=["version", "doctor", "inspect", "verify", "convert", "clean"])
def test_commands_for_one_process_run_on_rank_0(
    which: int, checkpoint: Path, tmp_path: Path, launched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = commands(checkpoint, tmp_path)[which]
    other = CliRunner().invoke(main, arguments)
    assert (other.exit_code, other.output) == (0, ""), other
    assert not (tmp_path / "converted").exists()
    monkeypatch.setenv("RANK", "0")
    first = CliRunner().invoke(main, arguments)
    assert first.exit_code in (0, 1 if arguments[0] == "doctor" else 0), first.output
    assert first.stdout and f"offload {arguments[0]} is for one process: rank 0 of 4" in first.stderr
    assert not dist.is_initialized()


def test_a_process_on_its_own_has_nothing_of_the_launcher() -> None:
    launcher = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "TORCHELASTIC_RUN_ID": "y", "LOCAL_RANK": "1"}
    assert without_launcher({**launcher, "PATH": "/bin", "OMP_NUM_THREADS": "1"}) == {
        "PATH": "/bin",
        "OMP_NUM_THREADS": "1",
    }


@pytest.mark.acceptance
def test_plan_under_torchrun(tmp_path: Path) -> None:
    settings = ["model.hidden_size=32", "model.layers=2", "model.heads=2", "data.context=32"]
    ended = run_torchrun(["-m", "offload", "plan", *settings, "parallel.stage=3", "--json"], nproc=2, timeout=180)
    assert ended.returncode == 0 and not ended.left, ended.stderr
    assert json.loads(ended.stdout)["planned"]
    assert re.search("offload plan is for one process: rank 0 of 2", ended.stderr)
