"""Parameter groups and learning-rate schedule that an `OptimizerConfig` asks for."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from offload.config import ConfigError, OptimizerConfig


def build_param_groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]] | None:
    """Two groups, with and without weight decay, or ``None`` when every parameter decays.

    ``config.no_decay`` holds name patterns and the words ``norms`` (parameters owned by a module whose class name
    contains "norm"), ``biases`` (named ``bias`` or ``*_bias``) and ``1d`` (fewer than two dimensions). Parameters may
    be on the meta device. Raises `ConfigError` for an entry that matches nothing.
    """
    if not config.no_decay:
        return None
    unmatched = set(config.no_decay)
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    norms = _norm_parameters(model)
    for name, parameter in model.named_parameters():
        rules = [rule for rule in config.no_decay if _matches(rule, name, id(parameter) in norms, parameter.dim())]
        unmatched.difference_update(rules)
        (plain if rules else decayed).append(parameter)
    # The words describe kinds that a model need not have; a pattern names parameters, so it is wrong if none is there.
    wrong = sorted(unmatched - {"norms", "biases", "1d"})
    if wrong:
        raise ConfigError([f"optimizer.no_decay: {rule!r} matches no parameter of the model" for rule in wrong])
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _norm_parameters(model: nn.Module) -> set[int]:
    return {
        id(parameter)
        for module in model.modules()
        if "norm" in type(module).__name__.lower()
        for parameter in module.parameters(recurse=False)
    }


def _matches(rule: str, name: str, in_norm: bool, dimensions: int) -> bool:
    if rule == "norms":
        return in_norm
    if rule == "biases":
        return name.rpartition(".")[2] == "bias" or name.endswith("_bias")
    if rule == "1d":
        return dimensions < 2
    return fnmatchcase(name, rule)


class WarmupSchedule:
    """Factor of the learning rate at a step, counted from 0: linear warm-up, then constant, linear or cosine decay.

    During warm-up step ``s`` has factor ``(s + 1) / warmup_steps``, so that the first step already moves. The decay
    reaches ``min_lr_ratio`` at the last step, ``total_steps - 1``, and stays there.
    """

    def __init__(self, *, kind: str, warmup_steps: int, total_steps: int, min_lr_ratio: float) -> None:
        self.kind = kind
        self.warmup_steps = warmup_steps
        self.total_steps = total_steps
        self.min_lr_ratio = min_lr_ratio

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.kind == "constant":
            return 1.0
        length = max(1, self.total_steps - 1 - self.warmup_steps)
        done = min(1.0, (step - self.warmup_steps) / length)
        left = 1.0 - done if self.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.min_lr_ratio + (1.0 - self.min_lr_ratio) * left


def build_lr_scheduler(optimizer: Optimizer, config: OptimizerConfig, *, steps: int) -> LambdaLR | None:
    """The scheduler of ``config`` over ``optimizer``, or ``None`` for ``scheduler = "none"``.

    ``steps``: the number of optimizer steps that ``total_steps = "auto"`` stands for.
    """
    if config.scheduler == "none":
        return None
    total = steps if config.total_steps == "auto" else config.total_steps
    return LambdaLR(
        optimizer,
        WarmupSchedule(
            kind=config.scheduler,
            warmup_steps=config.warmup_steps,
            total_steps=total,
            min_lr_ratio=config.min_lr_ratio,
        ),
    )


def describe_groups(groups: Iterable[dict[str, Any]] | None) -> str:
    """One line on the groups: how many parameters decay and how many do not."""
    if groups is None:
        return "weight decay on every parameter"
    parts = [f"weight decay {group['weight_decay']:g} on {len(group['params'])} tensors" for group in groups]
    return ", ".join(parts)
