"""fio beside our own measurement: the same file system, sizes, depths and patterns."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_RW = {"read": "read", "write": "write", "mixed": "rw"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FioRate:
    """What fio measured: bytes per second, and processor seconds for 10^9 bytes."""

    bytes_per_s: float
    cpu_seconds_per_gb: float


class FioError(RuntimeError):
    """fio ended with an error."""


def available() -> str | None:
    """The path of fio, if it is installed."""
    return shutil.which("fio")


def engine() -> str:
    """The fastest of fio's engines that it has here."""
    listed = subprocess.run(["fio", "--enghelp"], capture_output=True, text=True, check=False).stdout
    return next((name for name in ("io_uring", "libaio") if name in listed.split()), "psync")


@contextmanager
def files(paths: Sequence[str]) -> Iterator[list[Path]]:
    """A place for one file under each path, removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="fio-", dir=paths[0]) as first:
        others = [tempfile.mkdtemp(prefix="fio-", dir=path) for path in paths[1:]]
        try:
            yield [Path(directory) / "data" for directory in (first, *others)]
        finally:
            for directory in others:
                shutil.rmtree(directory, ignore_errors=True)


def run(
    targets: Sequence[Path],
    pattern: str,
    *,
    ioengine: str,
    block: int,
    depth: int,
    nbytes: int,
    seconds: float | None = None,
    direct: bool = True,
) -> FioRate:
    """One fio job over ``targets`` (``nbytes`` in all): once through, or for ``seconds``. FioError if it fails."""
    arguments = [
        "fio",
        "--name=bench",
        "--filename=" + ":".join(str(target).replace(":", "\\:") for target in targets),
        f"--size={nbytes}",
        f"--rw={_RW[pattern]}",
        "--rwmixread=50",
        f"--bs={block}",
        f"--iodepth={depth}",
        f"--ioengine={ioengine}",
        f"--direct={int(direct)}",
        "--overwrite=1",
        "--thread",
        "--randrepeat=0",
        "--scramble_buffers=0",  # we do not change the bytes between writes either
        "--output-format=json",
    ]
    if ioengine == "io_uring":
        arguments += ["--fixedbufs=1", "--registerfiles=1"]
    if seconds is not None:
        arguments += ["--time_based=1", f"--runtime={max(1, round(seconds))}"]
    environment = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, env=environment)
    try:
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    except (ValueError, KeyError, IndexError):
        raise FioError(f"fio: {(done.stderr or done.stdout).strip()[:300]}") from None
    if job["error"]:
        raise FioError(f"fio ended with error {job['error']}: {done.stderr.strip()[:300]}")
    milliseconds = max(job["job_runtime"], 1)
    # Each direction knows its own time; a job that reads and writes takes as long as the slower.
    active = max(job["read"]["runtime"], job["write"]["runtime"], 1) / 1000
    moved = job["read"]["io_bytes"] + job["write"]["io_bytes"]
    cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * milliseconds / 1000
    return FioRate(bytes_per_s=moved / active, cpu_seconds_per_gb=cpu / moved * 1e9)
