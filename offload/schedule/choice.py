"""Which schedule the optimizer step of an engine follows, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from offload.config import Config, ConfigError
from offload.config.checks import eager_waits
from offload.config.schema import OptimizerConfig
from offload.layout import UnitLayout
from offload.tiers import Tier

if TYPE_CHECKING:
    from offload.build import Blueprint


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """`name`: "barrier", "deferred" or "eager"; `reason`: one clause for people.

    `barrier` carries an update out within `step()`. `deferred` decides it there and carries it out just ahead of the
    next use of each unit. `eager` does the same, and within `train_batch` updates a unit as soon as its gradients are
    final.
    """

    name: str
    reason: str

    @property
    def waits(self) -> bool:
        """Whether `step()` returns only when everything is updated."""
        return self.name == "barrier"


def needs_norm(settings: OptimizerConfig, layouts: Sequence[UnitLayout]) -> str | None:
    """Which setting makes an update wait for all gradients, if one does."""
    if settings.max_grad_norm is not None:
        return f"optimizer.max_grad_norm = {settings.max_grad_norm:g}"
    flats = [flat for unit in layouts for flat in unit.flats]
    if any(flat.trainable_end and flat.dtype == torch.float16 for flat in flats):
        return "fp16 with its loss scale"
    if settings.check_finite:
        return "optimizer.check_finite"
    return None


def takes_at_once(config: Config, layouts: Sequence[UnitLayout]) -> bool:
    """Whether steps of `train_batch` take every gradient while it is in memory: `eager`, with all micro-batches of a
    unit one after the other.
    """
    schedule, tiers = config.schedule, config.placement
    # What `auto` becomes where everything is asked to be on nvme; elsewhere it is known only once placed.
    moves = tiers.optimizer == tiers.parameters == "nvme"
    eager = schedule.optimizer_step == "eager" or (schedule.optimizer_step == "auto" and moves)
    grouped = schedule.micro_batch_order == "layer_major" or (schedule.micro_batch_order == "auto" and moves)
    return eager and grouped and needs_norm(config.optimizer, layouts) is None


def choose_schedule(blueprint: Blueprint) -> Schedule:
    """The schedule that `schedule.optimizer_step` asks for.

    Raises:
        ConfigError: `eager` where an update has to wait for the norm of all gradients.
    """
    config = blueprint.config
    wanted, waits_for = config.schedule.optimizer_step, needs_norm(config.optimizer, blueprint.layouts)
    if wanted == "eager" and waits_for is not None:
        raise ConfigError([eager_waits(waits_for)])
    if wanted != "auto":
        return Schedule(name=wanted, reason="as configured")
    tiers = {placement.optimizer for placement in blueprint.plan.flats.values()}
    moves = Tier.NVME in tiers or (Tier.HOST in tiers and not blueprint.device.aliases_host)
    if not moves:
        return Schedule(name="barrier", reason="optimizer states rest where the update computes")
    if waits_for is None:
        return Schedule(name="eager", reason="no setting needs the norm of all gradients before an update")
    return Schedule(name="deferred", reason=f"{waits_for} needs the norm before an update")
