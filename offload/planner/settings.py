"""What the settings that say "auto" come to for one blueprint, as the engine decides it."""

from __future__ import annotations

from offload.build import Blueprint
from offload.schedule.activations import activation_room
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
    order = blueprint.config.schedule.micro_batch_order
    if micro_batches < 2 or order == "batch_major":
        return False
    return order == "layer_major" or brings_weights(blueprint)


def activations_of(blueprint: Blueprint, kept: int) -> str:
    """`keep`, `recompute`, `host` or `nvme`; `kept`: bytes of activations that all micro-batches alive at once keep."""
    wanted = blueprint.config.placement.activations
    if wanted == "auto":
        return "recompute" if kept > activation_room(blueprint) else "keep"
    return "keep" if wanted == "device" else wanted
