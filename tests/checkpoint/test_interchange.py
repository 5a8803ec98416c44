"""To and from other systems' checkpoints, made and read by the real libraries."""

from __future__ import annotations

import importlib.util
import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from safetensors.torch import load_file

import offload
from offload.checkpoint import DamagedCheckpointError
from offload.checkpoint.dcp import DistributedCheckpoint
from offload.checkpoint.deepspeed import DeepSpeedCheckpoint
from offload.cli import main
from tests.checkpoint.deepspeed_fixture import Net as DeepSpeedNet
from tests.checkpoint.fsdp_program import Net, batch
from tests.engine.common import Case, decoder, running, states_of, token_batches

HERE = Path(__file__).resolve().parent
SMALL: dict[str, Any] = {"staging": 4 << 20, "chunk": 64 << 10}


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def fsdp(action: str, directory: Path, file: Path) -> dict[str, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, str(HERE / "fsdp_program.py"), action, str(directory), str(file)],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict[str, Any]] = torch.load(file)
    return found


def convert(*arguments: str | Path, status: int = 0) -> str:
    result = CliRunner().invoke(main, ["convert", *map(str, arguments)])
    assert result.exit_code == status, (result.stdout, result.stderr, result.exception)
    return result.stdout + result.stderr


def assert_holds(engine: offload.Engine, expected: dict[str, dict[str, Any]]) -> None:
    found = states_of(engine)
    assert set(expected) <= set(found)
    for name, entry in expected.items():
        for kind, value in entry.items():
            same = (
                torch.equal(found[name][kind], value) if isinstance(value, torch.Tensor) else found[name][kind] == value
            )
            assert same, (name, kind)


@pytest.mark.acceptance
@pytest.mark.timeout(600)
def test_fsdp2_to_here_and_back(tmp_path: Path) -> None:
    expected = fsdp("save", tmp_path / "dcp", tmp_path / "held.pt")
    convert(tmp_path / "dcp", tmp_path / "ck", "--to", "checkpoint")
    case = Case(parameters="nvme", optimizer="nvme", **SMALL)
    with running(Net(), case, tmp_path) as engine:
        report = engine.load_checkpoint(tmp_path / "ck")
        assert report.step == 3
        assert_holds(engine, expected)
        for step in range(3, 5):
            engine.backward(engine(batch(step)))
            engine.step()
        engine.save_checkpoint(tmp_path / "ck2")
        after = states_of(engine)
    convert(tmp_path / "ck2", tmp_path / "dcp2", "--to", "dcp")
    there = fsdp("load", tmp_path / "dcp2", tmp_path / "held2.pt")
    for name, entry in there.items():
        assert entry["step"] == 5
        for kind in ("parameter", "exp_avg", "exp_avg_sq"):
            assert torch.equal(entry[kind], after[name][kind]), (name, kind)


def test_torch_reads_what_is_written_here_and_the_other_way(tmp_path: Path) -> None:
    """One process, no process group: what `dcp.save` and `dcp.load` do by themselves."""
    case = Case(parameters="host", optimizer="nvme", **SMALL)
    with running(Net(), case, tmp_path) as engine:
        engine.backward(engine(batch(0)))
        engine.step()
        engine.save_checkpoint(tmp_path / "ck")
        states = states_of(engine)
    convert(tmp_path / "ck", tmp_path / "dcp", "--to", "dcp")
    twin = Net()
    tree: dict[str, Any] = {
        "model": {name: torch.zeros_like(p) for name, p in twin.state_dict().items()},
        "optim": {
            "state": {
                name: {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                for name, p in twin.state_dict().items()
            }
        },
    }
    dcp.load(tree, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for name, entry in states.items():
        assert torch.equal(tree["model"][name], entry["parameter"]), name
        found = tree["optim"]["state"][name]
        assert torch.equal(found["exp_avg_sq"], entry["exp_avg_sq"]) and found["step"] == entry["step"]
    for value in tree["model"].values():
        value.add_(1.0)
    dcp.save(tree, checkpoint_id=tmp_path / "dcp2", no_dist=True)
    convert(tmp_path / "dcp2", tmp_path / "ck2", "--to", "checkpoint")
    with running(Net(), case, tmp_path) as engine:
        engine.load_checkpoint(tmp_path / "ck2")
        for name, entry in states_of(engine).items():
            assert torch.equal(entry["parameter"], states[name]["parameter"] + 1.0), name
            assert torch.equal(entry["exp_avg"], states[name]["exp_avg"]) and entry["step"] == 1


@pytest.mark.parametrize("state_format", ["split", "compact"])
def test_dcp_round_trip_keeps_every_bit(tmp_path: Path, state_format: str) -> None:
    case = Case(dtype="bf16", **SMALL)
    options: dict[str, Any] = {"optimizer": {"state_format": state_format}}
    with running(decoder(wide=True), case, tmp_path, **options) as engine:
        for ids in token_batches(2):
            engine.backward(engine(ids, labels=ids).loss)
            engine.step()
        engine.save_checkpoint(tmp_path / "ck")
        expected = states_of(engine)
    convert(tmp_path / "ck", tmp_path / "dcp", "--to", "dcp")
    convert(tmp_path / "dcp", tmp_path / "again", "--to", "checkpoint")
    with running(decoder(wide=True, seed=1), case, tmp_path, **options) as engine:
        engine.load_checkpoint(tmp_path / "again")
        assert_holds(engine, expected)
    assert "already" in convert(tmp_path / "ck", tmp_path / "dcp", "--to", "dcp", status=2)


class Harm:
    """What a pickle does when it is loaded."""

    def __reduce__(self) -> Any:
        return os.system, (f"touch {os.environ['HARM']}",)


def test_pickles_that_would_run_code_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARM", str(tmp_path / "harmed"))
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Harm()))
    with pytest.raises(DamagedCheckpointError, match="does not belong"):
        DistributedCheckpoint(tmp_path / "dcp")
    (tmp_path / "ds").mkdir()
    for name in ("zero_pp_rank_0_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"):
        torch.save({"optimizer_state_dict": Harm()}, tmp_path / "ds" / name)
    with pytest.raises(DamagedCheckpointError, match="cannot be read"):
        DeepSpeedCheckpoint(tmp_path / "ds")
    assert not (tmp_path / "harmed").exists()


def deepspeed_python() -> str | None:
    """An interpreter with DeepSpeed: this one, or the one that the environment names."""
    if named := os.environ.get("OFFLOAD_DEEPSPEED_PYTHON"):
        return named
    return sys.executable if importlib.util.find_spec("deepspeed") else None


@pytest.mark.skipif(deepspeed_python() is None, reason="DeepSpeed is not installed; see OFFLOAD_DEEPSPEED_PYTHON")
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.acceptance
def test_deepspeed_checkpoints_resume_here(tmp_path: Path, stage: int) -> None:
    python = deepspeed_python()
    assert python is not None
    done = subprocess.run(
        [python, str(HERE / "deepspeed_fixture.py"), str(tmp_path / "ds"), str(stage), "2", "bf16"],
        env={**os.environ, "MASTER_PORT": free_port()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    expected = torch.load(tmp_path / "ds" / "expected.pt")
    convert(tmp_path / "ds", tmp_path / "ck", "--to", "checkpoint")
    for state_format in ("fp32", "split"):
        case = Case(parameters="host", optimizer="nvme", dtype="bf16", **SMALL)
        with running(DeepSpeedNet(), case, tmp_path, optimizer={"state_format": state_format}) as engine:
            engine.load_checkpoint(tmp_path / "ck")
            for name, entry in expected.items():
                assert torch.equal(engine.get_full(name), entry["master"]), name
                for kind in ("exp_avg", "exp_avg_sq"):
                    assert torch.equal(engine.get_full(name, kind), entry[kind]), (name, kind)
                assert dict(engine.named_full_states())[name]["step"] == 3
            engine.backward(engine(torch.randn(2, 7).bfloat16()))
            assert engine.step().stepped


def test_convert_to_safetensors(tmp_path: Path) -> None:
    case = Case(dtype="bf16", **SMALL)
    with running(decoder(), case, tmp_path) as engine:
        for ids in token_batches(2):
            engine.backward(engine(ids, labels=ids).loss)
            engine.step()
        engine.save_checkpoint(tmp_path / "ck")
        states = states_of(engine)
    (tmp_path / "carry").mkdir()
    (tmp_path / "carry" / "tokenizer.json").write_text("{}")
    convert(tmp_path / "ck", tmp_path / "own", "--carry", tmp_path / "carry")
    convert(tmp_path / "ck", tmp_path / "fp32", "--dtype", "fp32", "--max-shard-size", "4KB")
    convert(tmp_path / "fp32", tmp_path / "joined")
    own, joined = (load_file(tmp_path / name / "model.safetensors") for name in ("own", "joined"))
    assert set(own) == set(joined) == set(states) and (tmp_path / "own" / "tokenizer.json").exists()
    assert len(list((tmp_path / "fp32").glob("*.safetensors"))) > 1
    for name, entry in states.items():
        assert torch.equal(own[name], entry["weight"]) and torch.equal(joined[name], entry["parameter"]), name
    for arguments, said in (
        (("none", "x"), "none: no such file"),
        ((tmp_path / "carry", "x"), "no .safetensors file"),
        ((tmp_path / "ck", "x", "--to", "dcp", "--dtype", "bf16"), "keeps every bit"),
        ((tmp_path / "own", tmp_path / "fp32"), "already"),
    ):
        assert said in convert(*arguments, status=2)
