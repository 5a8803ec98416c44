"""``offload doctor``: what this machine gives and refuses, line by line, with the remedy."""

from __future__ import annotations

import os
import platform
import resource
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from offload.machine import cpu_quota, host_memory
from swap.checksums import method
from swap.errors import SwapPathError
from swap.files import find_leftovers, open_swap_file
from swap.geometry import format_bytes
from swap.native import memlock_limit, probe_io_uring

Status = Literal["ok", "warning", "failure"]
_RANK: dict[str, int] = {"ok": 0, "warning": 1, "failure": 2}

_LITTLE_SPACE = 10 << 30
_IN_MEMORY = ("tmpfs", "ramfs")
_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "ceph", "lustre")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line: ``name``, what was found, and for anything but "ok" the remedy."""

    name: str
    status: Status
    detail: str
    remedy: str = ""


def examine(paths: Sequence[str]) -> list[Check]:
    """All checks; those of swap paths for each of ``paths``."""
    checks = [*_kernel(), *_memory(), *_processors(), *_devices()]
    for path in paths:
        checks.extend(_path(path))
    return checks


def report(checks: Sequence[Check]) -> dict[str, Any]:
    """The checks as one JSON object, ``status`` the worst of them."""
    return {"status": worst(checks), "checks": [asdict(check) for check in checks]}


def worst(checks: Sequence[Check]) -> str:
    """The worst status."""
    return max((check.status for check in checks), key=lambda status: _RANK[status], default="ok")


def text(checks: Sequence[Check]) -> str:
    """The checks for people."""
    lines = []
    for check in checks:
        lines.append(f"{check.status:8}{check.name}: {check.detail}")
        if check.remedy:
            lines.append(f"{'':8}  -> {check.remedy}")
    return "\n".join(lines)


def _kernel() -> Iterator[Check]:
    yield Check(name="kernel", status="ok", detail=f"{platform.system()} {platform.release()} {platform.machine()}")
    probe = probe_io_uring()
    if not probe.usable:
        yield Check(
            name="io_uring",
            status="warning",
            detail=f"not usable: {probe.reason}; swap uses threads, which is slower",
            remedy=probe.remedy or "nothing to do if the speed is enough",
        )
    elif probe.reason:
        yield Check(
            name="io_uring",
            status="warning",
            detail=f"usable, with plain buffers: {probe.reason}",
            remedy=probe.remedy or "nothing to do: it costs a little processor time",
        )
    else:
        yield Check(name="io_uring", status="ok", detail="usable, with registered files and buffers")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != resource.RLIM_INFINITY and soft < 256
    yield Check(
        name="open files",
        status="warning" if few else "ok",
        detail=f"limit {soft} (hard {hard})",
        remedy="ulimit -n 1024" if few else "",
    )


def _memory() -> Iterator[Check]:
    limit = memlock_limit()
    small = limit is not None and limit < 64 << 20
    yield Check(
        name="memlock",
        status="warning" if small else "ok",
        detail="unlimited" if limit is None else f"{format_bytes(limit)} may be pinned",
        remedy="ulimit -l unlimited (container: --ulimit memlock=-1); until then io_uring uses plain buffers"
        if small
        else "",
    )
    memory = host_memory()
    little = memory.available < 1 << 30
    yield Check(
        name="host memory",
        status="warning" if little else "ok",
        detail=f"{format_bytes(memory.available)} available, limited by {memory.limited_by}",
        remedy="end other programs, raise the cgroup's limit, or set memory.host low" if little else "",
    )
    nodes = sorted(Path("/sys/devices/system/node").glob("node[0-9]*"))
    several = len(nodes) > 1
    yield Check(
        name="NUMA",
        status="warning" if several else "ok",
        detail=f"{len(nodes) or 1} node{'s' if several else ''}",
        remedy="start one process per node with numactl --cpunodebind --membind, near its GPU and drive"
        if several
        else "",
    )


def _processors() -> Iterator[Check]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    tight = quota is not None and quota < usable
    yield Check(
        name="processors",
        status="warning" if tight else "ok",
        detail=f"{usable} usable" + (f", quota of {quota:g}" if quota is not None else ", no quota"),
        remedy=f"set train.threads and OFFLOAD_THREADS to {max(1, int(quota or 1))}, or raise the CPU quota"
        if tight
        else "",
    )
    from optimizer_cpu import kernels

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the line below says it
        isa = kernels.active_isa()
    slow = isa == "reference"
    yield Check(
        name="kernels",
        status="warning" if slow else "ok",
        detail=f"optimizer {isa}, checksums {method()}",
        remedy="reinstall with a C++ compiler: the plain reference is several times slower" if slow else "",
    )


def _devices() -> Iterator[Check]:
    import torch

    if not torch.cuda.is_available():
        yield Check(name="device", status="ok", detail=f"no GPU (torch {torch.__version__}); the CPU computes")
        return
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        yield Check(
            name="device",
            status="ok",
            detail=f"cuda:{index} {torch.cuda.get_device_name(index)}, {format_bytes(free)} of {format_bytes(total)}",
        )
    yield _pinned()


def _pinned() -> Check:
    """Whether the driver registers a few hundred MiB; some systems stop far below the machine's memory."""
    from swap.budget import Budget
    from swap.devices import create_device
    from swap.errors import SwapError
    from swap.slabs import HostPool

    size = 256 << 20
    device = create_device("cuda")
    try:
        with HostPool(
            Budget({}),
            "host",
            "probe",
            register=device.host_register,
            unregister=lambda address, _nbytes: device.host_unregister(address),
        ) as pool:
            pool.take(size)
    except (SwapError, RuntimeError) as error:
        return Check(
            name="pinned memory",
            status="warning",
            detail=f"{format_bytes(size)} could not be registered: {' '.join(str(error).split())}",
            remedy="raise ulimit -l; under WSL2 set a larger memory= in .wslconfig",
        )
    finally:
        device.close()
    return Check(name="pinned memory", status="ok", detail=f"{format_bytes(size)} registered with the driver")


def _path(path: str) -> Iterator[Check]:
    name = f"swap path {path}"
    kind = _filesystem(path)
    try:
        file = open_swap_file(Path(path).absolute(), "auto")
    except SwapPathError as error:
        detail, _, remedy = str(error).partition("; ")
        yield Check(name=name, status="failure", detail=detail, remedy=remedy or "choose another path")
        return
    except OSError as error:
        yield Check(name=name, status="failure", detail=str(error), remedy="free space there, or choose another path")
        return
    try:
        free = file.free_bytes
        block = _logical_block(file.device)
        direct = file.direct
    finally:
        file.close()
    if kind in _IN_MEMORY:
        yield Check(
            name=name,
            status="warning",
            detail=f"is on {kind}: swap there takes memory instead of saving it",
            remedy="choose a directory on a drive",
        )
    elif kind in _NETWORK:
        yield Check(
            name=name,
            status="warning",
            detail=f"is on the network ({kind})",
            remedy="choose a directory on a local drive",
        )
    else:
        yield Check(
            name=name,
            status="ok" if direct else "warning",
            detail=f"{kind}, {'direct I/O' if direct else 'no direct I/O: slower, through the page cache'}"
            + (f", {block}-byte sectors" if block else ""),
            remedy="" if direct else "choose a file system with O_DIRECT, such as ext4 or xfs",
        )
    little = free < _LITTLE_SPACE
    yield Check(
        name=f"space {path}",
        status="failure" if free < 1 << 20 else "warning" if little else "ok",
        detail=f"{format_bytes(free)} free",
        remedy="free space, or add a path to memory.nvme_paths" if little else "",
    )
    left = find_leftovers(path)
    if left:
        yield Check(
            name=f"leftovers {path}",
            status="warning",
            detail=f"{len(left)} of dead runs",
            remedy=f"offload clean {path}",
        )


def _filesystem(path: str) -> str:
    """Type of the file system that holds ``path``, or "unknown"."""
    best, kind = "", "unknown"
    real = os.path.realpath(path)
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return kind
    for line in lines:
        _, mount, found, *_ = line.split(" ")
        mount = mount.replace("\\040", " ")
        if (real + "/").startswith(mount.rstrip("/") + "/") and len(mount) >= len(best):
            best, kind = mount, found
    return kind


def _logical_block(device: int) -> int | None:
    """Bytes of a sector of the drive under the file system."""
    entry = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    for folder in (entry, entry / ".."):
        try:
            return int((folder / "queue/logical_block_size").read_text())
        except (OSError, ValueError):
            continue
    return None
