"""Parameter groups without weight decay, and the learning-rate schedule."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from offload.config import ConfigError, OptimizerConfig
from offload.recipe import WarmupSchedule, build_lr_scheduler, build_param_groups, describe_groups


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.linear = nn.Linear(3, 3)
        self.norm = nn.LayerNorm(3)
        self.scale = nn.Parameter(torch.ones(3))
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embedding.weight


def names_without_decay(*rules: str) -> set[str]:
    with torch.device("meta"):
        model = Small()
    groups = build_param_groups(model, OptimizerConfig(no_decay=rules, weight_decay=0.1))
    assert groups is not None
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    every = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(every) == sorted(names), "each parameter is in exactly one group"
    assert {group["weight_decay"] for group in groups} <= {0.0, 0.1}
    return {names[id(p)] for group in groups if group["weight_decay"] == 0.0 for p in group["params"]}


def test_no_rule_means_no_groups() -> None:
    assert build_param_groups(Small(), OptimizerConfig()) is None


@pytest.mark.parametrize(
    ("rules", "names"),
    [
        (("norms",), {"norm.weight", "norm.bias"}),
        (("biases",), {"norm.bias", "linear.bias"}),
        (("1d",), {"norm.weight", "norm.bias", "linear.bias", "scale"}),
        (("*.weight",), {"embedding.weight", "linear.weight", "norm.weight"}),
        (("scale", "norms"), {"scale", "norm.weight", "norm.bias"}),
    ],
)
def test_rules(rules: tuple[str, ...], names: set[str]) -> None:
    assert names_without_decay(*rules) == names


def test_a_pattern_that_matches_nothing_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"optimizer.no_decay: 'nrom\*'"):
        build_param_groups(Small(), OptimizerConfig(no_decay=("biases", "nrom*")))


def test_a_kind_that_the_model_lacks_is_none() -> None:
    groups = build_param_groups(nn.Linear(2, 2, bias=False), OptimizerConfig(no_decay=("biases", "norms")))
    assert groups is not None and [len(group["params"]) for group in groups] == [1]
    assert "weight decay 0.01 on 1 tensors" in describe_groups(groups)


def factors(count: int, **changes: Any) -> list[float]:
    settings: dict[str, Any] = {"kind": "cosine", "warmup_steps": 4, "total_steps": 10, "min_lr_ratio": 0.1} | changes
    schedule = WarmupSchedule(**settings)
    return [schedule(step) for step in range(count)]


def test_warm_up_then_cosine() -> None:
    values = factors(13)
    assert values[:4] == [0.25, 0.5, 0.75, 1.0]
    assert values[4] == 1.0
    assert values[4:10] == sorted(values[4:10], reverse=True)
    expected = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / 5)) for step in range(6)]
    assert values[4:10] == pytest.approx(expected, abs=1e-12)
    assert values[9:] == pytest.approx([0.1] * 4, abs=1e-12)


def test_linear_and_constant() -> None:
    assert factors(11, kind="linear", min_lr_ratio=0.0)[4:] == pytest.approx([1, 0.8, 0.6, 0.4, 0.2, 0, 0], abs=1e-12)
    assert factors(9, kind="constant")[4:] == [1.0] * 5


@pytest.mark.parametrize("changes", [{"warmup_steps": 10}, {"warmup_steps": 0}, {"total_steps": 1, "warmup_steps": 1}])
def test_schedules_without_room(changes: dict[str, int]) -> None:
    values = factors(12, **changes)
    assert all(0.0 < value <= 1.0 for value in values)
    assert values[-1] == pytest.approx(0.1)


def test_the_scheduler_drives_every_group() -> None:
    model = Small()
    config = OptimizerConfig(no_decay=("norms",), lr=1.0, scheduler="linear", warmup_steps=2)
    optimizer = torch.optim.AdamW(build_param_groups(model, config) or [], lr=config.lr)
    scheduler = build_lr_scheduler(optimizer, config, steps=4)
    assert scheduler is not None
    seen = []
    for _ in range(4):
        assert optimizer.param_groups[0]["lr"] == optimizer.param_groups[1]["lr"]
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert seen == [0.5, 1.0, 1.0, 0.0]
    assert build_lr_scheduler(optimizer, OptimizerConfig(), steps=4) is None
