"""The numerical contract of the optimizer in plain torch; every faster path must give these bits.

Algorithm of one AdamW step on a range of a shard:

1. Scalars are computed in Python (double precision) and rounded once to fp32 (`AdamWScalars`).
2. Every element goes through the operations of `adamw_elements_`, each of them one IEEE fp32 +, -, *, / or sqrt,
   rounded to nearest even, in the order written there; nothing is fused or reassociated.
3. Where the weight plane is bf16 the new master is moved off exact ties and the weight is its rounding
   (`round_weight_`).

Elements are independent, so slices, chunk sizes and thread counts cannot change the result. A NaN compares as a NaN:
its sign and payload are unspecified in fp32 planes and canonical (0x7FC0 bf16, 0x7E00 fp16) in weight planes. Denormals
are kept: callers must not have switched `torch.set_flush_denormal` on.

[Note: square roots] torch.sqrt on CPU may call a vendor library whose fp32 root is off by one ulp on a quarter of all
inputs, and which ones depends on the tensor's length. The root of the fp64 value, rounded to fp32, is the correctly
rounded fp32 root, as is the machine instruction that native kernels use.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from optimizer_cpu._checks import GRAD_DTYPES, WEIGHT_DTYPES, check_plane, same_memory

BLOCK = 4096
"""Elements per block: the unit of layout and of the partial sums of the norm."""

LANES = 64
"""Accumulators per block in `square_sums`."""

_RANGE = 64 * 1024  # elements per sub-range: temporaries stay in cache and memory stays bounded
_MASTER = (torch.float32,)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def to_f32(value: float) -> float:
    """`value` rounded once, to nearest even, to fp32 (overflow gives an infinity)."""
    return float(ctypes.c_float(value).value)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWHyper:
    """Hyperparameters of one step.

    `step` counts from 1 and only enters the bias correction. `decoupled` chooses AdamW's decay of the weight; False
    adds `weight_decay * weight` to the gradient (Adam with L2). Raises ValueError for values outside their domain.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    decoupled: bool = True

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "weight_decay"):
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"{name}={value!r} must be finite and at least 0")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ValueError(f"{name}={value!r} must be at least 0 and less than 1")
        if self.step < 1:
            raise ValueError(f"step={self.step!r} must be at least 1: it counts optimizer steps from 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWScalars:
    """The scalars of one step, each computed in double precision and rounded once to fp32."""

    grad_scale: float  # unscale x clip factor
    l2: float  # weight_decay when coupled, else 0
    decay: float  # 1 - lr * weight_decay when decoupled, else 1
    beta1: float
    one_minus_beta1: float  # from the double beta1, not from its rounding
    beta2: float
    one_minus_beta2: float
    root_scale: float  # 1 / sqrt(1 - beta2 ** step)
    eps: float
    step_size: float  # lr / (1 - beta1 ** step)

    @staticmethod
    def of(hyper: AdamWHyper, grad_scale: float) -> AdamWScalars:
        """Scalars of `hyper`; `grad_scale` multiplies every gradient."""
        decay = 1.0 - hyper.lr * hyper.weight_decay if hyper.decoupled else 1.0
        return AdamWScalars(
            grad_scale=to_f32(grad_scale),
            l2=0.0 if hyper.decoupled else to_f32(hyper.weight_decay),
            decay=to_f32(decay),
            beta1=to_f32(hyper.beta1),
            one_minus_beta1=to_f32(1.0 - hyper.beta1),
            beta2=to_f32(hyper.beta2),
            one_minus_beta2=to_f32(1.0 - hyper.beta2),
            root_scale=to_f32(1.0 / math.sqrt(1.0 - hyper.beta2**hyper.step)),
            eps=to_f32(hyper.eps),
            step_size=to_f32(hyper.lr / (1.0 - hyper.beta1**hyper.step)),
        )


def sqrt_f32(x: Tensor) -> Tensor:
    """Correctly rounded fp32 square root of an fp32 tensor, see [Note: square roots]."""
    return x.to(torch.float64).sqrt_().to(torch.float32)


def adamw_elements_(p: Tensor, m: Tensor, v: Tensor, g: Tensor, s: AdamWScalars) -> Tensor:
    """The contract, element by element on fp32 tensors; updates `p`, `m`, `v` in place and may overwrite `g`.

    `g` is fp32(gradient) * grad_scale, a temporary of the caller. Returns sqrt of the new `v`.

    g = g + p * l2                                  (only where l2 != 0)
    p = p * decay
    m = m * beta1 + g * (1 - beta1)
    v = v * beta2 + (g * (1 - beta2)) * g
    p = p - (m / (sqrt(v) * root_scale + eps)) * step_size
    """
    if s.l2 != 0.0:
        g.add_(p * s.l2)
    p.mul_(s.decay)
    m.mul_(s.beta1).add_(g * s.one_minus_beta1)
    v.mul_(s.beta2).add_((g * s.one_minus_beta2).mul_(g))
    root = sqrt_f32(v)
    denominator = (root * s.root_scale).add_(s.eps)
    p.sub_((m / denominator).mul_(s.step_size))
    return root


@torch.no_grad()
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
    """One AdamW step on 1-D contiguous slices of equal length, in place.

    `master`, `exp_avg`, `exp_avg_sq` are fp32; `grad` is fp32, bf16 or fp16 and is only read; `weight` (bf16, fp16 or
    fp32) receives the new master as in `round_weight_`. With `weight` None, or the very memory of `master`, there is no
    second plane. Raises ValueError naming a tensor of the wrong dtype, shape, length, device or stride.
    """
    check_plane("master", master, _MASTER)
    check_plane("exp_avg", exp_avg, _MASTER, master)
    check_plane("exp_avg_sq", exp_avg_sq, _MASTER, master)
    check_plane("grad", grad, GRAD_DTYPES, master)
    if weight is not None:
        check_plane("weight", weight, WEIGHT_DTYPES, master)
        if same_memory(weight, master):
            weight = None
    scalars = AdamWScalars.of(hyper, grad_scale)
    for start in range(0, master.numel(), _RANGE):
        part = slice(start, start + _RANGE)
        g = grad[part].to(torch.float32) * scalars.grad_scale
        adamw_elements_(master[part], exp_avg[part], exp_avg_sq[part], g, scalars)
        if weight is not None:
            _round_range(master[part], weight[part])


@torch.no_grad()
def adamw_double_(*, master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, hyper: AdamWHyper) -> None:
    """The same step in fp64, for fp64 parameters: all tensors fp64, scalars not rounded."""
    check_plane("master", master, (torch.float64,))
    for name, tensor in (("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq), ("grad", grad)):
        check_plane(name, tensor, (torch.float64,), master)
    for start in range(0, master.numel(), _RANGE):
        p, m, v = (plane[start : start + _RANGE] for plane in (master, exp_avg, exp_avg_sq))
        g = grad[start : start + _RANGE].clone()
        if not hyper.decoupled:
            g.add_(p * hyper.weight_decay)
        else:
            p.mul_(1.0 - hyper.lr * hyper.weight_decay)
        m.mul_(hyper.beta1).add_(g * (1.0 - hyper.beta1))
        v.mul_(hyper.beta2).add_((g * (1.0 - hyper.beta2)).mul_(g))
        root_scale = 1.0 / math.sqrt(1.0 - hyper.beta2**hyper.step)
        denominator = v.sqrt().mul_(root_scale).add_(hyper.eps)
        p.sub_((m / denominator).mul_(hyper.lr / (1.0 - hyper.beta1**hyper.step)))


def _round_range(p: Tensor, weight: Tensor) -> None:
    if weight.dtype == torch.float32:
        weight.copy_(p)
        return
    if weight.dtype == torch.float16:
        weight.copy_(p)
        weight.view(torch.int16).masked_fill_(p != p, 0x7E00)
        return
    bits = p.view(torch.int32)
    # A tie whose high half is even would round down and leave a remainder of +0x8000, which int16 cannot hold: one ulp
    # less has the same bf16 and the remainder 0x7FFF, so `split` can store every master exactly.
    bits.sub_(((bits & 0x1FFFF) == 0x8000).to(torch.int32))
    # The rounding in integers: float instructions for it exist, but some flush denormals and they disagree on NaN.
    rounded = ((bits >> 16) & 1).add_(bits).add_(0x7FFF).bitwise_right_shift_(16).to(torch.int16)
    weight.view(torch.int16).copy_(rounded.masked_fill_(p != p, 0x7FC0))


@torch.no_grad()
def round_weight_(master: Tensor, weight: Tensor) -> None:
    """Write `weight` (bf16, fp16, fp32) as the round-to-nearest-even of fp32 `master`, 1-D, equal lengths.

    For bf16, a master whose low 16 bits are 0x8000 under an even high half is first lowered by one in its last bit
    (0x7FFF), in place: the rule that makes `split` invertible and that every format follows. NaN becomes 0x7FC0 (bf16)
    or 0x7E00 (fp16); denormals are kept. Used after each step and wherever masters are set (initialisation, load).
    """
    check_plane("master", master, _MASTER)
    check_plane("weight", weight, WEIGHT_DTYPES, master)
    if same_memory(weight, master):
        return
    for start in range(0, master.numel(), _RANGE):
        _round_range(master[start : start + _RANGE], weight[start : start + _RANGE])


@torch.no_grad()
def square_sums(grad: Tensor) -> Tensor:
    """Sum of squares of each 4,096-element block of a 1-D fp32, bf16 or fp16 slice: fp64 `[ceil(numel / 4096)]`.

    Blocks count from the start of the slice; a short last block is completed with zeros. The order is fixed by element
    position: a block is 64 rows of 64 lanes; each lane adds the squares of its column in row order, starting from +0;
    then the lanes are folded in halves, lane i += lane i + 32, then + 16, 8, 4, 2, 1. Elements are converted to fp64
    before they are squared, so a square is exact and a partial is non-finite only where an element is.
    """
    check_plane("grad", grad, GRAD_DTYPES)
    numel = grad.numel()
    partials = torch.zeros(-(-numel // BLOCK), dtype=torch.float64, device=grad.device)
    step = 16 * BLOCK
    for start in range(0, numel, step):
        part = grad[start : start + step]
        blocks = -(-part.numel() // BLOCK)
        x = torch.zeros(blocks * BLOCK, dtype=torch.float64, device=grad.device)
        x[: part.numel()].copy_(part)
        x.mul_(x)
        rows = x.view(blocks, BLOCK // LANES, LANES)
        lanes = torch.zeros(blocks, LANES, dtype=torch.float64, device=grad.device)
        for row in range(BLOCK // LANES):
            lanes.add_(rows[:, row])
        width = LANES // 2
        while width:
            lanes = lanes[:, :width] + lanes[:, width : 2 * width]
            width //= 2
        first = start // BLOCK
        partials[first : first + blocks].copy_(lanes[:, 0])
    return partials


@torch.no_grad()
def first_nonfinite(grad: Tensor) -> int | None:
    """Index of the first infinite or NaN element of a 1-D slice (fp32, bf16 or fp16), or None."""
    check_plane("grad", grad, GRAD_DTYPES)
    for start in range(0, grad.numel(), _RANGE):
        bad = torch.isfinite(grad[start : start + _RANGE]).logical_not_()
        if bool(bad.any()):
            return start + int(torch.nonzero(bad)[0])
    return None


def check_square_sums(grad: Tensor) -> tuple[Tensor, int | None]:
    """`square_sums(grad)` and `first_nonfinite(grad)`; native kernels do both in one pass over the memory."""
    partials = square_sums(grad)
    finite = bool(torch.isfinite(partials).all())
    return partials, None if finite else first_nonfinite(grad)


@torch.no_grad()
def copy_square_sums(out: Tensor, grad: Tensor) -> Tensor:
    """Copies 1-D `grad` (fp32, bf16 or fp16) to `out` of the same dtype and length; returns `square_sums(grad)`."""
    check_plane("grad", grad, GRAD_DTYPES)
    check_plane("out", out, (grad.dtype,), grad)
    out.copy_(grad)
    return square_sums(out)


@torch.no_grad()
def accumulate_(acc: Tensor, contribution: Tensor) -> None:
    """acc += contribution on 1-D slices of equal length; the contribution is first converted to acc's dtype.

    `acc` is any float dtype (fp32 in the default policy), `contribution` fp32, bf16 or fp16. Raises ValueError as
    `adamw_` does.
    """
    check_plane("acc", acc, _FLOATS)
    check_plane("contribution", contribution, GRAD_DTYPES, acc)
    for start in range(0, acc.numel(), _RANGE):
        part = slice(start, start + _RANGE)
        acc[part].add_(contribution[part].to(acc.dtype))


def total_norm(partials: Iterable[Tensor]) -> float:
    """Square root of the exact sum of all partial sums of squares (fp64), correctly rounded: no order can change it.

    Non-finite partials give inf or nan.
    """
    total = math.fsum(value for tensor in partials for value in tensor.tolist())
    return math.sqrt(total)
