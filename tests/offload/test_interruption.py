"""SIGINT and SIGTERM: raised where a run can be left, remembered elsewhere, and never lost."""

from __future__ import annotations

import importlib
import io
import json
import signal
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from offload.config import load_config
from offload.interruption import Interrupted, Interruption
from offload.telemetry import Progress, RunDirectory
from tests import programs


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_raises_within_raising(signum: int) -> None:
    before = signal.getsignal(signum)
    with Interruption() as interruption, pytest.raises(Interrupted) as caught, interruption.raising():
        signal.raise_signal(signum)
    assert caught.value.signum == signum and caught.value.name == signal.Signals(signum).name
    assert not isinstance(caught.value, Exception)
    assert signal.getsignal(signum) == before


class _Dying:
    """Gets a signal while it is finalized, where the interpreter drops what is raised."""

    def __init__(self, signum: int) -> None:
        self.signum = signum

    def __del__(self) -> None:
        signal.raise_signal(self.signum)


@pytest.mark.parametrize("how", ["weakref", "__del__"])
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_a_finalizer_is_raised_after_it(signum: int, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dropped: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", dropped.append)
    with Interruption() as interruption, pytest.raises(Interrupted) as caught, interruption.raising():
        if how == "weakref":
            lost = threading.Event()  # anything that can be referred to weakly
            weakref.finalize(lost, signal.raise_signal, signum)
            del lost
        else:
            _Dying(signum)
        time.sleep(20)  # ended by the signal
        pytest.fail("the signal was lost")
    assert caught.value.signum == signum and not dropped
    with Interruption() as interruption, interruption.raising():
        _Dying(signum)  # the context ends before the signal comes again
    time.sleep(0.02)
    assert interruption.signum == signum and not dropped


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_what_is_done_whole_is_not_left_half_done(signum: int) -> None:
    done = []
    with Interruption() as interruption, pytest.raises(Interrupted), interruption.raising():
        with interruption.whole():
            signal.raise_signal(signum)
            done.append("still within")
        pytest.fail("the signal takes effect at the end")
    assert done == ["still within"]
    with Interruption() as interruption, interruption.raising(), interruption.polling(everything=True):
        with interruption.whole():
            signal.raise_signal(signum)
        with pytest.raises(Interrupted):  # here signals wait for a check
            interruption.check()


def test_what_is_done_whole_may_fail() -> None:
    with Interruption() as interruption, interruption.raising():
        with pytest.raises(KeyError), interruption.whole():
            signal.raise_signal(signal.SIGINT)
            raise KeyError
        with pytest.raises(Interrupted):
            interruption.check()


def test_a_signal_outside_is_remembered() -> None:
    with Interruption() as interruption:
        interruption.check()
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Interrupted):
            interruption.check()
        with pytest.raises(Interrupted), interruption.raising():
            pytest.fail("an earlier signal must stop the block before it begins")


def test_one_request_may_come_as_several_signals() -> None:
    with Interruption() as interruption, pytest.raises(Interrupted), interruption.raising():
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            signal.raise_signal(signal.SIGTERM)
    assert interruption.signum == signal.SIGINT


def test_a_later_second_signal_ends_the_process() -> None:
    code = (
        "import signal, time\n"
        "from offload import interruption\n"
        "with interruption.Interruption(apart=0.0):\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "    print('still here')\n"
    )
    done = programs.run("-c", code)
    assert done.returncode == 130, done.stderr
    assert done.stdout == ""


def test_an_exception_lost_in_a_finalizer_is_raised_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)

    class Finalized:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    with Interruption() as interruption, interruption.raising():
        item = Finalized()
        del item
        with pytest.raises(Interrupted):
            interruption.check()


def test_other_threads_change_no_handler() -> None:
    before = signal.getsignal(signal.SIGINT)
    inside = []

    def run() -> None:
        with Interruption():
            inside.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert inside == [before]


class Impatient(RunDirectory):
    """A run that gets a signal just before it writes the record of its second step."""

    def record(self, values: Mapping[str, Any]) -> None:
        if values["step"] == 2:
            signal.raise_signal(signal.SIGINT)
        super().record(values)


def test_a_step_that_was_done_is_in_the_records(tmp_path: Path) -> None:
    train: Any = importlib.import_module("offload.train")
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog; " * 200)
    config = load_config(
        {
            "model": {"hidden_size": 32, "layers": 2, "heads": 2},
            "data": {"context": 32, "files": [str(tmp_path / "text.txt")]},
            "train": {"steps": 6, "batch_size": 2, "eval_batches": 0},
        }
    )
    run = Impatient(tmp_path / "run")
    progress = Progress(total=6, stream=io.StringIO(), errors=io.StringIO())
    with Interruption() as interruption:
        summary = train.train(config, run=run, progress=progress, interruption=interruption)
    run.close()
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert summary["interrupted"] == "SIGINT" and summary["steps"] == 2
    assert [line["step"] for line in lines] == [1, 2]
