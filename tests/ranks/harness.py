"""Functions run on several ranks, and whole commands under `torchrun`.

A pool's processes are forked from a server that has imported everything, so a pool costs little and is made anew after
every failure that leaves something behind. For each call the ranks form a process group of their own (gloo on the
loopback interface, a fresh prefix of a store that lives in the test's process, as a launcher's does). What is left
behind is an error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import gc
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from tests.forked import end_with_parent, forking

ROOT = Path(__file__).resolve().parents[2]
_BEGINS = 90.0  # seconds that ranks get to start
_ENDS = 10.0  # seconds that ranks get to leave
_MARK = "OFFLOAD_TEST_RUN"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a call on one rank: `value`, or the exception's type, text and traceback; `exit` is the exit code
    of a process that ended instead (negative: killed by that signal). `at`: seconds since the call began. `left`:
    threads of ours and open files that a failure has left behind; without a failure that is one.
    """

    rank: int
    value: Any = None
    kind: str = ""
    message: str = ""
    trace: str = ""
    exit: int | None = None
    at: float = 0.0
    left: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        return bool(self.kind) or self.exit is not None

    def __str__(self) -> str:
        if self.exit is not None:
            return f"rank {self.rank} ended with {self.exit} after {self.at:.1f} s"
        if self.kind:
            return f"rank {self.rank} failed after {self.at:.1f} s:\n{self.trace}"
        return f"rank {self.rank}: {self.value!r:.200}"


class RanksFailedError(AssertionError):
    """A call failed; `outcomes` has all ranks, the text the first failure at the top."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        self.outcomes = list(outcomes)
        ordered = sorted((o for o in outcomes if o.failed), key=lambda o: o.at)
        super().__init__("\n\n".join(map(str, ordered)))


class RanksStuckError(AssertionError):
    """A call did not end in time; the text has the stacks of all threads of every rank."""


class RankPool:
    """`world` processes that wait for functions to call. `close()` when done; a context manager too."""

    def __init__(self, world: int, *, timeout: float = 150.0) -> None:
        self.world, self.timeout = world, timeout
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._calls = 0
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout: float | None = None,
        may_leave: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """`function(*args, **kwargs)` on every rank; its results by rank. A module-level function. `may_leave`: files
        that it leaves open are no error.

        Raises:
            RanksFailedError: an exception, or the end of a process, on any rank.
            RanksStuckError: not all ranks were done in time; all are killed then.
        """
        outcomes = self.outcomes(function, *args, timeout=timeout, may_leave=may_leave, **kwargs)
        if any(outcome.failed for outcome in outcomes):
            raise RanksFailedError(outcomes)
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout: float | None = None,
        may_leave: bool = False,
        **kwargs: Any,
    ) -> list[Outcome]:
        """The same for tests of failures: what became of the call on every rank.

        Raises:
            RanksStuckError: as `run`.
        """
        if not self._processes:
            self._start()
        self._calls += 1
        began = time.monotonic()
        call = pickle.dumps((f"call{self._calls}", may_leave, function, args, kwargs))
        for pipe in self._pipes:
            pipe.send_bytes(call)
        deadline = began + (self.timeout if timeout is None else timeout)
        found: dict[int, Outcome] = {}
        while len(found) < self.world:
            waiting = [rank for rank in range(self.world) if rank not in found]
            self._wait(waiting, deadline)
            for rank in waiting:
                outcome = self._take(rank, began)
                if outcome is not None:
                    found[rank] = outcome
            if time.monotonic() > deadline and len(found) < self.world:
                stacks = self._stacks(found)
                self._kill()
                raise RanksStuckError(f"{function.__name__}: not done after {time.monotonic() - began:.0f} s\n{stacks}")
        outcomes = [found[rank] for rank in range(self.world)]
        if any(outcome.exit is not None or outcome.left for outcome in outcomes):
            self._kill()
        return outcomes

    def _start(self) -> None:
        context = forking()
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, self.world, self._store.port, theirs, str(self._stack_file(rank))),
                name=f"rank{rank}",
                daemon=True,
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        deadline = time.monotonic() + _BEGINS  # not out of the first call's time: the server imports everything first
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                self._kill()
                raise RanksStuckError(f"rank {rank} has not started after {_BEGINS:g} s")
            pipe.recv()

    def _wait(self, ranks: Sequence[int], deadline: float) -> None:
        objects = [x for rank in ranks for x in (self._pipes[rank], self._processes[rank].sentinel)]
        wait(objects, max(0.0, min(deadline - time.monotonic(), 1.0)))

    def _take(self, rank: int, began: float) -> Outcome | None:
        ended = not self._processes[rank].is_alive()  # before the pipe is looked at: what it has said counts
        with contextlib.suppress(EOFError, OSError):
            if self._pipes[rank].poll():
                return self._pipes[rank].recv()  # type: ignore[no-any-return]
        if not ended:
            return None
        return Outcome(rank=rank, exit=self._processes[rank].exitcode, at=time.monotonic() - began)

    def _stack_file(self, rank: int) -> Path:
        return Path(self._folder.name) / f"stack{rank}"

    def _stacks(self, found: Mapping[int, Outcome]) -> str:
        """What the threads of ranks that are not done are doing, and the outcome of the others."""
        for rank, process in enumerate(self._processes):
            if rank not in found and process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        said = []
        for rank in range(self.world):
            text = str(found[rank]) if rank in found else self._stack_file(rank).read_text()
            said.append(f"--- rank {rank}\n{text}")
        return "\n".join(said)

    def _kill(self) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError, TypeError):
                os.kill(process.pid, signal.SIGKILL)
        self._end()

    def _end(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(_ENDS)
            if process.is_alive():
                process.kill()
                process.join(_ENDS)
            process.close()
        self._processes, self._pipes = [], []

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank."""
        return [process.pid for process in self._processes]

    def close(self) -> None:
        """Ends all processes. Idempotent."""
        self._end()
        self._folder.cleanup()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


# In a rank


def _serve(rank: int, world: int, port: int, pipe: Connection, stacks: str) -> None:
    end_with_parent()
    gc.freeze()  # what the server imported: each call collects twice
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file, all_threads=True)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the test's process decides
        torch.set_num_threads(1)
        gc.freeze()  # what is imported stays; collections before and after each call would go through all of it
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo",
        )  # fmt: skip
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        pipe.send(os.getpid())
        while True:
            try:
                call = pipe.recv_bytes()
            except (EOFError, OSError):
                return
            pipe.send(_call(rank, world, store, call))


def _call(rank: int, world: int, store: Any, call: bytes) -> Outcome:
    try:
        name, may_leave, function, args, kwargs = pickle.loads(call)
    except Exception as error:
        return _failure(rank, error, 0.0)
    before = _held()
    outcome = _attempt(rank, world, dist.PrefixStore(name, store), partial(function, *args, **kwargs))
    left = _held() - before
    if not left or may_leave:
        return outcome
    left_behind = tuple(sorted(left.elements()))
    if outcome.failed:
        return dataclasses.replace(outcome, left=left_behind)
    message = f"left behind: {', '.join(left_behind)}"
    return Outcome(rank=rank, kind="AssertionError", message=message, trace=message, at=outcome.at, left=left_behind)


def _failure(rank: int, error: BaseException, at: float) -> Outcome:
    return Outcome(rank=rank, kind=type(error).__name__, message=str(error), trace=traceback.format_exc(), at=at)


def _attempt(rank: int, world: int, store: Any, function: Callable[[], Any]) -> Outcome:
    began = time.monotonic()
    value: Any = None
    try:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
        try:
            if store.add("connected", 1) == world:  # one that fails at once must not look like one that never connected
                store.set("all connected", "yes")
            store.wait(["all connected"])
            value = function()
            at = time.monotonic() - began
            pickle.dumps(value)
        finally:
            dist.destroy_process_group()
    except BaseException as error:
        return _failure(rank, error, time.monotonic() - began)
    return Outcome(rank=rank, value=value, at=at)


def _held() -> Counter[str]:
    """Threads of ours, and files: swap files, connections, pipes."""
    gc.collect()
    held = Counter(thread.name for thread in threading.enumerate() if thread.name.startswith("offload"))
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(entry.path)
            if not target.startswith(("/memfd", "/dev/", "/proc/")):
                held[target] += 1
    return held


# Whole commands


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A command that has ended; `left`: processes of it that were still there, and were killed."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float
    left: list[str]


def run_torchrun(
    args: Sequence[str],
    *,
    nproc: int,
    env: Mapping[str, str] | None = None,
    timeout: float = 240.0,
    cwd: Path = ROOT,
    while_running: Callable[[Marked], None] | None = None,
    apart: bool = False,
) -> Ended:
    """`torchrun --nproc_per_node nproc *args` in the repository; `while_running` is called beside it. After `timeout`
    seconds everything is killed. `apart`: where possible with a loopback interface of its own.

    Raises:
        RanksStuckError: it did not end in time.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(nproc)]
    # The launcher takes a free port itself: one that was looked for could be another's by the time that it is used.
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1", *args]
    if apart:
        command = [sys.executable, str(ROOT / "tests" / "ranks" / "apart.py"), *command]
    marked = Marked()
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1",
        "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE",
        _MARK: marked.mark, **(env or {}),
    }  # fmt: skip
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        environment.pop(name, None)
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, cwd=cwd, env=environment, stdout=out, stderr=err, text=True)
        stuck, left = False, []
        try:
            if while_running is not None:
                while_running(marked)
            process.wait(max(1.0, began + timeout - time.monotonic()))
        except subprocess.TimeoutExpired:
            stuck = True
        finally:
            deadline = time.monotonic() + (0.0 if stuck else 2.0)
            while (left := marked.processes()) and time.monotonic() < deadline:
                time.sleep(0.1)
            names = [" ".join(p.info["cmdline"] or [])[:100] for p in left]
            marked.kill()
            process.wait()
        out.seek(0)
        err.seek(0)
        texts = out.read(), err.read()
    seconds = time.monotonic() - began
    if stuck:
        raise RanksStuckError(f"{' '.join(args)}: not done after {seconds:.0f} s\n{texts[0]}\n{texts[1]}")
    return Ended(returncode=process.returncode, stdout=texts[0], stderr=texts[1], seconds=seconds, left=names)


class Marked:
    """The processes of one command, known by a variable in their environment."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex

    def processes(self, *, ranks: bool = False) -> list[psutil.Process]:
        """Those that there are; with `ranks` only workers, by rank."""
        found: list[tuple[int, psutil.Process]] = []
        for process in psutil.process_iter(["cmdline"]):
            with contextlib.suppress(psutil.Error):
                environment = process.environ()
                if environment.get(_MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    rank = int(environment.get("RANK", "-1"))
                    if rank >= 0 or not ranks:
                        found.append((rank, process))
        return [process for _, process in sorted(found, key=lambda item: (item[0], item[1].pid))]

    def kill(self) -> None:
        """Kills all of them."""
        for _ in range(5):
            processes = self.processes()
            for process in processes:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(processes, timeout=2.0)
            if not processes:
                return


@contextlib.contextmanager
def pools() -> Iterator[Callable[[int], RankPool]]:
    """One pool for each world size, made when asked for; for a module-wide fixture."""
    made: dict[int, RankPool] = {}

    def of(world: int) -> RankPool:
        if world not in made:
            made[world] = RankPool(world)
        return made[world]

    try:
        yield of
    finally:
        for pool in made.values():
            pool.close()
