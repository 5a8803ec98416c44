"""Checkpoints that were cut off, changed, or made to do harm: named, and nothing happens."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import offload
from offload.checkpoint import (
    CheckpointSaveError,
    DamagedCheckpointError,
    IncompleteCheckpointError,
    Source,
    complete_checkpoints,
    tensorfile,
)
from offload.checkpoint.directory import locked
from offload.cli import main
from tests.engine.common import Case, assert_states_equal, decoder, running, states_of, token_batches

CASE = Case(parameters="nvme", optimizer="host", staging=4 << 20, chunk=64 << 10)


def train(engine: offload.Engine, steps: int = 1) -> None:
    for ids in token_batches(steps):
        engine.backward(engine(ids, labels=ids).loss)
        engine.step()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    with running(decoder(), CASE, tmp_path) as engine:
        train(engine)
        engine.save_checkpoint(tmp_path / "ck")
        train(engine)
        return engine.save_checkpoint(tmp_path / "ck").path


def data_file(path: Path) -> Path:
    (file,) = path.glob("*.safetensors")
    return file


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def test_a_flipped_byte_is_found_wherever_it_is(tmp_path: Path, saved: Path) -> None:
    file = data_file(saved)
    size = file.stat().st_size
    first = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    for at in (first, size // 2):
        flip(file, at)
        with Source(saved) as source, pytest.raises(DamagedCheckpointError, match="checksum mismatch in "):
            source.verify()
        result = CliRunner().invoke(main, ["verify", str(saved)])
        assert result.exit_code == 2 and "checksum mismatch" in result.stderr and file.name in result.stderr
        flip(file, at)
    Source(saved).verify()
    flip(file, size // 2)
    with running(decoder(seed=1), CASE, tmp_path) as engine:
        with pytest.raises(DamagedCheckpointError, match="older checkpoint"):
            engine.load_checkpoint(tmp_path / "ck")
        # Part of the state is new: the engine says so instead of training on.
        with pytest.raises(offload.OffloadError, match="cut short"):
            engine.step()
    with running(decoder(seed=1), CASE, tmp_path) as engine:  # the older one, when it is asked for
        assert engine.load_checkpoint(tmp_path / "ck" / "step-00000001").step == 1


def truncate(path: Path) -> None:
    os.truncate(data_file(path), data_file(path).stat().st_size - 4096)


def remove_data(path: Path) -> None:
    data_file(path).unlink()


def remove_index(path: Path) -> None:
    next(path.glob("*.index.json")).unlink()


def change_index(path: Path) -> None:
    index = next(path.glob("*.index.json"))
    index.write_bytes(index.read_bytes().replace(b'"rank":0', b'"rank":7'))


def link_data(path: Path) -> None:
    file = data_file(path)
    other = path.parent / "elsewhere"
    file.rename(other)
    file.symlink_to(other)


def pipe_data(path: Path) -> None:
    file = data_file(path)
    file.unlink()
    os.mkfifo(file)


def link_manifest(path: Path) -> None:
    (path / "manifest.json").rename(path.parent / "m.json")
    (path / "manifest.json").symlink_to(path.parent / "m.json")


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (truncate, "cut off"),
    "no data": (remove_data, "missing, though"),
    "no index": (remove_index, "missing, though"),
    "changed index": (change_index, "SHA-256"),
    "linked data": (link_data, "cannot be opened"),
    "a pipe": (pipe_data, "not a regular file"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named_before_anything_changes(tmp_path: Path, saved: Path, name: str) -> None:
    damage, said = DAMAGE[name]
    damage(saved)
    with running(decoder(seed=1), CASE, tmp_path) as engine:
        before = states_of(engine)
        with pytest.raises(DamagedCheckpointError, match=said) as caught:
            engine.load_checkpoint(tmp_path / "ck")
        assert "step-00000002" in str(caught.value)
        assert_states_equal(states_of(engine), before)
        train(engine)


def test_a_linked_manifest_is_none(tmp_path: Path, saved: Path) -> None:
    link_manifest(saved)
    with pytest.raises(offload.CheckpointError):
        Source(saved)
    with running(decoder(seed=1), CASE, tmp_path) as engine:
        assert engine.load_checkpoint(tmp_path / "ck").step == 1


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    change(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))


def rewrite_index(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes the index, and its checksum in the manifest with it, as an attacker would."""
    index = next(path.glob("*.index.json"))
    values = json.loads(index.read_text())
    change(values)
    index.write_text(json.dumps(values))
    digest = hashlib.sha256(index.read_bytes()).hexdigest()
    rewrite(path, lambda m: m["files"][0].update(index_sha256=digest))


FIRST = "embed_tokens.weight"
HOSTILE: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "path": (lambda m: m["files"][0].update(name="../../etc/passwd"), "not the name of a file"),
    "absolute": (lambda m: m["files"][0].update(name="/etc/passwd"), "not the name of a file"),
    "index path": (lambda m: m["files"][0].update(index="../x.json"), "not the name of a file"),
    "bytes": (lambda m: m["files"][0].update(bytes=1 << 60), "manifest says"),
    "negative": (lambda m: m["files"][0].update(bytes=-1), "not an integer"),
    "shape": (lambda m: m["parameters"][FIRST].update(shape=[1 << 40, 1 << 40]), "elements"),
    "float shape": (lambda m: m["parameters"][FIRST].update(shape=[1.5]), "not an integer"),
    "dtype": (lambda m: m["parameters"][FIRST].update(dtype="F31"), "unknown dtype"),
    "wrong dtype": (lambda m: m["parameters"][FIRST].update(encoding="split"), "cannot hold|do not fit|no such plane"),
    "encoding": (lambda m: m["parameters"][FIRST].update(encoding="os.system"), "unknown encoding"),
    "world": (lambda m: m.update(world=10**9), "files of a world"),
    "version": (lambda m: m.update(version=99), "newer offload"),
    "format": (lambda m: m.update(format="zip"), "not 'offload-checkpoint'"),
    "parameters": (lambda m: m.update(parameters=[]), "parameters is missing or not"),
    "missing": (lambda m: m["parameters"].pop(FIRST), "no such plane or parameter"),
    "more": (lambda m: m["parameters"].update(ghost=m["parameters"][FIRST]), "ghost"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_manifests(saved: Path, name: str) -> None:
    change, said = HOSTILE[name]
    rewrite(saved, change)
    with pytest.raises(DamagedCheckpointError, match=said):
        Source(saved)


def overlap(index: dict[str, Any]) -> None:
    index["pieces"].append(index["pieces"][0])


def gap(index: dict[str, Any]) -> None:
    index["pieces"].pop(0)


def beyond(index: dict[str, Any]) -> None:
    index["pieces"][0][3] = 1 << 61


def shifted(index: dict[str, Any]) -> None:
    index["pieces"][0][3] += 32


def unknown(index: dict[str, Any]) -> None:
    index["pieces"][0][0] = "no such tensor"


@pytest.mark.parametrize("change", [overlap, gap, beyond, shifted, unknown])
def test_hostile_indices(saved: Path, change: Callable[[dict[str, Any]], None]) -> None:
    rewrite_index(saved, change)
    with pytest.raises(DamagedCheckpointError):
        Source(saved)


@pytest.mark.parametrize("text", [b"[" * 200_000, b'{"a":' * 100_000, b"{", b"\xff\xfe", b"[]", b'{"format":NaN}'])
def test_manifests_that_are_no_json_objects(saved: Path, text: bytes) -> None:
    (saved / "manifest.json").write_bytes(text)
    with pytest.raises(DamagedCheckpointError, match=r"manifest\.json"):
        Source(saved)


def test_a_huge_manifest_is_not_read(saved: Path) -> None:
    with open(saved / "manifest.json", "r+b") as file:
        file.truncate(1 << 40)  # sparse
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DamagedCheckpointError, match="more than the 64 MiB allowed"):
        Source(saved)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


def nested(levels: int, kind: str) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"list": [value], "dict": {"a": value}, "tuple": {"$tuple": [value]}}[kind]
    return value


STATES: dict[str, Callable[[dict[str, Any]], Any]] = {
    **{
        f"{key} nested {levels} {kind}": lambda m, key=key, levels=levels, kind=kind: m.update(  # type: ignore[misc]
            {key: nested(levels, kind)}
        )
        for key in ("data", "extra", "scheduler")
        for levels, kind in ((102, "list"), (400, "tuple"), (900, "dict"))
    },
    "options nested": lambda m: m["groups"][0].update(options=nested(900, "list")),
    "config nested": lambda m: m.update(config={"x": nested(900, "list")}),
    "lr": lambda m: m["groups"][0]["options"].update(lr="fast"),
    "no lr": lambda m: m["groups"][0]["options"].pop("lr"),
    "negative lr": lambda m: m["groups"][0]["options"].update(lr=-1.0),
    "lr that is none": lambda m: m["groups"][0]["options"].update(lr={"$float": "nan"}),
    "one beta": lambda m: m["groups"][0]["options"].update(betas=[0.9]),
    "eps": lambda m: m["groups"][0]["options"].update(eps=None),
}


@pytest.mark.parametrize("name", STATES)
def test_hostile_states(tmp_path: Path, saved: Path, name: str) -> None:
    rewrite(saved, STATES[name])
    with running(decoder(seed=1), CASE, tmp_path) as engine:
        before = states_of(engine)
        with pytest.raises(offload.CheckpointError):
            engine.load_checkpoint(saved)
        assert_states_equal(states_of(engine), before)


OWN = [[1], "x", {"buffers": [1]}, {"buffers": 5}, {"buffers": {"b": 1}}, nested(900, "list")]


@pytest.mark.parametrize("own", OWN, ids=range(len(OWN)))
def test_values_of_a_rank_that_are_none(tmp_path: Path, saved: Path, own: Any) -> None:
    rewrite_index(saved, lambda index: index.update(own=own))
    with running(decoder(seed=1), CASE, tmp_path) as engine, pytest.raises(DamagedCheckpointError):
        engine.load_checkpoint(saved)


@pytest.mark.parametrize("rng", [{"$tensor": ["F32", [9], "AAAA"]}, {"python": 3}, {"$eval": "1"}, [1, 2]])
def test_states_of_generators_that_are_none(tmp_path: Path, saved: Path, rng: Any) -> None:
    rewrite_index(saved, lambda index: index.update(rng=rng))
    with running(decoder(seed=1), CASE, tmp_path) as engine:
        state = torch.get_rng_state()
        with pytest.raises(DamagedCheckpointError):
            engine.load_checkpoint(saved)
        assert torch.equal(torch.get_rng_state(), state)


def test_what_is_no_checkpoint(tmp_path: Path, saved: Path) -> None:
    (saved / "manifest.json").unlink()
    with running(decoder(), CASE, tmp_path) as engine:
        assert engine.load_checkpoint(tmp_path / "ck").step == 1  # the newest that is complete
        for path, said in ((saved, "no complete checkpoint"), (tmp_path / "none", "no such directory")):
            with pytest.raises(IncompleteCheckpointError, match=said):
                engine.load_checkpoint(path)
        engine.save_checkpoint(tmp_path / "ck")
    assert not saved.exists(), "what a killed save left is cleared by the next one"


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, wait: bool) -> None:
    calls: list[int] = []
    real = tensorfile.write_all

    def full(fd: int, data: Any, offset: int) -> None:
        calls.append(offset)
        if len(calls) >= number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(fd, data, offset)

    with running(decoder(), CASE, tmp_path) as engine:
        train(engine)
        engine.save_checkpoint(tmp_path / "ck")
        train(engine)
        threads = threading.active_count()
        monkeypatch.setattr(tensorfile, "write_all", full)
        with pytest.raises(CheckpointSaveError, match=r"No space left on device.*older checkpoints are as they were"):
            engine.save_checkpoint(tmp_path / "ck", wait=wait)
            train(engine)
            engine.wait_checkpoint()
        monkeypatch.setattr(tensorfile, "write_all", real)
        assert [step for step, _ in complete_checkpoints(tmp_path / "ck")] == [1]
        assert sorted(path.name for path in (tmp_path / "ck").iterdir()) == ["step-00000001"]
        assert threading.active_count() <= threads
        train(engine)
        saved = engine.save_checkpoint(tmp_path / "ck")
        Source(saved.path).verify()
        assert engine.memory().current["host"].get("checkpoint", 0) <= engine.memory().peak["host"]["checkpoint"]


def test_keep_newest_and_every_kth(tmp_path: Path) -> None:
    with running(decoder(), CASE, tmp_path) as engine:
        for _ in range(7):
            train(engine)
            engine.save_checkpoint(tmp_path / "ck", keep=2, keep_every=3)
        (tmp_path / "ck" / "notes").mkdir()
        assert [step for step, _ in complete_checkpoints(tmp_path / "ck")] == [3, 6, 7]
        again = engine.save_checkpoint(tmp_path / "ck", keep=1)  # over a complete one of the same step
        assert [step for step, _ in complete_checkpoints(tmp_path / "ck")] == [7] and (
            tmp_path / "ck" / "notes"
        ).is_dir()
        assert sorted(p.suffix for p in again.path.iterdir()) == [".json", ".json", ".safetensors"]
        Source(again.path).verify()
        for wrong in (0, -1):
            with pytest.raises(ValueError, match="keep = "):
                engine.save_checkpoint(tmp_path / "ck", keep=wrong)


def test_two_writers_do_not_meet(tmp_path: Path) -> None:
    (tmp_path / "ck").mkdir()
    with running(decoder(), CASE, tmp_path) as engine:
        with locked(tmp_path / "ck"), pytest.raises(CheckpointSaveError, match="another process writes"):
            engine.save_checkpoint(tmp_path / "ck")
        engine.save_checkpoint(tmp_path / "ck")


def test_things_that_lie_among_checkpoints(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They are passed over, stay, and keep nobody from saving."""
    root = tmp_path / "ck"
    (root / "step-00000009" / "manifest.json").mkdir(parents=True)
    (root / "step-00000008").write_text("a file")
    (root / "step-00000007").symlink_to(tmp_path)
    (root / "step-00000006").mkdir()
    (root / "step-00000006" / "notes.txt").write_text("mine")
    with running(decoder(), CASE, tmp_path) as engine:
        engine.save_checkpoint(root, keep=1)
        assert engine.load_checkpoint(root).step == 0
    assert "step-00000009: an old checkpoint could not be removed" in caplog.text
    assert (root / "step-00000006" / "notes.txt").read_text() == "mine"
    assert len(list(root.iterdir())) == 5


def test_what_json_cannot_hold_is_refused(tmp_path: Path) -> None:
    with running(decoder(), CASE, tmp_path) as engine:
        with pytest.raises(offload.CheckpointError, match=r"data\.reader is a .*object"):
            engine.save_checkpoint(tmp_path / "ck", data={"reader": object()})
        itself: list[Any] = []
        itself.append(itself)
        for deep in (itself, nested(31, "list")):
            with pytest.raises(offload.CheckpointError, match="nested more than 30 levels deep, or within itself"):
                engine.save_checkpoint(tmp_path / "ck", data=deep)
        assert not list((tmp_path / "ck").glob("*"))
        engine.save_checkpoint(tmp_path / "ck", data=[nested(29, "dict"), {0: nested(9, "tuple")}])
        assert engine.load_checkpoint(tmp_path / "ck").data[0] == nested(29, "dict")
        engine.save_checkpoint(tmp_path / "ck", data={"a": (1, 2.5, None), 3: float("inf"), "t": torch.arange(3)})
        data = engine.load_checkpoint(tmp_path / "ck").data
        assert data["a"] == (1, 2.5, None) and data[3] == float("inf") and torch.equal(data["t"], torch.arange(3))


def test_commands_list_and_verify(tmp_path: Path, saved: Path) -> None:
    (tmp_path / "ck" / "step-00000009").mkdir()
    runner = CliRunner()
    result = runner.invoke(main, ["inspect", str(tmp_path / "ck")])
    assert result.exit_code == 0 and result.stdout.count("complete") == 3 and "incomplete" in result.stdout
    details = json.loads(runner.invoke(main, ["inspect", str(saved), "--json"]).stdout)
    assert details["step"] == 2 and details["parameters"][FIRST]["steps"] == 2
    result = runner.invoke(main, ["verify", str(tmp_path / "ck"), "--json"])
    assert json.loads(result.stdout)["whole"] is True
    result = runner.invoke(main, ["inspect", str(tmp_path / "nothing")])
    assert result.exit_code == 2 and result.stderr.startswith("error: ")
