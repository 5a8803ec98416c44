"""Bytes per parameter that a rank holds between the last backward and `step()`, counted from the tensors there are.

ZeRO's arithmetic (Rajbhandari et al., 2020) with bf16 weights and gradients and 12 bytes of fp32 states, on n ranks:

| stage | weights | gradients | states |
|---|---|---|---|
| 0 | 2 | 2 | 12 |
| 1 | 2 | 2 | 12 / n |
| 2 | 2 | 2 / n | 12 / n |
| 3 | 2 / n | 2 / n | 12 / n |

Every tensor that Python knows of is looked at, by the memory that it is in, whatever the engine says of it. What lies
in a plane is counted under the plane's kind, all else under `transient`: staging, messages, batches.
"""

from __future__ import annotations

import gc
import json
import warnings
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

import offload
from offload.bench import ranks
from offload.models import LlamaConfig
from offload.models.config import parameter_count

KINDS = ("weights", "gradients", "states")
_STATES = 12
Range = tuple[int, int]


def formula(stage: int, world: int) -> dict[str, float]:
    """Bytes per parameter by kind."""
    return {
        "weights": 2 / (world if stage >= 3 else 1),
        "gradients": 2 / (world if stage >= 2 else 1),
        "states": _STATES / (world if stage >= 1 else 1),
    }


def live_ranges() -> list[Range]:
    """The addresses of the host memory of all tensors, each byte once, ascending."""
    found = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for candidate in gc.get_objects():
            if not issubclass(type(candidate), torch.Tensor) or candidate.device.type != "cpu":
                continue
            storage = candidate.untyped_storage()
            if storage.nbytes():
                found.add((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
    return merged(found)


def merged(ranges: Iterable[Range]) -> list[Range]:
    """Their union."""
    union: list[Range] = []
    for lo, hi in sorted(ranges):
        if union and lo <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], hi))
        else:
            union.append((lo, hi))
    return union


def common(a: list[Range], b: list[Range]) -> int:
    """Bytes in both unions."""
    total, i, j = 0, 0, 0
    while i < len(a) and j < len(b):
        total += max(0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total


def planes_of(engine: offload.Engine) -> dict[str, list[Range]]:
    """The addresses of the planes by kind."""
    found: dict[str, set[Range]] = {kind: set() for kind in KINDS}
    for state in engine._states.values():
        planes = {"weights": [state.weight], "states": list(state.planes.values()), "gradients": []}
        for gradients in (state.local, state.gradients):
            if gradients is not None:
                planes["gradients"].extend(gradients.planes())
        for kind, members in planes.items():
            for plane in members:
                if plane.tensor is not None and plane.tensor.numel():
                    start = plane.tensor.data_ptr()
                    found[kind].add((start, start + plane.tensor.nbytes))
    return {kind: merged(ranges) for kind, ranges in found.items()}


def count(engine: offload.Engine, before: int) -> dict[str, int]:
    """Bytes by kind; `before`: of the tensors that there were without the engine."""
    gc.collect()
    live = live_ranges()
    planes = planes_of(engine)
    found = {kind: common(live, ranges) for kind, ranges in planes.items()}
    found["transient"] = max(0, sum(hi - lo for lo, hi in live) - sum(found.values()) - before)
    return found


def measured(config: LlamaConfig, *, rank: int, stage: int) -> dict[str, int]:
    """This rank's bytes in one stage, between the backward of its second step and `step()`."""
    gc.collect()
    before = sum(hi - lo for lo, hi in live_ranges())
    with ranks.engine_for(config, stage=stage) as engine:
        for index in range(2):
            loss = engine(**ranks.batch(rank, index)).loss
            engine.backward(loss)
            del loss
            if index == 0:
                engine.step()
        if stage >= 2:
            engine._reduce()  # what is on its way to other ranks arrives
        engine._residency.settle()
        for state in engine._states.values():
            if state.local is not None:
                state.local.settle_all()
        return count(engine, before)


def rows(rank: int, world: int, config: LlamaConfig) -> list[dict[str, Any]]:
    """One row a stage; of every kind the largest of all ranks."""
    parameters = parameter_count(config)
    found = []
    for stage in range(4):
        everybodys = ranks.everybodys(measured(config, rank=rank, stage=stage))
        most = {kind: max(of_rank[kind] for of_rank in everybodys) / parameters for kind in everybodys[0]}
        expected = formula(stage, world)
        total, wanted = sum(most[kind] for kind in KINDS), sum(expected.values())
        row = {
            "stage": stage,
            "bytes_per_parameter": {kind: round(most[kind], 4) for kind in KINDS},
            "total": round(total, 4),
            "formula": round(wanted, 4),
            "deviation": round(total / wanted - 1, 5),
            "transient_bytes_per_parameter": round(most["transient"], 4),
        }
        found.append(row)
    return found


def table(found: list[dict[str, Any]], world: int, config: LlamaConfig) -> str:
    """For people."""
    lines = [
        f"{ranks.describe(config)}; {world} rank{'s' * (world > 1)}; bytes per parameter and rank",
        "| stage | weights | gradients | states | sum | formula | deviation | transient |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in found:
        kinds = " | ".join(f"{row['bytes_per_parameter'][kind]:.3f}" for kind in KINDS)
        lines.append(
            f"| {row['stage']} | {kinds} | {row['total']:.3f} | {row['formula']:.3f} | {row['deviation']:+.2%} | "
            f"{row['transient_bytes_per_parameter']:.3f} |"
        )
    return "\n".join(lines)


def _measure(rank: int, world: int, config: LlamaConfig, *, as_json: bool) -> str:
    found = rows(rank, world, config)
    if not as_json:
        return table(found, world, config)
    return json.dumps({"world": world, "parameters": parameter_count(config), "stages": found})


def run(as_json: bool, *, hidden: int, layers: int) -> str | None:
    """The table of this number of ranks, on rank 0."""
    return ranks.run(partial(_measure, as_json=as_json), hidden=hidden, layers=layers)
