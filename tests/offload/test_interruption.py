"""SIGINT and SIGTERM: raised where a run can be left, remembered elsewhere, and never lost."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest

from offload.interruption import Interrupted, Interruption


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_raises_within_raising(signum: int) -> None:
    before = signal.getsignal(signum)
    with Interruption() as interruption, pytest.raises(Interrupted) as caught, interruption.raising():
        signal.raise_signal(signum)
    assert caught.value.signum == signum and caught.value.name == signal.Signals(signum).name
    assert not isinstance(caught.value, Exception)
    assert signal.getsignal(signum) == before


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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
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
