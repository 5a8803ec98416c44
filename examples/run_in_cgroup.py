"""Runs a command inside a memory control group, so that the kernel enforces the limit (page cache included).

    python examples/run_in_cgroup.py --memory 4GiB -- offload train examples/one_billion.toml

Works with version 1 and version 2 hierarchies; needs the right to make a group in one of them (root, or a delegated
subtree). Prints the group's peak memory at the end. Exit status: the command's, 137 when the kernel killed it, 125 when
no group can be made.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from swap.geometry import format_bytes, parse_bytes

NO_GROUP = 125


class MemoryGroup:
    """A memory control group that is removed on exit. ``OSError`` when none can be made."""

    def __init__(self, limit: int) -> None:
        errors = []
        for version, parent in _parents():
            self.version, self.path = version, parent / f"offload-{os.getpid()}"
            try:
                self._make(limit)
                return
            except OSError as error:
                errors.append(f"{self.path}: {error.strerror}")
                with contextlib.suppress(OSError):
                    self.path.rmdir()
        reasons = "; ".join(errors) or "no memory controller is mounted"
        raise OSError(f"no memory control group can be made: {reasons}")

    def _make(self, limit: int) -> None:
        if self.version == 2:
            # A group has the controller's files only if its parent hands the controller down.
            (self.path.parent / "cgroup.subtree_control").write_text("+memory")
        self.path.mkdir()
        if self.version == 2:
            (self.path / "memory.max").write_text(str(limit))
            with contextlib.suppress(OSError):
                (self.path / "memory.swap.max").write_text("0")
        else:
            (self.path / "memory.limit_in_bytes").write_text(str(limit))
            with contextlib.suppress(OSError):
                (self.path / "memory.memsw.limit_in_bytes").write_text(str(limit))

    def enter(self) -> None:
        """Moves the calling process into the group."""
        (self.path / "cgroup.procs").write_text(str(os.getpid()))

    def peak(self) -> int | None:
        """Most bytes ever charged to the group, page cache included; ``None`` on kernels that do not tell."""
        file = self.path / ("memory.peak" if self.version == 2 else "memory.max_usage_in_bytes")
        return int(file.read_text()) if file.exists() else None

    def kills(self) -> int:
        """How often the kernel killed a process of the group for memory."""
        file = self.path / ("memory.events" if self.version == 2 else "memory.oom_control")
        words = file.read_text().split()
        return int(words[words.index("oom_kill") + 1]) if "oom_kill" in words else 0

    def remove(self) -> None:
        """Removes the group; its last process may need a moment to be gone."""
        for _ in range(50):
            try:
                self.path.rmdir()
                return
            except OSError:
                time.sleep(0.1)


def _parents() -> list[tuple[int, Path]]:
    """(version, directory) under which a group may be made: this process's own group first, then the root."""
    own = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        own[controllers] = path.lstrip("/")
    found = []
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mount, kind, options = line.split()[:4]
        if kind == "cgroup" and "memory" in options.split(","):
            mine = next((path for names, path in own.items() if "memory" in names.split(",")), "")
            found += [(1, Path(mount) / mine), (1, Path(mount))]
        elif kind == "cgroup2" and "memory" in (Path(mount) / "cgroup.controllers").read_text().split():
            found += [(2, Path(mount) / own.get("", "")), (2, Path(mount))]
    return [(version, parent) for version, parent in dict.fromkeys(found) if parent.is_dir()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", default="4GiB", help="limit, such as 4GiB")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- COMMAND [ARGUMENT]...")
    arguments = parser.parse_args()
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        parser.error("no command given")
    try:
        limit = parse_bytes(arguments.memory)
    except ValueError as error:
        parser.error(str(error))
    try:
        group = MemoryGroup(limit)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return NO_GROUP
    try:
        child = subprocess.Popen(command, preexec_fn=group.enter)

        def forward(signum: int, frame: FrameType | None) -> None:
            child.send_signal(signum)

        signal.signal(signal.SIGTERM, forward)
        # A terminal sends Ctrl-C to the child as well.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        status = child.wait()
        peak, kills = group.peak(), group.kills()
        print(
            f"memory limit {format_bytes(limit)}, peak {'unknown' if peak is None else format_bytes(peak)} "
            f"with page cache, killed by the kernel {kills} times",
            file=sys.stderr,
        )
        return 128 - status if status < 0 else status
    except OSError as error:
        print(f"error: {command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    except subprocess.SubprocessError:
        print(f"error: cannot enter the memory control group {group.path}", file=sys.stderr)
        return NO_GROUP
    finally:
        group.remove()


if __name__ == "__main__":
    sys.exit(main())
