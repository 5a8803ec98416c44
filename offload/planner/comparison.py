"""A prediction beside what a run measured."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.config import Config
from offload.parallel.job import without_launcher
from offload.telemetry import peak_rss_bytes
from swap.geometry import format_bytes

if TYPE_CHECKING:
    from offload.engine import Engine

COMPARED_STEPS = 5
"""Steps after which a run is compared with its plan; the first two are left out: caches fill, pipelines start."""

_TIMEOUT = 180.0


def plan_apart(config: str | Path, overrides: Sequence[str]) -> dict[str, Any] | str:
    """`offload plan CONFIG --json` in a process of its own, or a line that says why there is none.

    In this process the planner would leave behind what it loads, and memory is one of the things to compare.
    """
    root = str(Path(__file__).resolve().parents[2])
    environment = without_launcher(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [environment.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "offload", "plan", str(config), *overrides, "--json"]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
        if done.returncode == 0:
            found: dict[str, Any] = json.loads(done.stdout)
            return found
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"exit status {done.returncode}"


def compare(
    plan: Mapping[str, Any],
    *,
    seconds: Sequence[float],
    disk_read: Sequence[int],
    disk_write: Sequence[int],
    memory: Mapping[str, Mapping[str, int]],
    peak_rss: int,
) -> dict[str, dict[str, float]]:
    """`{quantity: {predicted, measured}}` from what was measured step by step, and the peak bytes by tier and kind."""
    settled = slice(min(2, len(seconds) - 1), None)
    prediction = plan["prediction"]
    found = {
        "step_seconds": (prediction["seconds"], statistics.median(seconds[settled])),
        "disk_read_bytes": (prediction["disk_read"], statistics.median(disk_read[settled])),
        "disk_write_bytes": (prediction["disk_write"], statistics.median(disk_write[settled])),
        "peak_rss_bytes": (prediction["peak_rss"], peak_rss),
    }
    for tier, kinds in plan["planned"].items():
        found[f"{tier}_bytes"] = (sum(kinds.values()), sum(memory.get(tier, {}).values()))
    return {name: {"predicted": predicted, "measured": measured} for name, (predicted, measured) in found.items()}


def comparison_lines(comparison: Mapping[str, Mapping[str, float]]) -> list[str]:
    """The comparison for people; quantities that are zero both ways are left out."""
    lines = [f"{'':20}{'predicted':>12}{'measured':>12}"]
    for name, row in comparison.items():
        predicted, measured = row["predicted"], row["measured"]
        if not predicted and not measured:
            continue
        cells = [f"{v:.2f} s" if name == "step_seconds" else format_bytes(int(v)) for v in (predicted, measured)]
        off = f"{100 * (predicted / measured - 1):+.0f} %" if measured else ""
        label = name.removesuffix("_bytes").replace("_seconds", "").replace("_", " ")
        lines.append(f"{label:20}{cells[0]:>12}{cells[1]:>12}{off:>8}")
    return lines


class RunComparison:
    """The plan of a run, and what its first steps measured. Does nothing where `config.log.predict` is off or a run is
    shorter than `COMPARED_STEPS`.
    """

    def __init__(self, config: Config, say: Callable[[str], None]) -> None:
        self.plan: dict[str, Any] | None = None
        self.measured: dict[str, dict[str, float]] | None = None
        self._config, self._say = config, say
        self._reason: str | None = None
        self._seconds: list[float] = []
        self._moved: list[tuple[int, int]] = []

    @property
    def wanted(self) -> bool:
        """Whether there is something to predict."""
        return self._config.log.predict and self._config.train.steps >= COMPARED_STEPS

    def predict(self, config_file: Path, nvme_paths: Sequence[str]) -> None:
        """Plans the run of `config_file`, in a process of its own."""
        if not self.wanted:
            return
        paths = json.dumps(list(nvme_paths))
        found = plan_apart(config_file, [f"memory.nvme_paths={paths}"])
        if isinstance(found, str):
            self._reason = found.removeprefix("error: ")
        else:
            self.plan = found

    def say_why_not(self) -> None:
        """Says why there is no prediction, once the run is set up: before, what failed the plan may fail the run."""
        if self._reason is not None:
            self._say(f"no prediction: {self._reason}")

    def note(self, seconds: float, moved: Mapping[str, int], engine: Engine) -> None:
        """A step is over; `moved` is what it counted. After the last compared one the comparison is shown."""
        if self.plan is None or self.measured is not None:
            return
        self._seconds.append(seconds)
        self._moved.append((moved["nvme_read_bytes"], moved["nvme_write_bytes"]))
        if len(self._seconds) < COMPARED_STEPS:
            return
        self.measured = compare(
            self.plan,
            seconds=self._seconds,
            disk_read=[read for read, _ in self._moved],
            disk_write=[written for _, written in self._moved],
            memory=engine.memory().peak,
            peak_rss=peak_rss_bytes(),
        )
        for line in comparison_lines(self.measured):
            self._say(line)

    def summary(self) -> dict[str, Any]:
        """For `summary.json`: the plan, and predicted against measured."""
        return {"plan": self.plan, "predicted_against_measured": self.measured}
