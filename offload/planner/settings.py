"""What the settings that say "auto" come to for one blueprint, as the engine decides it."""

from __future__ import annotations

import importlib
from typing import Any

from offload.build import Blueprint
from offload.schedule.choice import choose_schedule
from offload.tiers import Tier


def schedule_of(blueprint: Blueprint) -> str:
    """`barrier`, `deferred` or `eager`."""
    return choose_schedule(blueprint).name


def brings_weights(blueprint: Blueprint) -> bool:
    """Whether any unit's weights have to come to the device for each use."""
    aliases = blueprint.device.aliases_host
    return any(
        places.weight is Tier.NVME or (places.weight is Tier.HOST and not aliases)
        for places in blueprint.plan.flats.values()
    )


def layer_major(blueprint: Blueprint, micro_batches: int) -> bool:
    """Whether `train_batch` runs its micro-batches unit by unit."""
    try:
        orders: Any = importlib.import_module("offload.schedule.micro_batches")
    except ModuleNotFoundError:
        return False
    order = blueprint.config.schedule.micro_batch_order
    return bool(orders.choose_order(order, loads=brings_weights(blueprint), count=micro_batches) == "layer_major")


def recompute_of(blueprint: Blueprint) -> bool:
    """Whether forward runs again in backward."""
    return blueprint.config.placement.activations == "recompute"
