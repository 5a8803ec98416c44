"""A short probe of each drive at its first use, and its memory: settings and bandwidths for the next runs.

Results are kept per device and kernel in ``$XDG_CACHE_HOME/offload/io.json`` (``~/.cache`` by default).
"""

from __future__ import annotations

import json
import logging
import os
import platform
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from swap.budget import Budget
from swap.engines import resolve_engine
from swap.engines.protocol import BURST
from swap.errors import BudgetError, SwapError, SwapPathError
from swap.geometry import PAGE, format_bytes
from swap.measure import PATTERNS, Bench, Setting, mixing_penalty

_log = logging.getLogger(__name__)

PROBE_SECONDS = 3.0
PROBE_BYTES = 256 << 20
PROBE_REQUEST = 4 << 20  # 12 to 64 MiB of buffers, where the benchmark takes 192
_VERSION = 1
_CANDIDATES = ((1 << 20, 4), (1 << 20, 16), (4 << 20, 8))
MOST_DEPTH = max(depth for _, depth in _CANDIDATES)
"""The largest queue depth that tuning chooses."""

_CLEARLY_BETTER = 1.1
"""More bytes in flight must gain this factor to be taken: they cost memory and delay what is behind them."""

_HURTS = 1.25
"""A mixing penalty above this: reads and writes at once take clearly longer than one after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveProbe:
    """What a drive did in the probe: bytes per second, and the setting that gave them."""

    engine: str
    block: int
    queue_depth: int
    read_bytes_per_s: float
    write_bytes_per_s: float
    mixed_bytes_per_s: float
    mixing_penalty: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """For a store on several paths: block, depth and burst that suit all of them, and each path's share."""

    block: int
    queue_depth: int
    weights: tuple[float, ...]
    burst: int
    drives: tuple[DriveProbe, ...]


def tune(
    paths: Sequence[str | os.PathLike[str]],
    *,
    engine: str = "auto",
    probe: bool = True,
    budget: Budget | None = None,
) -> Tuning | None:
    """Settings for ``paths``: from the cache or, with ``probe``, from a probe of each drive that is not in it.

    A probe's buffers are charged to the "host" tier of ``budget`` while it lasts. None where there is nothing to go by:
    no probe allowed, or no room for its ``PROBE_BYTES`` or its buffers.
    """
    name = resolve_engine(engine)
    drives = []
    for path in paths:
        if not os.path.isdir(path):
            return None
        found = recall(path, name)
        if found is None and probe:
            found = probe_drive(path, name, budget=budget)
            if found is not None:
                _remember(_key(path, name), found)
        if found is None:
            return None
        drives.append(found)
    return Tuning(
        block=max(drive.block for drive in drives),
        queue_depth=max(drive.queue_depth for drive in drives),
        weights=tuple(drive.mixed_bytes_per_s for drive in drives),
        burst=BURST if any(drive.mixing_penalty > _HURTS for drive in drives) else 0,
        drives=tuple(drives),
    )


def probe_drive(
    path: str | os.PathLike[str], engine: str, *, seconds: float = PROBE_SECONDS, budget: Budget | None = None
) -> DriveProbe | None:
    """Measure the drive under ``path`` for about ``seconds``; None if it or ``budget`` has no room, or if it refuses.

    Settings whose buffers are more than the budget holds are left out.
    """
    status = os.statvfs(path)
    if status.f_bavail * status.f_frsize < 4 * PROBE_BYTES:
        return None
    best: DriveProbe | None = None
    slice_seconds = seconds / (len(_CANDIDATES) * (len(PATTERNS) + 1))
    for block, depth in _CANDIDATES:
        setting = Setting(engine=engine, block=block, queue_depth=depth)
        try:
            with Bench([path], setting, nbytes=PROBE_BYTES, request=PROBE_REQUEST, budget=budget) as bench:
                bench.run("write", seconds=slice_seconds)
                rates = {pattern: bench.run(pattern, seconds=slice_seconds).bytes_per_s for pattern in PATTERNS}
        except BudgetError as error:
            _log.info("swap: the probe of %s leaves out %s: %s", path, setting, error)
            continue
        except (SwapError, SwapPathError) as error:
            _log.warning("swap: the probe of %s failed (%s); default settings are used", path, error)
            return None
        found = DriveProbe(
            engine=engine,
            block=block,
            queue_depth=depth,
            read_bytes_per_s=rates["read"],
            write_bytes_per_s=rates["write"],
            mixed_bytes_per_s=rates["mixed"],
            mixing_penalty=mixing_penalty(rates["read"], rates["write"], rates["mixed"]),
        )
        if best is None or _rate(found) > _CLEARLY_BETTER * _rate(best):
            best = found
    if best is None:
        _log.warning("swap: memory.host has no room for the probe of %s; default settings are used", path)
        return None
    _log.info(
        "swap: probed %s once: reads %.2f GB/s, writes %.2f GB/s, block %s, depth %d (kept in %s)",
        path,
        best.read_bytes_per_s / 1e9,
        best.write_bytes_per_s / 1e9,
        format_bytes(best.block),
        best.queue_depth,
        cache_file(),
    )
    return best


def recall(path: str | os.PathLike[str], engine: str) -> DriveProbe | None:
    """What is in the cache for the drive under ``path``, this kernel and ``engine``."""
    entry = _load().get(_key(path, engine))
    if not isinstance(entry, dict):
        return None
    try:
        found = DriveProbe(**entry)
    except TypeError:
        return None
    # A damaged cache must not become a strange setting.
    sane = all(isinstance(value, (int, float)) and value > 0 for key, value in entry.items() if "bytes" in key)
    return found if sane and found.block > 0 and found.block % PAGE == 0 and 0 < found.queue_depth <= 1024 else None


def cache_file() -> Path:
    """Where results are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "offload" / "io.json"


def _rate(drive: DriveProbe) -> float:
    return 3 / (1 / drive.read_bytes_per_s + 1 / drive.write_bytes_per_s + 1 / drive.mixed_bytes_per_s)


def _key(path: str | os.PathLike[str], engine: str) -> str:
    device = os.stat(path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    names = []
    for leaf in ("device/model", "device/serial", "../device/model", "size", "../size"):
        try:
            names.append(Path(f"/sys/dev/block/{number}/{leaf}").read_text().strip())
        except OSError:
            continue
    return " ".join([number, *names, platform.release(), engine])


def _load() -> dict[str, Any]:
    try:
        content = json.loads(cache_file().read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(content, dict) or content.get("version") != _VERSION:
        return {}
    if not isinstance(content.get("drives"), dict):
        return {}
    drives: dict[str, Any] = content["drives"]
    return drives


def _remember(key: str, drive: DriveProbe) -> None:
    path = cache_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"version": _VERSION, "drives": {**_load(), key: asdict(drive)}}, indent=2)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".io.")
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(name, path)
    except OSError as error:
        _log.warning("swap: the probe's result cannot be kept in %s (%s); the next run probes again", path, error)
