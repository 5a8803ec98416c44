"""Two machines on one: network namespaces joined by a veth pair, each with a `torchrun` of its own.

Processes enter a namespace by `nsenter --net`, so that only the network differs: `ip netns exec` would also mount
another /sys, where limits of control groups are read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from tests.ranks.harness import _MARK, ROOT, Ended, Marked

_INTERFACE = "veth0"
_PORT = 29400
_TOOLS = ("ip", "nsenter")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=20)


def why_not() -> str | None:
    """What keeps namespaces from being made here; None if nothing does."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found: install iproute2 and util-linux"
    try:
        with TwoNodes():
            return None
    except (subprocess.SubprocessError, OSError) as error:
        said = getattr(error, "stderr", None) or str(error)
        return f"no network namespaces joined by a veth pair can be made: {str(said).strip()}"


@dataclasses.dataclass(slots=True)
class _Started:
    process: subprocess.Popen[str]
    out: IO[str]
    err: IO[str]
    began: float
    mark: Marked


class TwoNodes:
    """Nodes 0 and 1, with one address each; removed on exit, with all that runs in them."""

    def __init__(self) -> None:
        name = uuid.uuid4().hex[:8]
        self._names = [f"offload-{name}-{node}" for node in range(2)]
        octet = int(name[:2], 16)
        self.addresses = [f"10.213.{octet}.{1 + node}" for node in range(2)]
        self._started: list[_Started] = []

    def __enter__(self) -> TwoNodes:
        try:
            for name in self._names:
                _ip("netns", "add", name)
            peer = ["type", "veth", "peer", "name", _INTERFACE, "netns", self._names[1]]
            _ip("link", "add", _INTERFACE, "netns", self._names[0], *peer)
            for name, address in zip(self._names, self.addresses, strict=True):
                _ip("-n", name, "addr", "add", f"{address}/30", "dev", _INTERFACE)
                _ip("-n", name, "link", "set", "lo", "up")
                _ip("-n", name, "link", "set", _INTERFACE, "up")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Kills what runs, removes the namespaces. Idempotent."""
        for started in self._started:
            started.mark.kill()
            started.process.wait()
            started.out.close()
            started.err.close()
        self._started = []
        for name in self._names:
            with contextlib.suppress(subprocess.SubprocessError):
                _ip("netns", "del", name)

    def marks(self) -> list[Marked]:
        """What was started, by node."""
        return [started.mark for started in self._started]

    def cut(self) -> None:
        """The link between the nodes goes down: nothing arrives, nothing is refused."""
        _ip("-n", self._names[1], "link", "set", _INTERFACE, "down")

    def start(
        self,
        arguments: Sequence[str],
        folders: Sequence[Path],
        *,
        nproc: int = 2,
        env: Mapping[str, str] | None = None,
        read_timeout: float = 60.0,
    ) -> None:
        """`torchrun --nnodes 2 --nproc_per_node nproc *arguments`, on node i in `folders[i]`; ranks count from node 0.
        `read_timeout`: seconds in which the rendezvous has to answer.
        """
        for node, folder in enumerate(folders):
            command = ["nsenter", f"--net=/var/run/netns/{self._names[node]}"]
            command += [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", str(nproc)]
            command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{self.addresses[0]}:{_PORT}"]
            # Nodes are numbered by address, and rank 0 is where the store is.
            command += ["--rdzv-id", "two", "--local-addr", self.addresses[node]]
            # torchrun looks for the endpoint among the addresses of the host's name, where this one is not.
            command += ["--rdzv-conf", f"is_host={node == 0},read_timeout={read_timeout:g}".lower(), *arguments]
            marked = Marked()
            environment = {
                **os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1",
                "GLOO_SOCKET_IFNAME": _INTERFACE, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE",
                "NODE": str(node), _MARK: marked.mark, **(env or {}),
            }  # fmt: skip
            for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
                environment.pop(name, None)
            out, err = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")  # noqa: SIM115  # read by `wait`
            process = subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=err, text=True)
            self._started.append(_Started(process, out, err, time.monotonic(), marked))

    def said(self, node: int) -> str:
        """What that node has written to its standard output so far."""
        return os.pread(self._started[node].out.fileno(), 1 << 20, 0).decode()

    def wait_for_ranks(self, timeout: float) -> list[Ended]:
        """As `wait`, as soon as no rank is left. Launchers that are still there are killed: one whose rendezvous
        is out of reach waits for the system to give up its connection, which takes a quarter of an hour.

        Raises:
            AssertionError: ranks were left after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while any(mark.processes(ranks=True) for mark in self.marks()):
            if time.monotonic() > deadline:
                return self.wait(0.0)
            time.sleep(0.2)
        grace = time.monotonic() + 5.0
        while time.monotonic() < grace and any(started.process.poll() is None for started in self._started):
            time.sleep(0.2)
        for started in self._started:
            if started.process.poll() is None:
                started.process.kill()
        return self.wait(10.0)

    def wait(self, timeout: float) -> list[Ended]:
        """What became of what was started, by node; whatever is not done after `timeout` seconds is killed.

        Raises:
            AssertionError: it was not done in time.
        """
        deadline, stuck, found = time.monotonic() + timeout, False, []
        for started in self._started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                started.process.wait(max(0.1, deadline - time.monotonic()))
            stuck |= started.process.poll() is None
        grace = time.monotonic() + 2.0
        while not stuck and any(s.mark.processes() for s in self._started) and time.monotonic() < grace:
            time.sleep(0.1)
        for started in self._started:
            left = [" ".join(process.info["cmdline"] or [])[:100] for process in started.mark.processes()]
            started.mark.kill()
            code = started.process.wait()
            texts = []
            for file in (started.out, started.err):
                file.seek(0)
                texts.append(file.read())
                file.close()
            seconds = time.monotonic() - started.began
            found.append(Ended(returncode=code, stdout=texts[0], stderr=texts[1], seconds=seconds, left=left))
        self._started = []
        if stuck:
            raise AssertionError(f"not done after {timeout:g} s:\n{report(found)}")
        return found


def report(ended: Sequence[Ended]) -> str:
    """All that was said, by node."""
    said = []
    for node, of_node in enumerate(ended):
        lines = [line for line in of_node.stderr.splitlines() if not line.startswith("frame #")]
        said.append("\n".join([f"--- node {node}: {of_node.returncode} after {of_node.seconds:.0f} s", *lines]))
    return "\n".join(said)
