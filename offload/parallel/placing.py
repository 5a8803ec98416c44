"""Each rank's share of its machine: threads, and where there are several NUMA nodes, one of these.

`torchrun` sets OMP_NUM_THREADS=1 for every rank, however many cores there are. The share is what the affinity mask and
the control group's quota allow, divided by the ranks of the machine (`optimizer_cpu.threads`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from optimizer_cpu import threads as kernel_threads

_NODES = Path("/sys/devices/system/node")
_lock = threading.Lock()
_users = 0
_placed: Placing | None = None


def parse_cpus(text: str) -> set[int]:
    """The CPUs of a kernel's list such as `0-3,8`."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found.update(range(int(first), int(last or first) + 1))
    return found


def numa_nodes(root: Path = _NODES) -> dict[int, set[int]]:
    """CPUs by NUMA node; empty where the system does not say."""
    found = {}
    with contextlib.suppress(OSError, ValueError):
        for entry in sorted(root.glob("node[0-9]*")):
            found[int(entry.name.removeprefix("node"))] = parse_cpus((entry / "cpulist").read_text())
    return found


def own_node(allowed: set[int], nodes: Mapping[int, set[int]], local_rank: int, local_world: int) -> int | None:
    """The NUMA node that a rank is to keep to: neighbouring ranks share one, and all nodes get equally many.

    None where that is of no use: a mask that is within one node already (then a launcher has bound the rank), ranks
    that cannot be spread equally, or nodes that give ranks unequal numbers of CPUs.
    """
    shares = {node: cpus & allowed for node, cpus in nodes.items() if cpus & allowed}
    if len(shares) < 2 or local_world % len(shares) or len({len(cpus) for cpus in shares.values()}) > 1:
        return None
    return sorted(shares)[local_rank * len(shares) // local_world]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placing:
    """What was chosen for this rank, and what was before."""

    local_world: int
    threads: int
    node: int | None
    cpus: frozenset[int]
    threads_before: int
    cpus_before: frozenset[int]

    def __str__(self) -> str:
        where = "" if self.node is None else f", NUMA node {self.node} (CPUs {_ranges(sorted(self.cpus))})"
        each = f"{self.threads} thread{'s' if self.threads > 1 else ''} each"
        return f"{self.local_world} ranks on this machine: {each}{where}; parallel.place_ranks = false leaves it alone"


def _ranges(cpus: Sequence[int]) -> str:
    starts = [cpu for n, cpu in enumerate(cpus) if n == 0 or cpus[n - 1] != cpu - 1]
    ends = [cpu for n, cpu in enumerate(cpus) if n == len(cpus) - 1 or cpus[n + 1] != cpu + 1]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def _bind(cpus: frozenset[int]) -> None:
    """Moves all threads of this process."""
    for entry in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # a thread that has just ended
            os.sched_setaffinity(int(entry), cpus)


def untouched() -> bool:
    """Whether `torchrun` has started this process, and nobody has chosen another number of threads than its own."""
    environ = os.environ
    return "TORCHELASTIC_RUN_ID" in environ and environ.get("OMP_NUM_THREADS") == "1" and torch.get_num_threads() == 1


def place(local_rank: int, local_world: int, *, root: Path = _NODES) -> Callable[[], None]:
    """Takes this rank's share of the machine, unless it has; the call that is returned gives it back after the last.

    Nothing where the program has chosen its number of threads, or is not started by `torchrun`.
    """
    global _users, _placed
    with _lock:
        _users += 1
        if _placed is None and untouched():
            _placed = _take(local_rank, local_world, root)
    return _Once(_give_back)


class _Once:
    def __init__(self, function: Callable[[], None]) -> None:
        self._function: Callable[[], None] | None = function

    def __call__(self) -> None:
        function, self._function = self._function, None
        if function is not None:
            function()


def current() -> Placing | None:
    """What is in force in this process."""
    return _placed


def _take(local_rank: int, local_world: int, root: Path) -> Placing:
    count = kernel_threads.default_threads()
    before, node = frozenset[int](), None
    if hasattr(os, "sched_getaffinity"):
        before = frozenset(os.sched_getaffinity(0))
        nodes = numa_nodes(root)
        node = own_node(set(before), nodes, local_rank, local_world)
    cpus = before if node is None else frozenset(nodes[node] & before)
    placing = Placing(
        local_world=local_world,
        threads=count,
        node=node,
        cpus=cpus,
        threads_before=torch.get_num_threads(),
        cpus_before=before,
    )
    if node is not None:
        kernel_threads.set_threads(count)  # a share of the whole mask, which is about to shrink
        _bind(cpus)
    torch.set_num_threads(count)
    return placing


def _give_back() -> None:
    global _users, _placed
    with _lock:
        _users -= 1
        if _users or _placed is None:
            return
        placing, _placed = _placed, None
        if placing.node is not None:
            _bind(placing.cpus_before)
            kernel_threads.set_threads(None)
        if torch.get_num_threads() == placing.threads:  # else the program has chosen another number meanwhile
            torch.set_num_threads(placing.threads_before)
