"""The only door to the optimizer's arithmetic: callers use these functions, which choose the fastest equal path.

`step_`, `load_` and `read` work on the planes of any state format, given by name; the rest on single slices. All of
them take 1-D contiguous tensors and raise ValueError naming a tensor that does not fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from optimizer_cpu import reference
from optimizer_cpu.formats import StateFormat, get_format
from optimizer_cpu.reference import BLOCK, AdamWHyper, total_norm

__all__ = [
    "BLOCK",
    "AdamWHyper",
    "MasterState",
    "accumulate_",
    "adamw_",
    "check_square_sums",
    "first_nonfinite",
    "load_",
    "read",
    "round_weight_",
    "square_sums",
    "step_",
    "total_norm",
]

adamw_ = reference.adamw_
round_weight_ = reference.round_weight_
square_sums = reference.square_sums
check_square_sums = reference.check_square_sums
first_nonfinite = reference.first_nonfinite
accumulate_ = reference.accumulate_


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterState:
    """Decoded state of a range: fp32 tensors of one length, which may alias the planes."""

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


def _fp32_parts(planes: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    weight = planes["weight"]
    if weight.dtype == torch.float32:
        return weight, planes["exp_avg"], planes["exp_avg_sq"], None
    return planes["master"], planes["exp_avg"], planes["exp_avg_sq"], weight


def _check_planes(fmt: StateFormat, planes: Mapping[str, Tensor]) -> None:
    if "weight" not in planes:
        raise ValueError(f"state format {fmt.name!r} needs a plane 'weight'; got {sorted(planes)}")
    weight = planes["weight"]
    expected = fmt.planes(weight.dtype)
    names = [plane.name for plane in expected]
    if set(names) != set(planes):
        raise ValueError(f"state format {fmt.name!r} needs planes {names}; got {sorted(planes)}")
    for plane in expected:
        tensor = planes[plane.name]
        if tensor.dtype != plane.dtype or tensor.numel() != plane.numel(weight.numel()):
            raise ValueError(
                f"plane {plane.name!r} of state format {fmt.name!r} is {tensor.dtype} with {tensor.numel()} elements; "
                f"expected {plane.dtype} with {plane.numel(weight.numel())}"
            )


def step_(
    state_format: str, planes: Mapping[str, Tensor], *, grad: Tensor, hyper: AdamWHyper, grad_scale: float = 1.0
) -> None:
    """One AdamW step in place on the planes (by name) of a range of a shard; `grad` has the range's length."""
    _check_planes(get_format(state_format), planes)
    master, exp_avg, exp_avg_sq, weight = _fp32_parts(planes)
    adamw_(
        master=master,
        exp_avg=exp_avg,
        exp_avg_sq=exp_avg_sq,
        grad=grad,
        hyper=hyper,
        grad_scale=grad_scale,
        weight=weight,
    )


@torch.no_grad()
def load_(
    state_format: str,
    planes: Mapping[str, Tensor],
    *,
    master: Tensor,
    exp_avg: Tensor | None = None,
    exp_avg_sq: Tensor | None = None,
) -> None:
    """Set the planes of a range from fp32 values (moments None: zero). The inputs are not changed.

    bf16 weights follow `round_weight_`, whose tie rule may lower a stored master by one ulp.
    """
    _check_planes(get_format(state_format), planes)
    own, own_avg, own_sq, weight = _fp32_parts(planes)
    pairs = (("master", own, master), ("exp_avg", own_avg, exp_avg), ("exp_avg_sq", own_sq, exp_avg_sq))
    for name, target, source in pairs:
        if source is None:
            target.zero_()
            continue
        if source.numel() != target.numel():
            raise ValueError(f"{name} has {source.numel()} elements; its plane has {target.numel()}")
        target.copy_(source)
    if weight is not None:
        round_weight_(own, weight)


def read(state_format: str, planes: Mapping[str, Tensor]) -> MasterState:
    """Decoded fp32 master and moments of a range; tensors may alias planes that already hold them."""
    _check_planes(get_format(state_format), planes)
    own, own_avg, own_sq, _ = _fp32_parts(planes)
    return MasterState(master=own, exp_avg=own_avg, exp_avg_sq=own_sq)
