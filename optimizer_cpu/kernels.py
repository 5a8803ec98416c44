"""The only door to the optimizer's arithmetic: callers use these functions, which choose the fastest equal path.

`step_`, `load_` and `read` work on the planes of any state format, given by name; the rest on single slices. All of
them take 1-D contiguous tensors and raise ValueError naming a tensor that does not fit. Tensors in host memory go to
the native kernels where these are available, all others to the torch reference; the bits are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from optimizer_cpu import codecs, native, reference
from optimizer_cpu._checks import GRAD_DTYPES, WEIGHT_DTYPES, check_plane, same_memory
from optimizer_cpu.formats import StateFormat, get_format
from optimizer_cpu.native import active_isa
from optimizer_cpu.reference import BLOCK, AdamWHyper, total_norm
from optimizer_cpu.threads import get_threads, set_threads

__all__ = [
    "BLOCK",
    "AdamWHyper",
    "MasterState",
    "accumulate_",
    "active_isa",
    "adamw_",
    "check_square_sums",
    "copy_square_sums",
    "first_nonfinite",
    "get_threads",
    "load_",
    "read",
    "round_weight_",
    "set_threads",
    "square_sums",
    "square_sums_of",
    "step_",
    "total_norm",
]

_MASTER = (torch.float32,)

first_nonfinite = reference.first_nonfinite


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterState:
    """Decoded state of a range: fp32 tensors of one length, which may alias the planes."""

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


def adamw_(
    *,
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    hyper: AdamWHyper,
    grad_scale: float = 1.0,
    weight: Tensor | None = None,
) -> None:
    """One AdamW step in place, see `reference.adamw_`."""
    check_plane("master", master, _MASTER)
    check_plane("exp_avg", exp_avg, _MASTER, master)
    check_plane("exp_avg_sq", exp_avg_sq, _MASTER, master)
    check_plane("grad", grad, GRAD_DTYPES, master)
    if weight is not None:
        check_plane("weight", weight, WEIGHT_DTYPES, master)
        if same_memory(weight, master):
            weight = None
    chosen = native.for_tensors(master)
    planes = {"master": master, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "grad": grad}
    if chosen is None:
        reference.adamw_(**planes, weight=weight, hyper=hyper, grad_scale=grad_scale)
    else:
        chosen.step("fp32", **planes, weight=weight, hyper=hyper, grad_scale=grad_scale)


def round_weight_(master: Tensor, weight: Tensor) -> None:
    """Write the weight plane of a master plane, see `reference.round_weight_`."""
    check_plane("master", master, _MASTER)
    check_plane("weight", weight, WEIGHT_DTYPES, master)
    if same_memory(weight, master):
        return
    chosen = native.for_tensors(master)
    if chosen is None:
        reference.round_weight_(master, weight)
    else:
        chosen.round_weight(master, weight)


def check_square_sums(grad: Tensor) -> tuple[Tensor, int | None]:
    """fp64 sum of squares per 4,096-element block and the index of the first non-finite element (None: all finite).

    One pass over the memory; the order of summation is that of `reference.square_sums`.
    """
    check_plane("grad", grad, GRAD_DTYPES)
    chosen = native.for_tensors(grad)
    return reference.check_square_sums(grad) if chosen is None else chosen.square_sums(grad)


def square_sums(grad: Tensor) -> Tensor:
    """fp64 sum of squares per 4,096-element block, see `reference.square_sums`."""
    check_plane("grad", grad, GRAD_DTYPES)
    chosen = native.for_tensors(grad)
    return reference.square_sums(grad) if chosen is None else chosen.square_sums(grad)[0]


def square_sums_of(parts: Sequence[tuple[Tensor, int, int]]) -> list[Tensor]:
    """`square_sums` of ranges of planes, in one call: each of `parts` is (plane, first element, number of elements).

    Raises:
        ValueError: a plane that does not fit, or a range that leaves its plane.
    """
    lengths: dict[int, int] = {}  # by identity: mostly one plane for all
    for plane, start, count in parts:
        length = lengths.get(id(plane))
        if length is None:
            check_plane("grad", plane, GRAD_DTYPES)
            length = lengths[id(plane)] = plane.numel()
        if not 0 <= start <= start + count <= length:
            raise ValueError(f"a range of {count} elements from {start} on in a plane of {length}")
    if not parts:
        return []
    chosen = native.for_tensors(*{id(plane): plane for plane, _, _ in parts}.values())
    if chosen is not None:
        return chosen.square_sums_of(parts)
    return [reference.square_sums(plane[start : start + count]) for plane, start, count in parts]


def copy_square_sums(out: Tensor, grad: Tensor) -> Tensor:
    """out = grad and its sums of squares in one pass over the memory, see `reference.copy_square_sums`."""
    check_plane("grad", grad, GRAD_DTYPES)
    check_plane("out", out, (grad.dtype,), grad)
    if same_memory(out, grad):
        return square_sums(grad)
    chosen = native.for_tensors(grad)
    return reference.copy_square_sums(out, grad) if chosen is None else chosen.square_sums(grad, out)[0]


def accumulate_(acc: Tensor, contribution: Tensor) -> None:
    """acc += contribution, see `reference.accumulate_`."""
    if acc.dtype == torch.float32:
        check_plane("acc", acc, _MASTER)
        check_plane("contribution", contribution, GRAD_DTYPES, acc)
        chosen = native.for_tensors(acc)
        if chosen is not None:
            chosen.accumulate(acc, contribution)
            return
    reference.accumulate_(acc, contribution)


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
        check_plane(plane.name, tensor, (plane.dtype,), weight if plane.group == 1 else None)
        if tensor.numel() != plane.numel(weight.numel()) or tensor.device != weight.device:
            raise ValueError(
                f"{plane.name} has {tensor.numel()} elements on {tensor.device}; state format {fmt.name!r} needs "
                f"{plane.numel(weight.numel())} on {weight.device} for {weight.numel()} weights"
            )


def _fp32_parts(planes: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    weight = planes["weight"]
    if weight.dtype == torch.float32:
        return weight, planes["exp_avg"], planes["exp_avg_sq"], None
    return planes["master"], planes["exp_avg"], planes["exp_avg_sq"], weight


def step_(
    state_format: str, planes: Mapping[str, Tensor], *, grad: Tensor, hyper: AdamWHyper, grad_scale: float = 1.0
) -> None:
    """One AdamW step in place on the planes (by name) of a range of a shard; `grad` has the range's length.

    Ranges of `compact` start at multiples of its group (32) in the shard.
    """
    fmt = get_format(state_format)
    _check_planes(fmt, planes)
    weight = planes["weight"]
    check_plane("grad", grad, GRAD_DTYPES, weight)
    chosen = native.for_tensors(weight)
    if fmt.name == "fp32":
        master, exp_avg, exp_avg_sq, second = _fp32_parts(planes)
        parts = {"master": master, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "weight": second}
        if chosen is None:
            reference.adamw_(**parts, grad=grad, hyper=hyper, grad_scale=grad_scale)  # type: ignore[arg-type]
        else:
            chosen.step("fp32", **parts, grad=grad, hyper=hyper, grad_scale=grad_scale)  # type: ignore[arg-type]
    elif chosen is not None:
        parts = {"master" if name == "remainder" else name: tensor for name, tensor in planes.items()}
        chosen.step(fmt.name, **parts, grad=grad, hyper=hyper, grad_scale=grad_scale)  # type: ignore[arg-type]
    elif fmt.name == "split":
        codecs.split_step_(**planes, grad=grad, hyper=hyper, grad_scale=grad_scale)
    else:
        codecs.compact_step_(**planes, grad=grad, hyper=hyper, grad_scale=grad_scale)


def steps_(
    state_format: str,
    planes: Mapping[str, Tensor],
    parts: Iterable[tuple[int, int, Tensor, int, AdamWHyper]],
    *,
    grad_scale: float = 1.0,
) -> None:
    """`step_` for ranges of a shard, whose planes are checked once: each of `parts` is (first element, number of
    elements, plane of gradients, first element in that plane, hyperparameters). Nothing is written unless all fit.

    Raises:
        ValueError: a range that leaves the shard or its gradients or begins within a group of `compact`; as `step_`.
    """
    fmt = get_format(state_format)
    _check_planes(fmt, planes)
    weight = planes["weight"]
    total, multiple = weight.numel(), fmt.range_multiple
    lengths: dict[int, int] = {}  # of the planes of gradients, by identity: mostly one for all
    parts = list(parts)
    for start, count, gradients, first, _ in parts:
        length = lengths.get(id(gradients))
        if length is None:
            check_plane("grad", gradients, GRAD_DTYPES)
            if gradients.device != weight.device:
                raise ValueError(f"grad is on {gradients.device}; expected {weight.device} as the weights")
            length = lengths[id(gradients)] = gradients.numel()
        if not (0 <= start <= start + count <= total and 0 <= first <= first + count <= length) or start % multiple:
            raise ValueError(
                f"a range of {count} elements from {start} on, with gradients from {first} on: there are {total} "
                f"weights and {length} gradients, and ranges of {fmt.name!r} start at multiples of {multiple}"
            )
    chosen = native.for_tensors(weight)
    if chosen is not None:
        chosen.steps(fmt, planes, parts, grad_scale)
        return
    specs = fmt.planes(weight.dtype)
    for start, count, gradients, first, hyper in parts:
        part = {spec.name: planes[spec.name][spec.slice_of(start, start + count)] for spec in specs}
        step_(state_format, part, grad=gradients[first : first + count], hyper=hyper, grad_scale=grad_scale)


def _checked_moment(name: str, value: Tensor | None, master: Tensor) -> Tensor:
    if value is None:
        return torch.zeros_like(master)
    check_plane(name, value, _MASTER, master)
    return value


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

    bf16 weights follow `round_weight_`, whose tie rule may lower a stored master by one ulp. `compact` rounds to its
    nearest codes, and reproduces exactly the values that `read` gave.
    """
    fmt = get_format(state_format)
    _check_planes(fmt, planes)
    weight = planes["weight"]
    check_plane("master", master, _MASTER, weight)
    if fmt.name == "fp32":
        own, own_avg, own_sq, second = _fp32_parts(planes)
        for name, target, source in (("exp_avg", own_avg, exp_avg), ("exp_avg_sq", own_sq, exp_avg_sq)):
            if source is None:
                target.zero_()
            else:
                check_plane(name, source, _MASTER, weight)
                target.copy_(source)
        own.copy_(master)
        if second is not None:
            round_weight_(own, second)
        return
    exp_avg = _checked_moment("exp_avg", exp_avg, master)
    exp_avg_sq = _checked_moment("exp_avg_sq", exp_avg_sq, master)
    remainder = planes["remainder"]
    chosen = native.for_tensors(weight)
    if fmt.name == "split":
        planes["exp_avg"].copy_(exp_avg)
        planes["exp_avg_sq"].copy_(exp_avg_sq)
        if chosen is None:
            codecs.split_encode_(master, weight, remainder)
        else:
            chosen.convert("split", encode=True, weight=weight, remainder=remainder, master=master)
    elif chosen is None:
        codecs.compact_encode_(master, exp_avg, exp_avg_sq, **_compact_planes(planes))
    else:
        chosen.convert(
            "compact",
            encode=True,
            weight=weight,
            remainder=remainder,
            master=master,
            codes=_compact_codes(planes),
            moments=(exp_avg, exp_avg_sq),
        )


def _compact_codes(planes: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return planes["exp_avg"], planes["exp_avg_sq"], planes["exp_avg_scale"], planes["exp_avg_sq_scale"]


def _compact_planes(planes: Mapping[str, Tensor]) -> dict[str, Tensor]:
    names = {
        "weight": "weight",
        "remainder": "remainder",
        "avg_code": "exp_avg",
        "sq_code": "exp_avg_sq",
        "avg_scale": "exp_avg_scale",
        "sq_scale": "exp_avg_sq_scale",
    }
    return {argument: planes[name] for argument, name in names.items()}


@torch.no_grad()
def read(state_format: str, planes: Mapping[str, Tensor]) -> MasterState:
    """Decoded fp32 master and moments of a range; tensors may alias planes that already hold them."""
    fmt = get_format(state_format)
    _check_planes(fmt, planes)
    weight = planes["weight"]
    if fmt.name == "fp32":
        own, own_avg, own_sq, _ = _fp32_parts(planes)
        return MasterState(master=own, exp_avg=own_avg, exp_avg_sq=own_sq)
    chosen = native.for_tensors(weight)
    if fmt.name == "split":
        if chosen is None:
            master = codecs.split_decode(weight, planes["remainder"])
        else:
            master = torch.empty(weight.numel(), dtype=torch.float32)
            chosen.convert("split", encode=False, weight=weight, remainder=planes["remainder"], master=master)
        return MasterState(master=master, exp_avg=planes["exp_avg"], exp_avg_sq=planes["exp_avg_sq"])
    if chosen is None:
        master, exp_avg, exp_avg_sq = codecs.compact_decode(**_compact_planes(planes))
    else:
        master, exp_avg, exp_avg_sq = (torch.empty(weight.numel(), dtype=torch.float32) for _ in range(3))
        chosen.convert(
            "compact",
            encode=False,
            weight=weight,
            remainder=planes["remainder"],
            master=master,
            codes=_compact_codes(planes),
            moments=(exp_avg, exp_avg_sq),
        )
    return MasterState(master=master, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
