"""Whole training steps: our placements and schedules and other systems on one workload, each beside its floor.

Every configuration runs in a fresh process, once a round, rounds interleaved; figures are medians over the rounds of
the median step of a process (its first two steps left out). The floor of a configuration is computed phase by phase
from what was measured in the same rounds: forward and backward of the plain model in memory, memory stream, and the
drive's reads, writes and mixture.
"""

from __future__ import annotations

import json as json_module
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import offload
from offload.build import Blueprint, draw_up
from offload.config import ConfigError, load_config
from offload.models import Llama, parameter_count, presets
from offload.parallel.job import without_launcher
from offload.planner.floors import Floor, Rates, Work, disk_seconds, floor_of
from offload.planner.machine import Disk, rates_of, stream_rate
from offload.planner.work import Course, step_work
from swap.geometry import format_bytes
from swap.measure import Bench, Setting
from swap.tuning import tune

MODEL, TOKENS = "438m", 256
PEERS = ("fsdp2-cpu", "deepspeed-cpu", "deepspeed-nvme")
WARM_STEPS = 2
PLAIN_BYTES = 40
"""Memory traffic of plain AdamW for a parameter: 28 of fp32 states and gradient, 12 of the copies from and to bf16."""
DISK_BYTES = 1 << 30
_TIMEOUT = 900.0
_HYPER = {"lr": 1e-3, "weight_decay": 0.01, "max_grad_norm": 1.0}
_PLACES: Mapping[str, tuple[str, str, str, str]] = {
    "a": ("compact", "host", "host", "nvme"),
    "b": ("compact", "nvme", "nvme", "nvme"),
    "c": ("fp32", "nvme", "host", "nvme"),
}
"""(state format, tiers of parameters, gradients and optimizer states) by the letter of a configuration."""

Run = Callable[[Mapping[str, Any]], dict[str, Any]]


@dataclass(slots=True, kw_only=True)
class Contender:
    """One row: how it runs, and what its processes returned."""

    name: str
    system: str
    micro_batches: int
    config: dict[str, Any] | None = None
    python: str = sys.executable
    found: list[dict[str, Any]] = field(default_factory=list)

    def steps(self) -> list[dict[str, float]]:
        """The steps that count, of all rounds."""
        return [step for run in self.found for step in _settled(run)]

    def disk_bytes(self, verb: str) -> float:
        """Bytes of a step that went from ("read") or to ("write") the disk, medians of processes or of their steps."""
        key = f"disk_{verb}_bytes"
        return statistics.median(
            value for run in self.found for value in ([run[key]] if key in run else [s[key] for s in _settled(run)])
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One row of the report; `binding`: the resource that the floor is made of."""

    name: str
    micro_batches: int
    step_seconds: float
    peak_rss_bytes: int
    disk_read_bytes: int
    disk_write_bytes: int
    floor_seconds: float
    achieved_over_floor: float
    times_plain: float | None
    binding: str | None
    schedule: str | None


def _settled(run: Mapping[str, Any]) -> list[dict[str, float]]:
    steps: list[dict[str, float]] = run["steps"]
    return steps[min(WARM_STEPS, len(steps) - 1) :]


def configuration(letter: str, swap: str, schedule: str, *, activations: str = "auto") -> dict[str, Any]:
    """The configuration of row `letter`, with its swap file under `swap`."""
    fmt, parameters, gradients, optimizer = _PLACES[letter]
    return {
        "device": "cpu",
        "memory": {"nvme_paths": [swap]},
        "placement": {
            "parameters": parameters,
            "gradients": gradients,
            "optimizer": optimizer,
            "activations": activations,
        },
        "precision": {"compute_dtype": "bf16"},
        "optimizer": {**_HYPER, "state_format": fmt},
        "schedule": {"optimizer_step": schedule},
    }


def contenders(
    swap: str,
    micro_batches: Sequence[int],
    *,
    peers: bool,
    peers_python: str,
    recompute: bool,
    only: Sequence[str],
    schedule: str,
) -> list[Contender]:
    """All rows, plain PyTorch first for each number of micro-batches."""
    rows: list[Contender] = []
    for count in micro_batches:
        rows.append(Contender(name=f"plain {count}x", system="plain", micro_batches=count))
        for letter in _PLACES:
            if only and letter not in only:
                continue
            config = configuration(letter, swap, schedule)
            rows.append(
                Contender(name=f"offload ({letter}) {count}x", system="offload", micro_batches=count, config=config)
            )
        if recompute and count > 1 and (not only or "b" in only):
            config = configuration("b", swap, schedule, activations="recompute")
            name = f"offload (b) {count}x recompute"
            rows.append(Contender(name=name, system="offload", micro_batches=count, config=config))
        for system in PEERS if peers else ():
            rows.append(Contender(name=f"{system} {count}x", system=system, micro_batches=count, python=peers_python))
    return rows


def in_process(contender: Contender, spec: Mapping[str, Any]) -> dict[str, Any]:
    """Runs one configuration in a fresh process.

    Raises:
        RuntimeError: it failed; the last line that it said.
    """
    environment = without_launcher(os.environ)
    root = str(Path(offload.__file__).resolve().parent.parent)
    environment["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [environment.get("PYTHONPATH")])])
    # A peer that compiles its operators finds the tools of its environment.
    folder = os.path.dirname(os.path.abspath(contender.python))
    environment["PATH"] = os.pathsep.join([folder, environment.get("PATH", "")])
    command = [contender.python, "-m", "offload.bench.step_worker", json_module.dumps(spec)]
    try:
        done = subprocess.run(
            command, env=environment, cwd=spec["swap"], capture_output=True, text=True, timeout=_TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"not done after {_TIMEOUT:.0f} s") from None
    except OSError as error:
        raise RuntimeError(f"{contender.python}: {error.strerror}") from None
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        said = [line for line in done.stderr.strip().splitlines() if line.strip()]
        raise RuntimeError(said[-1] if said else f"exit status {done.returncode}")
    found: dict[str, Any] = json_module.loads(lines[-1])
    return found


class Machine:
    """Bandwidths measured between the runs: the memory stream and the drive under `swap`."""

    def __init__(self, swap: str, *, disk_bytes: int) -> None:
        tuning = tune([swap])
        self._setting = (
            Setting(engine="auto", block=1 << 20, queue_depth=4)
            if tuning is None
            else Setting(engine="auto", block=tuning.block, queue_depth=tuning.queue_depth)
        )
        self._swap, self._disk_bytes = swap, disk_bytes
        self._streams: list[float] = []
        self._disks: dict[str, list[float]] = {"write": [], "read": [], "mixed": []}

    def measure(self) -> None:
        """One round."""
        self._streams.append(stream_rate())
        with Bench(
            [self._swap], self._setting, nbytes=self._disk_bytes, request=min(16 << 20, self._disk_bytes // 4)
        ) as b:
            for pattern, rates in self._disks.items():
                rates.append(b.run(pattern).bytes_per_s)

    def rates(self) -> Rates:
        """Medians over the rounds."""
        read, write, mixed = (statistics.median(self._disks[p]) for p in ("read", "write", "mixed"))
        disk = Disk(read=read, write=write, mixed=mixed)
        return rates_of(statistics.median(self._streams), disk, 0.0, aliases_host=True)


def draw(config: Mapping[str, Any], model_name: str) -> Blueprint:
    """The plan that a configuration leads to; nothing is allocated."""
    with offload.empty_init():
        model = Llama(presets[model_name])
    return draw_up(model, load_config(dict(config)), None, None)


def course_of(blueprint: Blueprint, micro_batches: int) -> Course:
    """How `train_batch` runs a step of this blueprint."""
    from offload.planner.settings import layer_major, schedule_of

    return Course(
        schedule=schedule_of(blueprint),
        layer_major=layer_major(blueprint, micro_batches),
        micro_batches=micro_batches,
        visits=[[spec.index, *spec.borrows] for spec in blueprint.specs],
        aliases_host=blueprint.device.aliases_host,
    )


def floor_of_row(
    row: Contender, model_name: str, plain: Mapping[str, float], rates: Rates, disk: tuple[float, float]
) -> tuple[Floor, str | None]:
    """The floor of a row, and the schedule that it belongs to. `plain`: seconds of forward and backward in memory;
    `disk`: bytes that the row read and wrote, which is all that is known of the traffic of others.
    """
    work = {
        "forward": Work(compute=plain["forward"]),
        "backward": Work(compute=plain["backward"]),
        "optimizer": Work(kernel=PLAIN_BYTES * parameter_count(presets[model_name])),
    }
    if row.config is None:
        floor = floor_of("barrier", work, rates)
        moving = disk_seconds(rates, *disk)
        return (replace(floor, seconds=max(floor.seconds, moving)) if any(disk) else floor), None
    blueprint = draw(row.config, model_name)
    course = course_of(blueprint, row.micro_batches)
    moved = step_work(blueprint.layouts, blueprint.plan, blueprint.fmt, blueprint.accumulate, course)
    again = plain["forward"] if row.config["placement"]["activations"] == "recompute" else 0.0
    work = {
        "forward": replace(moved["forward"], compute=plain["forward"]),
        "backward": replace(moved["backward"], compute=plain["backward"] + again),
        "optimizer": moved["optimizer"],
    }
    blueprint.device.close()
    return floor_of(course.schedule, work, rates), course.schedule


def measure(
    *,
    model: str = MODEL,
    tokens: int = TOKENS,
    micro_batches: Sequence[int] = (1, 4),
    rounds: int = 3,
    steps: int = 5,
    swap: str | None = None,
    peers: bool = False,
    peers_python: str = sys.executable,
    only: Sequence[str] = (),
    recompute: bool = True,
    schedule: str = "auto",
    disk_bytes: int = DISK_BYTES,
    say: Callable[[str], None] = lambda _line: None,
) -> dict[str, Any]:
    """Measures and returns the report: `results` (see `Result`), `rates`, and `notes` on what did not run.

    Raises:
        ValueError: no such preset, or a number that is too small.
    """
    _check(model, tokens, micro_batches, rounds, steps)
    # Absolute, since the processes that run configurations work in it; Python before 3.12 returns what it was given.
    folder = os.path.abspath(tempfile.mkdtemp(prefix="offload-bench-", dir=swap))
    notes: list[str] = []
    try:
        rows = contenders(
            folder,
            micro_batches,
            peers=peers,
            peers_python=peers_python,
            recompute=recompute,
            only=only,
            schedule=schedule,
        )
        for row in [row for row in rows if row.config is not None]:
            try:
                load_config(dict(row.config or {}))
            except ConfigError as error:
                rows.remove(row)
                notes.append(f"{row.name}: not measured ({error})")
        machine = Machine(folder, disk_bytes=disk_bytes)
        for number in range(rounds):
            machine.measure()
            for row in list(rows):
                spec = {
                    "system": row.system,
                    "model": model,
                    "tokens": tokens,
                    "micro_batches": row.micro_batches,
                    "steps": steps,
                    "swap": folder,
                    "config": row.config,
                }
                try:
                    row.found.append(in_process(row, spec))
                except RuntimeError as error:
                    if row.system == "plain":
                        raise
                    rows.remove(row)
                    notes.append(f"{row.name}: not measured ({error})")
                    continue
                seconds = statistics.median(step["seconds"] for step in _settled(row.found[-1]))
                say(f"round {number + 1}/{rounds}: {row.name}: {seconds:.2f} s")
        rates = machine.rates()
        results = _results(rows, model, rates)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {
        "model": model,
        "parameters": parameter_count(presets[model]),
        "tokens": tokens,
        "rounds": rounds,
        "steps": steps,
        "threads": torch.get_num_threads(),
        "rates": asdict(rates),
        "results": [asdict(result) for result in results],
        "notes": notes,
    }


def _check(model: str, tokens: int, micro_batches: Sequence[int], rounds: int, steps: int) -> None:
    if model not in presets:
        raise ValueError(f"--model {model}: must be one of {', '.join(presets)}")
    if not micro_batches:
        raise ValueError("--micro-batches is empty")
    numbers = {"--rounds": rounds, "--steps": steps, "--micro-batches": min(micro_batches), "--tokens": tokens - 1}
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name} is too small")
    if tokens > presets[model].max_positions:
        raise ValueError(f"--tokens {tokens}: {model} has positions for {presets[model].max_positions}")


def _results(rows: Sequence[Contender], model: str, rates: Rates) -> list[Result]:
    plain: dict[int, dict[str, float]] = {}
    for row in rows:
        if row.system == "plain":
            names = {"forward": "forward_seconds", "backward": "backward_seconds", "step": "seconds"}
            plain[row.micro_batches] = {
                key: statistics.median(step[name] for step in row.steps()) for key, name in names.items()
            }
    found = []
    for row in rows:
        seconds = statistics.median(statistics.median(s["seconds"] for s in _settled(run)) for run in row.found)
        disk = row.disk_bytes("read"), row.disk_bytes("write")
        floor, schedule = floor_of_row(row, model, plain[row.micro_batches], rates, disk)
        found.append(
            Result(
                name=row.name,
                micro_batches=row.micro_batches,
                step_seconds=seconds,
                peak_rss_bytes=max(int(run["peak_rss_bytes"]) for run in row.found),
                disk_read_bytes=int(disk[0]),
                disk_write_bytes=int(disk[1]),
                floor_seconds=floor.seconds,
                achieved_over_floor=floor.seconds / seconds,
                times_plain=seconds / plain[row.micro_batches]["step"],
                binding=floor.binding,
                schedule=schedule,
            )
        )
    return found


def table(report: Mapping[str, Any]) -> str:
    """The report as text, the command included."""
    rates = report["rates"]
    delta = rates["mixing"]
    lines = [
        f"offload bench step --model {report['model']} --tokens {report['tokens']} --rounds {report['rounds']}",
        f"{report['parameters']:,} parameters, {report['threads']} threads; memory stream {rates['stream'] / 1e9:.1f} "
        f"GB/s, disk reads {rates['disk_read'] / 1e9:.2f}, writes {rates['disk_write'] / 1e9:.2f} GB/s, "
        f"delta {delta:.2f}",
        "",
        f"{'':30}{'step s':>8}{'x plain':>9}{'peak RSS':>11}{'read':>11}{'written':>11}{'floor s':>9}"
        f"{'floor/step':>12}  {'bound by':9}schedule",
    ]
    for row in report["results"]:
        lines.append(
            f"{row['name']:30}{row['step_seconds']:>8.2f}{row['times_plain']:>9.2f}"
            f"{format_bytes(row['peak_rss_bytes']):>11}{format_bytes(row['disk_read_bytes']):>11}"
            f"{format_bytes(row['disk_write_bytes']):>11}{row['floor_seconds']:>9.2f}"
            f"{row['achieved_over_floor']:>12.2f}  {row['binding'] or '':9}{row['schedule'] or '-'}"
        )
    return "\n".join([*lines, *report["notes"]])


def run(as_json: bool, **options: Any) -> str:
    """Measures and returns what the command prints: one JSON object, or a table."""
    report = measure(**options)
    return json_module.dumps(report, indent=2) if as_json else table(report)
