"""Bytes through collectives in one optimizer step, as logical payload and on the loopback interface.

With M the bytes of all weights in the compute dtype, which is that of the wire too, and payload counted as ZeRO does (a
gather or a reduce-scatter its full size once, an all-reduce twice):

| stage | per step |
|---|---|
| 0 | 2 M: the gradients' all-reduce |
| 1, 2 | 2 M: the gradients' reduce-scatter, the weights' gather after the update |
| 3 | 3 M: a gather for forward and one for backward, the gradients' reduce-scatter |
| 3, weights kept | 2 M: no gather for backward; among m neighbours, 3 M of which M stays within m ranks |
| hybrid, r groups of s ranks | as without, within a group, and 2 M / s: the all-reduce of each shard of gradients |

On the wire each of g ranks of a group sends (g - 1) / g of a payload. Micro-batches are summed before they are sent in
stages 0 to 2; stage 3 gathers weights for each in batch-major order, and reduces each or their sum by choice.
"""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import offload
from offload.bench import ranks
from offload.models import LlamaConfig
from offload.models.config import parameter_count
from offload.parallel.gather import AGAIN

CATEGORIES = ("parameters", AGAIN, "gradients")
ACCUMULATED = 8
"""Micro-batches of the rows with accumulation."""
_ROUNDS = 2


def formula(
    stage: int, world: int, shard: int, micro: int = 1, *, each: bool = False, kept: bool | int = True
) -> float:
    """Payload of a step and rank in units of M; `each`: every micro-batch is reduced by itself; `kept`:
    `parallel.reshard_after_forward`.
    """
    if world == 1:
        return 0.0
    replicas = 2 / shard if shard < world else 0.0
    if stage == 0:
        return 2.0
    if stage < 3:
        return 1 + (micro if each else 1) + replicas
    gathers = 1 if kept is False else 2
    return gathers * micro + (micro if each else 1) + replicas


def on_wire(payload: dict[str, dict[str, int]], world: int, shard: int, kept: bool | int = True) -> float:
    """Bytes that one rank sends for its payload."""
    total = 0.0
    for name, entry in payload.items():
        # The only all-reduces are those of stage 0, over all ranks, and of shards, over their replicas.
        across = world if shard == world else world // shard
        size = across if name.startswith("all-reduce") else int(kept) if name.endswith(AGAIN) else shard
        total += entry["bytes"] * (size - 1) / size
    return total


def loopback_bytes() -> int:
    """What the loopback interface of this network namespace has received so far."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, values = line.partition(":")
        if name.strip() == "lo":
            return int(values.split()[0])
    raise RuntimeError("there is no loopback interface in /proc/net/dev, so bytes on it cannot be counted")


def one_step(engine: offload.Engine, rank: int, micro: int, index: int) -> None:
    batches = [ranks.batch(rank, micro * index + k) for k in range(micro)]
    engine.train_batch(batches)
    engine.synchronize()


def payload_of(engine: offload.Engine) -> dict[str, dict[str, int]]:
    """What has gone through collectives so far, without small exchanges."""
    if engine.ranks is None:
        return {}
    counted = engine.ranks.counters.snapshot()
    return {name: dict(entry) for name, entry in counted.items() if name.split()[-1] in CATEGORIES}


def measured(
    config: LlamaConfig,
    rank: int,
    world: int,
    *,
    stage: int,
    shard: int,
    micro: int,
    accumulate: str = "auto",
    kept: bool | int = True,
) -> dict[str, Any]:
    """One row: a warm step, then the quietest of a few (others may use the loopback interface too)."""
    wanted = shard if world > 1 else None
    parallel: dict[str, Any] = {"accumulate": accumulate, "reshard_after_forward": kept}
    with ranks.engine_for(config, stage=stage, shard=wanted, parallel=parallel) as engine:
        one_step(engine, rank, micro, 0)
        least, payload = None, {}
        for index in range(1, _ROUNDS + 1):
            before = payload_of(engine)
            ranks.everybodys(None)
            started = loopback_bytes()
            ranks.everybodys(None)
            one_step(engine, rank, micro, index)
            ranks.everybodys(None)
            time.sleep(0.05)
            moved = loopback_bytes() - started
            ranks.everybodys(None)
            least = moved if least is None else min(least, moved)
            payload = {
                name: {kind: value - before.get(name, {}).get(kind, 0) for kind, value in entry.items()}
                for name, entry in payload_of(engine).items()
            }
    size = 2 * parameter_count(config)
    total = sum(entry["bytes"] for entry in payload.values())
    expected = formula(stage, world, shard, micro, each=accumulate == "reduced", kept=kept)
    wire = world * on_wire(payload, world, shard, kept)
    return {
        "stage": stage,
        "shard_size": shard,
        "replicate_size": world // shard,
        "micro_batches": micro,
        "accumulate": accumulate,
        "reshard_after_forward": kept,
        "payload_over_M": round(total / size, 4),
        "formula": round(expected, 4),
        "deviation": round(total / size / expected - 1, 5) if expected else 0.0,
        "by_operation": {name: round(entry["bytes"] / size, 4) for name, entry in payload.items()},
        "loopback_bytes": least,
        "loopback_formula": round(wire),
        "loopback_deviation": round((least or 0) / wire - 1, 5) if wire else 0.0,
    }


def settings(world: int) -> list[dict[str, Any]]:
    """The rows of the table."""
    found: list[dict[str, Any]] = [{"stage": stage, "shard": world, "micro": 1} for stage in range(4)]
    found += [{"stage": stage, "shard": world, "micro": ACCUMULATED} for stage in range(3)]
    found += [{"stage": 3, "shard": world, "micro": ACCUMULATED, "accumulate": how} for how in ("local", "reduced")]
    found += [{"stage": 3, "shard": world, "micro": 1, "kept": False}] if world > 1 else []
    if world % 2 == 0 and world > 2:
        found += [{"stage": 3, "shard": world, "micro": 1, "kept": 2}]
        found += [{"stage": stage, "shard": world // 2, "micro": 1} for stage in (2, 3)]
    return found


def table(rows: list[dict[str, Any]], world: int, config: LlamaConfig) -> str:
    """For people."""
    lines = [
        f"{ranks.describe(config)}; {world} rank{'s' * (world > 1)}; M = {2 * parameter_count(config):,} bytes",
        "| stage | groups | micro-batches | summed | reshard | payload / M | formula | deviation | loopback bytes | "
        "(n-1)/n of it | deviation |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        groups = f"{row['replicate_size']} x {row['shard_size']}"
        lines.append(
            f"| {row['stage']} | {groups} | {row['micro_batches']} | {row['accumulate']} | "
            f"{str(row['reshard_after_forward']).lower()} | {row['payload_over_M']:.3f} | {row['formula']:.3f} | "
            f"{row['deviation']:+.2%} | {row['loopback_bytes']:,} | {row['loopback_formula']:,} | "
            f"{row['loopback_deviation']:+.2%} |"
        )
    return "\n".join(lines)


def _measure(rank: int, world: int, config: LlamaConfig, *, as_json: bool) -> str:
    rows = [measured(config, rank, world, **setting) for setting in settings(world)]
    if not as_json:
        return table(rows, world, config)
    return json.dumps({"world": world, "parameters": parameter_count(config), "rows": rows})


def run(as_json: bool, *, hidden: int, layers: int) -> str | None:
    """The table of this number of ranks, on rank 0."""
    return ranks.run(partial(_measure, as_json=as_json), hidden=hidden, layers=layers)
