"""Programs in processes of their own that begin at once: forked from a server that has imported what they import.

`multiprocessing` ends what it forks by `os._exit`. A program of this server runs at the top level of the main module
and comes to its end, so that an interpreter's exit, with its threads, `atexit` and modules, is the real one; so are
signals, kills and exit statuses. Memory that a test measures, what only an import shows, and variables that are read
while libraries are loaded need a process started anew.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
PRELOAD = [
    "torch._dynamo",
    "torch.distributed",
    "offload.cli.main",
    "offload.cli.train",
    "offload.train",
    "offload.engine",
    "offload.checkpoint.run",
    "offload.planner.plan",
    "swap.engines.threads",
    "tests.engine.common",
    "tests.engine.resources",
]
_LARGEST = 1 << 18  # bytes of one request


class Program:
    """`python *arguments`, started; used like `subprocess.Popen` with text pipes. `arguments` begin with `-c` and code,
    with `-m` and a module, or with a file's path.
    """

    def __init__(
        self, *arguments: str, cwd: Path = ROOT, env: Mapping[str, str] | None = None, before: str = ""
    ) -> None:
        """`before`: code that the process runs first."""
        ends = [os.pipe() for _ in range(4)]  # (read, write) of input, output, errors and status
        theirs = [ends[0][0], ends[1][1], ends[2][1], ends[3][1]]
        asked = {"arguments": arguments, "cwd": str(cwd), "env": dict(os.environ if env is None else env)}
        try:
            socket.send_fds(_server(), [json.dumps({**asked, "before": before}).encode()], theirs)
        finally:
            for end in theirs:
                os.close(end)
        self.stdin: IO[str] = os.fdopen(ends[0][1], "w")
        self.stdout: IO[str] = os.fdopen(ends[1][0])
        self.stderr: IO[str] = os.fdopen(ends[2][0])
        self._status: IO[str] = os.fdopen(ends[3][0])
        self.returncode: int | None = None
        self.pid = int(self._status.readline())

    def poll(self) -> int | None:
        """As in `subprocess`: None while it runs, negative for a signal that ended it."""
        if self.returncode is None and select.select([self._status], [], [], 0.0)[0]:
            self._read()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status.

        Raises:
            subprocess.TimeoutExpired: it had not ended after `timeout` seconds.
        """
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("program", timeout or 0.0)
            self._read()
        assert self.returncode is not None
        return self.returncode

    def _read(self) -> None:
        line = self._status.readline()
        self.returncode = int(line) if line else -signal.SIGKILL  # with its server
        self._status.close()

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Waits for its end; what it wrote that nobody has read. Like `wait` else."""
        said: dict[str, str] = {}

        def read(name: str, pipe: IO[str]) -> None:
            said[name] = "" if pipe.closed else pipe.read()

        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        readers = [threading.Thread(target=read, args=(n, getattr(self, n)), daemon=True) for n in ("stdout", "stderr")]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join()
        self.stdout.close()
        self.stderr.close()
        return said["stdout"], said["stderr"]


def run(*arguments: str, timeout: float = 100.0, **options: Any) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` of such a program; `timeout` is only a watchdog."""
    program = Program(*arguments, **options)
    try:
        out, err = program.communicate(timeout)
    finally:
        program.kill()
    assert program.returncode is not None
    return subprocess.CompletedProcess(arguments, program.returncode, out, err)


def descriptors() -> set[int]:
    """What this process has open for its server, if it has one."""
    return {_server().fileno()} if _server.cache_info().currsize else set()


@functools.cache
def _server() -> socket.socket:
    """The connection to this process's server, which ends with it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-m", "tests.programs", str(theirs.fileno())]
    subprocess.Popen(command, cwd=ROOT, env=variables, pass_fds=[theirs.fileno()], start_new_session=True)
    theirs.close()
    atexit.register(ours.close)
    return ours


# In the server


def _serve(connection: socket.socket) -> dict[str, Any] | None:
    """Forks for every request. Returns what was asked for in the process that is to do it, None in the server."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        message, ends, _, _ = socket.recv_fds(connection, _LARGEST, 4)
        if not message:
            return None
        if os.fork() == 0:
            # A parent of the program that tells how it ended; it holds nothing else.
            _end_with_parent()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            connection.close()
            *pipes, status = ends
            pid = os.fork()
            if pid == 0:
                _end_with_parent()
                os.close(status)
                for number, pipe in enumerate(pipes):
                    os.dup2(pipe, number)
                    os.close(pipe)
                asked: dict[str, Any] = json.loads(message)
                return asked
            for pipe in pipes:
                os.close(pipe)
            try:
                os.write(status, f"{pid}\n".encode())
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                os.write(status, f"{code}\n".encode())
            finally:
                os._exit(0)
        for end in ends:
            os.close(end)


def _end_with_parent() -> None:
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _prepare(asked: dict[str, Any]) -> Any:
    """Becomes the process that was asked for; code to be run at the top level, or None if there is none left."""
    os.environ.clear()
    os.environ.update(asked["env"])
    os.chdir(asked["cwd"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    tempfile.tempdir = None
    exec(asked["before"], {})
    kind, *rest = asked["arguments"]
    if kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        return compile(textwrap.dedent(rest[0]), "<string>", "exec")
    if kind == "-m":
        sys.argv = rest
        sys.path.insert(0, asked["cwd"])
        return compile(f"runpy.run_module({rest[0]!r}, run_name='__main__', alter_sys=True)", "<string>", "exec")
    sys.argv = [kind, *rest]
    return compile(f"runpy.run_path({kind!r}, run_name='__main__')", "<string>", "exec")


if __name__ == "__main__":
    for _name in PRELOAD:
        importlib.import_module(_name)
    gc.collect()
    gc.freeze()  # a program's end would go through all that was imported
    _asked = _serve(socket.socket(fileno=int(sys.argv[1])))
    if _asked is not None:
        exec(_prepare(_asked))

__all__ = ["Program", "descriptors", "run", "runpy"]
