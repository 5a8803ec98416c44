"""What the measurements on several ranks share: the launcher's ranks, a small model, an engine for one setting.

A command runs alone too, as one rank of one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # ahead of any group: its functions' defaults would keep that one for ever

import offload
from offload.models import Llama, LlamaConfig
from offload.models.config import parameter_count

TIMEOUT = 300.0
TOKENS = 16
"""Of one micro-batch: what is measured does not depend on it."""


def model_config(hidden: int, layers: int) -> LlamaConfig:
    """A Llama over bytes; with the defaults of the commands 19 million parameters."""
    return LlamaConfig(vocab_size=256, hidden_size=hidden, layers=layers, heads=8, max_positions=64)


@contextmanager
def joined() -> Iterator[tuple[int, int]]:
    """(rank, world) of the launcher's ranks, connected over gloo for as long as the context lasts."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(1)
    if world < 2:
        yield 0, 1
        return
    if dist.is_initialized():
        yield dist.get_rank(), dist.get_world_size()
        return
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    try:
        yield dist.get_rank(), world
    finally:
        dist.destroy_process_group()


def everybodys(value: Any) -> list[Any]:
    """`value` of every rank."""
    if not dist.is_initialized():
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


@contextmanager
def engine_for(
    config: LlamaConfig, *, stage: int, shard: int | None = None, parallel: Mapping[str, Any] | None = None
) -> Iterator[offload.Engine]:
    """bf16 weights and gradients, also on the wire, fp32 states (12 bytes a parameter), everything in host memory."""
    with offload.empty_init():
        model = Llama(config)
    settings: dict[str, Any] = {"stage": stage, "timeout": TIMEOUT, "verify_every": 0, "place_ranks": False}
    settings.update(parallel or {})
    if shard is not None:
        settings["shard_size"] = shard
    with offload.initialize(
        model,
        {
            "device": "cpu",
            "placement": dict.fromkeys(("parameters", "gradients", "optimizer"), "host"),
            "precision": {"compute_dtype": "bf16", "reduce_dtype": "bf16"},
            "optimizer": {"state_format": "fp32"},
            "schedule": {"optimizer_step": "barrier", "micro_batch_order": "batch_major"},
            "parallel": settings,
        },
    ) as engine:
        yield engine


def batch(rank: int, index: int = 0) -> dict[str, torch.Tensor]:
    """One micro-batch."""
    generator = torch.Generator().manual_seed(1000 * index + rank)
    ids = torch.randint(0, 256, (1, TOKENS), generator=generator)
    return {"input_ids": ids, "labels": ids}


def run(measure: Callable[[int, int, LlamaConfig], str], *, hidden: int, layers: int) -> str | None:
    """`measure(rank, world, model)` on every rank; what it gives on rank 0.

    Raises:
        ValueError: sizes that no model can have.
    """
    config = model_config(hidden, layers)
    with joined() as (rank, world):
        text = measure(rank, world, config)
        return text if rank == 0 else None


def describe(config: LlamaConfig) -> str:
    """The model in a line."""
    return f"Llama of {parameter_count(config):,} parameters, {config.layers} blocks of width {config.hidden_size}"
