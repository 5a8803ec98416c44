"""``offload bench io``: what the drives under some paths do, with which settings of ``[swap]``, and what fio gets."""

from __future__ import annotations

import json as json_module
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from offload.bench import fio
from offload.machine import free_disk
from swap.engines import ENGINES
from swap.geometry import align_up, format_bytes
from swap.measure import PATTERNS, Bench, Rate, Setting, mixing_penalty
from swap.native import probe_io_uring

DEFAULT_BYTES = 4 << 30
SWEEP_BYTES = 512 << 20
SWEEP_SECONDS = 1.0
GRID = ((1 << 20, 4), (1 << 20, 16), (4 << 20, 8))
"""(block, queue depth) that are tried: bytes in flight from 4 to 32 MiB."""
_AS_FAST = 0.9
QUICK_GRID = ((1 << 20, 8),)

Say = Callable[[str], None]
Figures = dict[str, float]


def run(
    paths: Sequence[str],
    *,
    nbytes: int = DEFAULT_BYTES,
    rounds: int = 1,
    engines: Sequence[str] = (),
    with_fio: bool = True,
    quick: bool = False,
    request: int | None = None,
    checksum: bool = False,
    as_json: bool = False,
    say: Say = lambda line: None,
) -> str:
    """Measure and return what the command prints: one JSON object, or a table."""
    report = measure(
        paths,
        nbytes=nbytes,
        rounds=rounds,
        engines=engines,
        with_fio=with_fio,
        quick=quick,
        request=request,
        checksum=checksum,
        say=say,
    )
    return json_module.dumps(report, indent=2) if as_json else table(report)


def measure(
    paths: Sequence[str],
    *,
    nbytes: int,
    rounds: int,
    engines: Sequence[str],
    with_fio: bool,
    quick: bool,
    request: int | None,
    checksum: bool,
    say: Say,
) -> dict[str, Any]:
    """The report as a dict: sweep of engines and settings, then the best one over ``nbytes``, in turn with fio.

    ``rounds``: repetitions of the last part, of which the medians count. ValueError if the disks lack the space.
    """
    have_fio = with_fio and fio.available() is not None
    needed = nbytes * (2 if have_fio else 1)
    free = free_disk(paths)
    if needed > free:
        raise ValueError(
            f"the measurement needs {format_bytes(needed)} but {', '.join(paths)} has {format_bytes(free)} free: "
            "lower --bytes"
        )
    notes: list[str] = []
    probe = probe_io_uring()
    if not probe.usable:
        notes.append(f"io_uring: {probe.text}")
    names = [name for name in (engines or ENGINES) if name != "io_uring" or probe.usable]
    if not names:
        raise ValueError(f"none of the engines asked for works here: {'; '.join(notes)}")
    sweep = min(nbytes, SWEEP_BYTES)
    grid = QUICK_GRID if quick else GRID
    swept = {}
    for name in names:
        for block, depth in grid:
            setting = Setting(engine=name, block=block, queue_depth=depth)
            swept[setting] = _sweep(paths, setting, sweep, request)
            say(f"{setting}: {_text(swept[setting])}")
    best_of = {name: max((s for s in swept if s.engine == name), key=lambda s: _score(swept[s])) for name in names}
    best = _best(list(best_of.values()), swept)
    with _Peer(paths, nbytes, sweep, grid, direct=True, say=say) if have_fio else _NoPeer() as peer:
        say(f"{rounds} x {format_bytes(nbytes)} with {best}")
        ours, theirs = _final(paths, best, nbytes, rounds, request, checksum, peer, say)
    if any(rate.cliff for rates in ours.values() for rate in rates):
        slow = sorted({p for p, rates in ours.items() for rate in rates if rate.cliff})
        notes.append(f"{', '.join(slow)}: the last quarter was much slower than the first: the drive's cache ran full")
    report: dict[str, Any] = {
        "paths": list(paths),
        "bytes": nbytes,
        "rounds": rounds,
        **_figures({p: [r.bytes_per_s for r in rates] for p, rates in ours.items()}),
        "cpu_seconds_per_gb": statistics.mean(
            statistics.median(r.cpu_seconds_per_gb for r in rates) for rates in ours.values()
        ),
        "cpu_seconds_per_gb_by_pattern": {
            p: statistics.median(r.cpu_seconds_per_gb for r in rates) for p, rates in ours.items()
        },
        "best": {"engine": best.engine, "block": best.block, "queue_depth": best.queue_depth},
        "engines": {name: _engine_row(setting, swept[setting]) for name, setting in best_of.items()},
        "fio": None if theirs is None else theirs,
        "notes": notes,
    }
    if theirs is not None:
        report["ratio_to_fio"] = {
            p: report[f"{p}_bytes_per_s"] / theirs[f"{p}_bytes_per_s"] for p in ("read", "write", "mixed")
        }
    report["toml"] = toml(report)
    return report


def _sweep(paths: Sequence[str], setting: Setting, nbytes: int, request: int | None) -> dict[str, Rate]:
    with Bench(paths, setting, nbytes=nbytes, request=request) as bench:
        bench.run("write")  # real blocks first: fresh ones cost the file system more
        return {pattern: bench.run(pattern, seconds=SWEEP_SECONDS) for pattern in PATTERNS}


def _final(
    paths: Sequence[str],
    best: Setting,
    nbytes: int,
    rounds: int,
    request: int | None,
    checksum: bool,
    peer: _Peer | _NoPeer,
    say: Say,
) -> tuple[dict[str, list[Rate]], dict[str, Any] | None]:
    """(our rates, fio's figures), pattern by pattern in turn, so that both see the same weather."""
    ours: dict[str, list[Rate]] = {pattern: [] for pattern in PATTERNS}
    theirs: dict[str, list[fio.FioRate]] = {pattern: [] for pattern in PATTERNS}
    with Bench(paths, best, nbytes=nbytes, request=request, checksum=checksum) as bench:
        bench.run("write")
        for number in range(rounds):
            for pattern in PATTERNS:
                # Who goes first changes every round.
                for side in (0, 1) if number % 2 == 0 else (1, 0):
                    if side == 0:
                        ours[pattern].append(bench.run(pattern))
                    elif isinstance(peer, _Peer):
                        theirs[pattern].append(peer.run(pattern))
                say(
                    f"  {pattern}: {ours[pattern][-1].bytes_per_s / 1e9:.2f} GB/s"
                    + (f", fio {theirs[pattern][-1].bytes_per_s / 1e9:.2f} GB/s" if theirs[pattern] else "")
                )
    if not isinstance(peer, _Peer):
        return ours, None
    figures: dict[str, Any] = _figures({p: [r.bytes_per_s for r in rates] for p, rates in theirs.items()})
    by_pattern = {p: statistics.median(r.cpu_seconds_per_gb for r in rates) for p, rates in theirs.items()}
    figures["cpu_seconds_per_gb"] = statistics.mean(by_pattern.values())
    figures["cpu_seconds_per_gb_by_pattern"] = by_pattern
    figures["settings"] = {"ioengine": peer.ioengine, "block": peer.block, "queue_depth": peer.depth}
    return ours, figures


class _NoPeer:
    """fio is not there, or was not asked for."""

    def __enter__(self) -> _NoPeer:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


class _Peer:
    """fio with the best of its own sweep, on files of the same size."""

    def __init__(
        self,
        paths: Sequence[str],
        nbytes: int,
        sweep: int,
        grid: Sequence[tuple[int, int]],
        *,
        direct: bool,
        say: Say,
    ) -> None:
        self._paths, self._nbytes, self._sweep, self._grid = paths, nbytes, sweep, grid
        self._direct, self._say = direct, say
        self.ioengine = fio.engine()
        self.block, self.depth = grid[0]

    def __enter__(self) -> _Peer:
        self._context = fio.files(self._paths)
        self._files = self._context.__enter__()
        try:
            self._find_best()
        except BaseException as error:
            self._context.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._context.__exit__(None, None, None)

    def run(self, pattern: str) -> fio.FioRate:
        return self._run(pattern, self.block, self.depth, self._nbytes, None)

    def _find_best(self) -> None:
        first = self._grid[0]
        try:
            self._run("write", *first, self._nbytes, None)
        except fio.FioError:
            if not self._direct:
                raise
            self._direct = False
            self._run("write", *first, self._nbytes, None)
        rates = {}
        for block, depth in self._grid:
            found = {p: self._run(p, block, depth, self._sweep, SWEEP_SECONDS).bytes_per_s for p in PATTERNS}
            rates[block, depth] = 3 / sum(1 / rate for rate in found.values())
            self._say(f"fio {self.ioengine}, block {format_bytes(block)}, depth {depth}: {_text(found)}")
        self.block, self.depth = max(rates, key=lambda key: rates[key])

    def _run(self, pattern: str, block: int, depth: int, nbytes: int, seconds: float | None) -> fio.FioRate:
        share = align_up(nbytes, len(self._files) * block)
        return fio.run(
            self._files,
            pattern,
            ioengine=self.ioengine,
            block=block,
            depth=depth,
            nbytes=share,
            seconds=seconds,
            direct=self._direct,
        )


def _best(settings: Sequence[Setting], swept: dict[Setting, dict[str, Rate]]) -> Setting:
    """The fastest; of those that are as fast to within the noise, the one that takes least processor time."""
    top = max(_score(swept[setting]) for setting in settings)
    fast = [setting for setting in settings if _score(swept[setting]) > _AS_FAST * top]
    return min(fast, key=lambda setting: sum(rate.cpu_seconds_per_gb for rate in swept[setting].values()))


def _score(rates: dict[str, Rate]) -> float:
    """Bytes per second over equal parts of all patterns."""
    return len(rates) / sum(1 / rate.bytes_per_s for rate in rates.values())


def _figures(rates: dict[str, list[float]]) -> Figures:
    medians = {pattern: statistics.median(values) for pattern, values in rates.items()}
    return {
        **{f"{pattern}_bytes_per_s": medians[pattern] for pattern in ("read", "write", "mixed")},
        "mixing_penalty": mixing_penalty(medians["read"], medians["write"], medians["mixed"]),
    }


def _engine_row(setting: Setting, rates: dict[str, Rate]) -> dict[str, Any]:
    return {
        "block": setting.block,
        "queue_depth": setting.queue_depth,
        **_figures({pattern: [rate.bytes_per_s] for pattern, rate in rates.items()}),
        "cpu_seconds_per_gb": statistics.mean(rate.cpu_seconds_per_gb for rate in rates.values()),
    }


def _text(rates: dict[str, Rate] | dict[str, float]) -> str:
    def value(pattern: str) -> float:
        rate = rates[pattern]
        return (rate.bytes_per_s if isinstance(rate, Rate) else rate) / 1e9

    return ", ".join(f"{pattern} {value(pattern):.2f}" for pattern in ("read", "write", "mixed")) + " GB/s"


def toml(report: dict[str, Any]) -> str:
    """The section to paste into a configuration."""
    best = report["best"]
    return (
        f'[swap]\nengine = "{best["engine"]}"\nblock = "{format_bytes(best["block"]).replace(" ", "")}"\n'
        f"queue_depth = {best['queue_depth']}"
    )


def table(report: dict[str, Any]) -> str:
    """The report as text."""
    lines = [
        f"{', '.join(report['paths'])}: {format_bytes(report['bytes'])}, median of {report['rounds']}",
        "",
        f"{'':22}{'read':>9}{'write':>9}{'mixed':>9}{'delta':>8}{'CPU s/GB':>10}",
    ]

    def row(name: str, figures: dict[str, Any]) -> str:
        rates = "".join(f"{figures[f'{pattern}_bytes_per_s'] / 1e9:>9.2f}" for pattern in ("read", "write", "mixed"))
        return f"{name:22}{rates}{figures['mixing_penalty']:>8.2f}{figures['cpu_seconds_per_gb']:>10.3f}"

    lines += [row(f"  {name} (sweep)", figures) for name, figures in report["engines"].items()]
    lines.append(row("offload, GB/s", report))
    if report["fio"] is not None:
        lines.append(row("fio, GB/s", report["fio"]))
        ratios = report["ratio_to_fio"]
        lines.append(f"{'offload / fio':22}" + "".join(f"{ratios[p]:>9.2f}" for p in ("read", "write", "mixed")))
    else:
        lines.append("fio did not run (not installed, or switched off)")
    return "\n".join([*lines, *report["notes"], "", report["toml"]])
