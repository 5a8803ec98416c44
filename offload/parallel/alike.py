"""What all ranks of a job must have in common besides values: settings, the model's structure, the optimizer's groups.

Where ranks differ in them they send messages that nobody waits for, or, what is worse, go on and train something that
nobody has asked for. What may differ is where a rank rests its state and how it reaches it: budgets, paths, tiers.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from offload.checkpoint.content import versions
from offload.errors import ParallelError

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from offload.build import Blueprint
    from offload.config import Config

OWN = ("memory", "swap", "log", "run_dir", "device")
"""Sections that belong to a rank."""
OWN_KEYS = (
    "placement.parameters",
    "placement.optimizer",
    "placement.gradients",
    "parallel.timeout",
    "parallel.place_ranks",
    "checkpoint.directory",
    "checkpoint.bandwidth_share",
    "model.weights",
    "data.files",
    "train.threads",
)
_SHOWN = 5
_SAME_VERSIONS = ("offload", "torch")


def settings_of(config: Config, blueprint: Blueprint, optimizer: Optimizer, scheduler: Any) -> dict[str, object]:
    """By name, small: of large things the CRC-32."""
    found: dict[str, object] = {"device": blueprint.device.kind}
    for section, values in config.to_dict().items():
        if section in OWN:
            continue
        if not isinstance(values, Mapping):
            found[section] = values
            continue
        keys = {f"{section}.{key}": value for key, value in values.items()}
        found |= {key: value for key, value in keys.items() if key not in OWN_KEYS}
    found |= {f"version of {name}": text for name, text in versions().items() if name in _SAME_VERSIONS}
    for layout in blueprint.layouts:
        slots = [
            (str(flat.dtype), flat.persistent, slot.name, slot.shape, slot.trainable)
            for flat in layout.flats
            for slot in flat.slots
        ]
        found[f"parameters of unit {layout.name}"] = f"{len(slots)}, of names, shapes and dtypes {_sum(slots)}"
    names = {id(p): name for spec in blueprint.specs for name, p in spec.parameters}
    for index, group in enumerate(optimizer.param_groups):
        members = [names.get(id(p), "") for p in group["params"]]
        found[f"param_groups[{index}]"] = counted(members)
        found |= group_values(index, group)
    found["lr_scheduler"] = None if scheduler is None else type(scheduler).__name__
    return found


def group_values(index: int, group: Mapping[str, Any]) -> dict[str, object]:
    """What a group's parameters are updated with."""
    return {f"param_groups[{index}].{key}": repr(group[key]) for key in ("lr", "betas", "eps", "weight_decay")}


def counted(names: Sequence[str]) -> str:
    """Many names in few words, which differ where the names do."""
    return f"{len(names)} parameters, of names {_sum(names)}"


def _sum(value: object) -> str:
    return f"{zlib.crc32(repr(value).encode()):08x}"


def check_alike(values: Sequence[Mapping[str, object]], what: str) -> None:
    """Refuses values, by rank, that are not the same.

    Raises:
        ParallelError: names the first ones that differ, and who has which.
    """
    if all(of_rank == values[0] for of_rank in values[1:]):
        return
    names = dict.fromkeys(name for of_rank in values for name in of_rank)
    different = [name for name in names if any(of_rank.get(name) != values[0].get(name) for of_rank in values)]
    shown = "; ".join(f"{name}: {_by_value([v.get(name) for v in values])}" for name in different[:_SHOWN])
    more = f"; and {len(different) - _SHOWN} more" if len(different) > _SHOWN else ""
    raise ParallelError(f"{what}: {shown}{more}; all ranks need the same")


def _by_value(values: Sequence[object]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault("not there" if value is None else str(value), []).append(rank)
    return ", ".join(
        f"{text:.100} on rank{'s' if len(of_value) > 1 else ''} {', '.join(map(str, of_value[:8]))}"
        for text, of_value in ranks.items()
    )
