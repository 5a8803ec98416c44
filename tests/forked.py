"""The command in a process of its own, forked from a server that has imported everything: signals and kills are as real
as in one started anew, without the seconds that importing takes.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import programs

PRELOAD = [
    "pytest",
    *programs.PRELOAD,
    "offload.parallel.cluster",
    "tests.ranks.harness",
    "tests.forked",
]
"""What the server imports; the same for everyone, since a process has one server."""


def forking() -> Any:
    """The context of the server's processes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def end_with_parent() -> None:
    """This process is killed when the one that waits for it ends."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class Command:
    """`offload ARGUMENTS` in `cwd`, started; used like `subprocess.Popen` with text pipes."""

    def __init__(self, cwd: Path, arguments: Sequence[str]) -> None:
        number = len(list(cwd.glob(".said*")))
        self._said = [cwd / f".said{number}.out", cwd / f".said{number}.err"]
        for path in self._said:
            path.touch()
        self._process = forking().Process(target=_run, args=(str(cwd), list(arguments), *map(str, self._said)))
        self._process.start()

    @property
    def returncode(self) -> int | None:
        """As in `subprocess`: negative for a signal that killed it."""
        code: int | None = self._process.exitcode
        return code

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, signum: int) -> None:
        if self._process.is_alive():
            os.kill(self._process.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float = 100.0) -> tuple[str, str]:
        """Waits until it has ended; what it said. After `timeout` seconds it is killed, and the test fails."""
        self._process.join(timeout)
        stuck = self._process.is_alive()
        if stuck:
            self._process.kill()
            self._process.join()
        out, err = (path.read_text() for path in self._said)
        if stuck:
            pytest.fail(f"not done after {timeout:.0f} s\n{out}\n{err}")
        return out, err


def _run(cwd: str, arguments: list[str], out: str, err: str) -> None:
    end_with_parent()
    for path, stream in ((out, sys.stdout), (err, sys.stderr)):
        stream.flush()
        fd = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(fd, stream.fileno())
        os.close(fd)
    os.chdir(cwd)
    from offload.cli import main

    call: Callable[..., Any] = main
    call(arguments, prog_name="offload")
