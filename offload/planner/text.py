"""A plan for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swap.geometry import format_bytes


def plan_text(plan: Mapping[str, Any]) -> str:
    """The JSON object of a plan as text."""
    return "\n".join([*_memory(plan), "", *_step(plan), "", *_changes(plan)])


def _memory(plan: Mapping[str, Any]) -> list[str]:
    lines = [
        f"{plan['parameters']:,} parameters; {plan['micro_batches']} x {plan['tokens']:,} tokens a step, "
        f"{plan['order']}, activations: {plan['activations']}, optimizer step: {plan['schedule']}",
        "",
        f"{'tier':10}{'in use':>12}{'budget':>12}{'smallest':>12}",
    ]
    for tier, kinds in plan["planned"].items():
        total, limit, smallest = sum(kinds.values()), plan["limits"][tier], plan["smallest"][tier]
        parts = ", ".join(f"{kind} {format_bytes(n)}" for kind, n in kinds.items())
        cells = [format_bytes(total), "-" if limit is None else format_bytes(limit)]
        cells.append("-" if smallest is None else format_bytes(smallest))
        lines.append(f"{tier:10}" + "".join(f"{cell:>12}" for cell in cells) + f"  {parts}")
    prediction, peaks = plan["prediction"], plan["peaks"]
    lines.append(f"{'workspace':10}{format_bytes(prediction['workspace']):>12}")
    lines.append(
        f"resident at most: {format_bytes(peaks['setup'])} at set-up, {format_bytes(peaks['step'])} in steps, "
        f"{format_bytes(peaks['checkpoint'])} while a checkpoint is written"
    )
    return lines


def _step(plan: Mapping[str, Any]) -> list[str]:
    prediction, speeds = plan["prediction"], plan["speeds"]
    lines = [
        f"step {prediction['seconds']:.2f} s: "
        + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in prediction["phases"].items()),
        f"bound by {prediction['binding']}; by itself each resource works "
        + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in prediction["resources"].items() if seconds > 0.0005),
        f"floor {prediction['floor']['seconds']:.2f} s, floor/step {prediction['achieved_over_floor']:.2f}",
        f"disk: reads {format_bytes(prediction['disk_read'])}, writes {format_bytes(prediction['disk_write'])} a step"
        + (f"; the drive's endurance is {plan['endurance_steps']:,} steps" if plan["endurance_steps"] else ""),
        f"measured: memory {speeds['stream_bytes_per_s'] / 1e9:.1f} GB/s, matrix products "
        f"{speeds['gemm_flops_per_s'] / 1e9:,.0f} GFLOP/s, optimizer {speeds['kernel_parameters_per_s'] / 1e6:,.0f} M "
        "parameters/s",
    ]
    if speeds["disk_read_bytes_per_s"]:
        lines[-1] += (
            f", disk reads {speeds['disk_read_bytes_per_s'] / 1e9:.2f} and writes "
            f"{speeds['disk_write_bytes_per_s'] / 1e9:.2f} GB/s, delta {speeds['disk_mixing_penalty']:.2f}"
        )
        lines.append(
            f"beside each other: matrix products take {speeds['compute_beside_disk']:.2f} times as long, the disk "
            f"{speeds['disk_beside_compute']:.2f} times"
        )
    return lines


def _changes(plan: Mapping[str, Any]) -> list[str]:
    if not plan["changes"]:
        return ["no single change would make a step faster"]
    lines = ["what would help, seconds per token relative to this plan:"]
    for change in plan["changes"]:
        lines.append(
            f"  {change['relative_seconds']:.2f}  {change['what']} ({change['key']}); resident at most "
            f"{format_bytes(change['peak_rss'])}, then bound by {change['binding']}"
        )
    return lines
