"""`offload report RUN`: pictures of a run from what it wrote.

Memory by tier over time, seconds of a step by what it did, and for each resource how much of a step it worked and what
its floor is. From `metrics.jsonl` and `summary.json`; finer where the run has a `trace.json` (`log.trace = true`).
"""

from __future__ import annotations

import base64
import html
import importlib
import io
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offload.config import ConfigError
from offload.telemetry.trace import STEP, TRACKS, WAIT, Span, coincidence, read_trace
from swap.geometry import format_bytes

TIERS = ("device", "host", "nvme")
_RESOURCES = {
    "compute": ("compute", "recompute"),
    "memory": ("optimizer",),
    "disk": ("disk read", "disk write"),
    "host to device": ("host to device",),
    "device to host": ("device to host",),
}
"""The tracks of a trace that make up a resource of a floor."""


@dataclass(slots=True, kw_only=True)
class RunRecord:
    """What a run directory holds: metrics of steps, the summary, and the trace where there is one."""

    path: Path
    steps: list[dict[str, Any]]
    summary: dict[str, Any]
    spans: list[Span] = field(default_factory=list)
    samples: list[tuple[int, dict[str, int]]] = field(default_factory=list)


def read_run(path: str | Path) -> RunRecord:
    """Reads a run directory.

    Raises:
        ConfigError: it is none, holds no finished step, or a file in it is damaged.
    """
    folder = Path(path)
    if not (folder / "metrics.jsonl").is_file():
        raise ConfigError([f"{folder}: not the directory of a run (no metrics.jsonl)"])
    steps = []
    for number, line in enumerate((folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = json.loads(line)
        except ValueError:
            raise ConfigError([f"{folder / 'metrics.jsonl'}, line {number}: not JSON"]) from None
        if "seconds" in record:
            steps.append(record)
    if not steps:
        raise ConfigError([f"{folder}: the run has not finished a step"])
    summary: dict[str, Any] = {}
    if (folder / "summary.json").is_file():
        try:
            summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        except ValueError:
            raise ConfigError([f"{folder / 'summary.json'}: not JSON"]) from None
    found = RunRecord(path=folder, steps=steps, summary=summary)
    if (folder / "trace.json").is_file():
        try:
            found.spans, found.samples = read_trace(folder / "trace.json")
        except ValueError as error:
            raise ConfigError([str(error)]) from None
    return found


def step_seconds(run: RunRecord) -> list[dict[str, float]]:
    """For each step of the trace, seconds of every track in it; "other" is what no thread of ours accounts for."""
    found = []
    begun = iter(sorted((span for span in run.spans if span.track != STEP), key=lambda span: span.begun_ns))
    coming, active = next(begun, None), list[Span]()
    for step in sorted((span for span in run.spans if span.track == STEP), key=lambda span: span.begun_ns):
        while coming is not None and coming.begun_ns < step.ended_ns:
            active.append(coming)
            coming = next(begun, None)
        # What ended before this step began is in no later one, so a step costs what is in it, not the whole trace.
        active = [span for span in active if span.ended_ns > step.begun_ns]
        inside = [
            span._replace(begun_ns=max(span.begun_ns, step.begun_ns), ended_ns=min(span.ended_ns, step.ended_ns))
            for span in active
            if span.begun_ns < step.ended_ns
        ]
        row = {track: 0.0 for track in TRACKS if track != STEP}
        for span in inside:
            row[span.track] += (span.ended_ns - span.begun_ns) / 1e9
        row["step"] = (step.ended_ns - step.begun_ns) / 1e9
        row["other"] = max(0.0, row["step"] - row["compute"] - row[WAIT])
        disk = ("disk read", "disk write")
        _, busy, both = coincidence(inside, ("compute", "optimizer"), disk)
        row["disk"], row["disk beside compute"] = busy, both
        found.append(row)
    return found


def figures(run: RunRecord) -> dict[str, Any]:
    """The numbers behind the pictures, for `--json`."""
    rows = step_seconds(run)
    settled = rows[2:] or rows
    medians = {key: statistics.median(row[key] for row in settled) for key in settled[0]} if settled else {}
    plan = run.summary.get("plan") or {}
    prediction = plan.get("prediction", {})
    seconds = statistics.median(step["seconds"] for step in run.steps[2:] or run.steps)
    floor = prediction.get("floor", {})
    resources = {}
    for name, least in floor.get("resources", {}).items():
        tracks = _RESOURCES.get(name, (name,))
        worked = medians.get("disk") if name == "disk" else sum(medians.get(track, 0.0) for track in tracks)
        resources[name] = {"floor_seconds": least, "busy_seconds": worked if medians else None}
    return {
        "run": str(run.path),
        "steps": len(run.steps),
        "step_seconds": seconds,
        "floor_seconds": floor.get("seconds"),
        "achieved_over_floor": floor["seconds"] / seconds if floor else None,
        "resources": resources,
        "step_seconds_by_track": medians,
        "step_seconds_median_by_phase": run.summary.get("step_seconds_median_by_phase", {}),
        "predicted_against_measured": run.summary.get("predicted_against_measured"),
        "peak_rss_bytes": run.summary.get("peak_rss_bytes"),
    }


def pictures(run: RunRecord) -> dict[str, bytes]:
    """PNG files by name.

    Raises:
        ConfigError: matplotlib is not installed; names the extra that has it.
    """
    try:
        matplotlib: Any = importlib.import_module("matplotlib")
    except ImportError:
        raise ConfigError(
            ["offload report draws with matplotlib (extra `report`), which is not installed: pip install matplotlib"]
        ) from None
    matplotlib.use("Agg")
    plt: Any = importlib.import_module("matplotlib.pyplot")
    found = {}
    for name, draw in (("memory", _draw_memory), ("steps", _draw_steps), ("resources", _draw_resources)):
        figure, axes = plt.subplots(figsize=(9, 3.6), layout="constrained")
        if draw(axes, run):
            data = io.BytesIO()
            figure.savefig(data, format="png", dpi=120)
            found[name] = data.getvalue()
        plt.close(figure)
    return found


def _draw_memory(axes: Any, run: RunRecord) -> bool:
    if run.samples:
        times = [now / 1e9 for now, _ in run.samples]
        rows: Sequence[Mapping[str, int]] = [sizes for _, sizes in run.samples]
        axes.set_xlabel("seconds")
    else:
        known = [step for step in run.steps if "bytes_by_tier" in step]
        times, rows = [step["step"] for step in known], [step["bytes_by_tier"] for step in known]
        axes.set_xlabel("step")
    if not rows:
        return False
    for tier in TIERS:
        values = [row.get(tier, 0) / 1e9 for row in rows]
        if any(values):
            axes.plot(times, values, label=tier, drawstyle="steps-post")
    if not run.samples:
        axes.plot(times, [step.get("rss_bytes", 0) / 1e9 for step in known], label="resident", linestyle=":")
    axes.set_ylabel("GB")
    axes.set_title("memory by tier")
    axes.legend()
    return True


def _draw_steps(axes: Any, run: RunRecord) -> bool:
    rows = step_seconds(run)
    if rows:
        numbers: list[int] = list(range(1, len(rows) + 1))
        bottom = [0.0] * len(rows)
        for name in ("compute", WAIT, "other"):
            values = [row[name] for row in rows]
            axes.bar(numbers, values, bottom=bottom, label={WAIT: "waiting"}.get(name, name))
            bottom = [low + value for low, value in zip(bottom, values, strict=True)]
        axes.plot(numbers, [row["disk"] for row in rows], "k.", label="disk at work")
        axes.plot(numbers, [row["optimizer"] for row in rows], "kx", label="optimizer at work")
    else:
        axes.bar([step["step"] for step in run.steps], [step["seconds"] for step in run.steps], label="step")
    floor = figures(run)["floor_seconds"]
    if floor:
        axes.axhline(floor, color="grey", linestyle="--", label="floor")
    axes.set_xlabel("step")
    axes.set_ylabel("seconds")
    axes.set_title("seconds of a step")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return True


def _draw_resources(axes: Any, run: RunRecord) -> bool:
    found = figures(run)
    names = [name for name, row in found["resources"].items() if row["floor_seconds"] > 0]
    if not names:
        return False
    places = range(len(names))
    floors = [found["resources"][name]["floor_seconds"] / found["step_seconds"] for name in names]
    busy = [(found["resources"][name]["busy_seconds"] or 0.0) / found["step_seconds"] for name in names]
    axes.barh([place + 0.2 for place in places], floors, 0.36, label="floor")
    if any(busy):
        axes.barh([place - 0.2 for place in places], busy, 0.36, label="measured at work")
    axes.axvline(found["achieved_over_floor"], color="grey", linestyle="--", label="floor of the step")
    axes.set_yticks(list(places), names)
    axes.set_xlabel("part of a step")
    axes.set_title(f"achieved/floor {found['achieved_over_floor']:.2f}")
    axes.legend()
    return True


def write_report(run: RunRecord, out: str | Path | None = None) -> list[Path]:
    """Writes `report.html`, which holds all pictures, and one PNG each, into the run directory or `out`."""
    folder = run.path if out is None else Path(out)
    drawn = pictures(run)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, data in drawn.items():
        written.append(folder / f"report_{name}.png")
        written[-1].write_bytes(data)
    written.append(folder / "report.html")
    written[-1].write_text(_page(run, drawn), encoding="utf-8")
    return written


def _page(run: RunRecord, drawn: Mapping[str, bytes]) -> str:
    found = figures(run)
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>offload report</title>",
        "<style>body{font:15px sans-serif;max-width:60em;margin:2em auto}td,th{padding:.2em .8em;text-align:right}"
        "img{max-width:100%}</style>",
        f"<h1>{html.escape(str(run.path))}</h1>",
        f"<p>{found['steps']} steps, {found['step_seconds']:.3f} s each"
        + (f", floor/step {found['achieved_over_floor']:.2f}" if found["achieved_over_floor"] else "")
        + (f", peak resident memory {format_bytes(found['peak_rss_bytes'])}" if found["peak_rss_bytes"] else "")
        + "</p>",
    ]
    parts += [
        f"<img alt='{name}' src='data:image/png;base64,{base64.b64encode(data).decode()}'>"
        for name, data in drawn.items()
    ]
    if found["predicted_against_measured"]:
        parts.append("<table><tr><th></th><th>predicted</th><th>measured</th></tr>")
        for name, row in found["predicted_against_measured"].items():
            cells = [
                f"{value:.3f} s" if name == "step_seconds" else format_bytes(int(value))
                for value in (row["predicted"], row["measured"])
            ]
            parts.append(f"<tr><th>{html.escape(name)}</th><td>{cells[0]}</td><td>{cells[1]}</td></tr>")
        parts.append("</table>")
    if not run.spans:
        parts.append("<p>With <code>log.trace=true</code> a run also shows what its resources did within a step.</p>")
    return "\n".join([*parts, "</html>"])
