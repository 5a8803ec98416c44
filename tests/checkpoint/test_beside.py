"""Saves beside training: a snapshot of one moment, whatever happens to the state meanwhile."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload.checkpoint import CheckpointSaveError, Source, complete_checkpoints, save
from offload.checkpoint.tensorfile import PagedFile
from tests.engine.common import Case, assert_states_equal, decoder, running, states_of, token_batches

CASE = Case(parameters="host", optimizer="nvme", gradients="host", staging=4 << 20, chunk=64 << 10)


@pytest.fixture(autouse=True)
def slow_and_small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Many regions, and a disk that takes its time."""
    real = PagedFile.write

    def write(self: PagedFile, data: memoryview, offset: int) -> None:
        time.sleep(0.03)
        real(self, data, offset)

    monkeypatch.setattr(save, "CHUNK", 8192)
    monkeypatch.setattr(save, "SMALLEST_CHUNK", 4096)
    monkeypatch.setattr(PagedFile, "write", write)
    yield


def train(engine: offload.Engine, steps: int = 1, first: int = 0) -> None:
    for ids in token_batches(steps, seed=first):
        engine.backward(engine(ids, labels=ids).loss)
        engine.step()


def step(engine: offload.Engine) -> None:
    train(engine, 2, 5)


def set_full(engine: offload.Engine) -> None:
    engine.set_full("layers.1.mlp.up_proj.weight", "parameter", torch.zeros(600, 24))


def gathered(engine: offload.Engine) -> None:
    with torch.no_grad(), engine.gathered(modify=True):
        engine.module.embed_tokens.weight.mul_(2.0)


def in_place(engine: offload.Engine) -> None:
    with torch.no_grad():
        engine.module.layers[2].mlp.up_proj.weight.add_(1.0)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("change", [step, set_full, gathered, in_place])
def test_changes_do_not_reach_the_snapshot(
    tmp_path: Path, change: Callable[[offload.Engine], None], dtype: str
) -> None:
    case = Case(**{**{f: getattr(CASE, f) for f in CASE.__slots__}, "dtype": dtype})
    with running(decoder(wide=True), case, tmp_path) as engine:
        train(engine)
        expected = states_of(engine)
        saved = engine.save_checkpoint(tmp_path / "ck", wait=False)
        assert not saved.complete and engine.saving and not complete_checkpoints(tmp_path / "ck")
        change(engine)
        after = states_of(engine)
        engine.wait_checkpoint()
        assert not engine.saving
        assert_states_equal(states_of(engine), after)
    assert threading.active_count() < 20
    Source(saved.path).verify()
    with running(decoder(wide=True, seed=1), case, tmp_path) as engine:
        engine.load_checkpoint(saved.path)
        assert_states_equal(states_of(engine), expected)


def test_closing_finishes_it_and_one_waits_for_another(tmp_path: Path) -> None:
    with running(decoder(wide=True), CASE, tmp_path) as engine:
        train(engine)
        engine.save_checkpoint(tmp_path / "ck", wait=False, share=0.9)
        train(engine, 1, 3)
        engine.save_checkpoint(tmp_path / "ck", wait=False)
        assert [step for step, _ in complete_checkpoints(tmp_path / "ck")] == [1]
    assert [step for step, _ in complete_checkpoints(tmp_path / "ck")] == [1, 2]
    for _, path in complete_checkpoints(tmp_path / "ck"):
        Source(path).verify()


def test_a_failure_is_said_and_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: PagedFile, data: memoryview, offset: int) -> None:
        raise OSError(5, "Input/output error")

    with running(decoder(wide=True), CASE, tmp_path) as engine, running(decoder(wide=True), CASE, tmp_path) as twin:
        train(engine)
        train(twin)
        monkeypatch.setattr(PagedFile, "write", broken)
        engine.save_checkpoint(tmp_path / "ck", wait=False)
        train(engine, 2, 3)
        train(twin, 2, 3)
        with pytest.raises(CheckpointSaveError, match="Input/output error"):
            engine.wait_checkpoint()
        engine.wait_checkpoint()
        assert not list((tmp_path / "ck").iterdir())
        assert_states_equal(states_of(engine), states_of(twin))


def test_without_room_it_is_saved_between_steps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with running(decoder(wide=True), CASE, tmp_path) as engine:
        train(engine)
        engine.save_checkpoint(tmp_path / "ck")
        engine._memory.trim()
        budget = engine._memory.budget
        limit = budget.limit("host")
        assert limit is not None
        # Room for one buffer of a region and the scratch, not for three.
        left = 3 * 8192 * 12 + 2 * save.scratch_bytes(8192) - 8192
        with budget.reserve("host", "others", limit - budget.used("host") - left), caplog.at_level(logging.WARNING):
            saved = engine.save_checkpoint(tmp_path / "ck", wait=False)
        assert saved.complete and "between steps" in caplog.text
        engine._memory.trim()
        rest = limit - budget.used("host") - 4096
        with budget.reserve("host", "others", rest), pytest.raises(CheckpointSaveError, match=r"memory\.host"):
            engine.save_checkpoint(tmp_path / "ck")
        train(engine)


def test_shares_are_checked(tmp_path: Path) -> None:
    with running(decoder(), CASE, tmp_path) as engine:
        for share in (0.0, -1.0, 1.5):
            with pytest.raises(ValueError, match="share = "):
                engine.save_checkpoint(tmp_path / "ck", share=share)
    options: dict[str, Any] = {"bandwidth_share": 2.0}
    with pytest.raises(ValueError, match="bandwidth_share"):
        offload.load_config({"checkpoint": options})


def test_a_region_that_a_step_fills_last_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The saver comes to its end while a step is still copying what it is about to change."""
    real_fill, slow, at_end = save.fill, threading.Event(), threading.Event()

    def fill(*arguments: Any) -> None:
        if threading.current_thread().name == "offload-optimizer":
            slow.set()
            assert at_end.wait(60)
        real_fill(*arguments)

    def after(event: threading.Event, real: Any) -> Any:
        """`real` once the event is there: the saver might fill all regions before the step comes."""

        def call(saver: save.RankSaver, *arguments: Any) -> Any:
            assert event.wait(60)
            return real(saver, *arguments)

        return call

    def before(event: threading.Event, real: Any) -> Any:
        def call(saver: save.RankSaver, *arguments: Any) -> Any:
            if threading.current_thread().name == "offload-checkpoint":
                event.set()
            return real(saver, *arguments)

        return call

    monkeypatch.setattr(save, "fill", fill)
    monkeypatch.setattr(save.RankSaver, "run", after(slow, save.RankSaver.run))
    for name in ("_wait_filled", "_end_writers"):  # the saver has come to its end, rightly or not
        monkeypatch.setattr(save.RankSaver, name, before(at_end, getattr(save.RankSaver, name)))
    with running(decoder(wide=True), CASE, tmp_path) as engine:
        train(engine)
        expected = states_of(engine)
        saved = engine.save_checkpoint(tmp_path / "ck", wait=False)
        train(engine, 1, 3)
        engine.wait_checkpoint()
        assert slow.is_set()
    with running(decoder(wide=True, seed=1), CASE, tmp_path) as engine:
        engine.load_checkpoint(saved.path)
        assert_states_equal(states_of(engine), expected)
