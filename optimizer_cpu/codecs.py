"""Torch reference of the state formats `split` and `compact`: decode, encode and step.

docs/state_formats.md specifies the codes; the functions here are that text in integer operations on the bits of fp32
values. Native kernels must give the same codes. All functions take 1-D tensors that have been checked before.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from optimizer_cpu.formats import GROUP
from optimizer_cpu.reference import AdamWHyper, AdamWScalars, adamw_elements_, sqrt_f32

GRAD_LIMIT = 2.0**60
"""Bound on gradients and moments in `compact`: squares and their sums stay finite."""

MOMENT_SHIFT, MOMENT_FRACTION = 19, 4
ROOT_SHIFT, ROOT_FRACTION = 18, 5
OCTAVES = 8
_QUIET_NAN = 0x7FC00000
_INT32_MIN = -(2**31)
_RANGE = 64 * 1024  # a multiple of GROUP

# Steps of three independent low-discrepancy sequences: golden ratio and plastic number, fractions x 2^32.
_A, _B, _C = 0x9E3779B9, 0xC13FA9A9, 0x91E10DA5


def _bf16_code(bits: Tensor) -> Tensor:
    return ((bits >> 16) & 1).add_(bits).add_(0x7FFF).bitwise_right_shift_(16)


def split_decode(weight: Tensor, remainder: Tensor) -> Tensor:
    """fp32 masters of bf16 `weight` and int16 `remainder`."""
    return ((weight.view(torch.int16).to(torch.int32) << 16) + remainder.to(torch.int32)).view(torch.float32)


def split_encode_(master: Tensor, weight: Tensor, remainder: Tensor) -> None:
    """Write bf16 `weight` and int16 `remainder` of fp32 `master`."""
    bits = master.view(torch.int32)
    bits = bits - ((bits & 0x1FFFF) == 0x8000).to(torch.int32)
    bits = bits.masked_fill_(master != master, _QUIET_NAN)
    weight.view(torch.int16).copy_(_bf16_code(bits).to(torch.int16))
    remainder.copy_(((bits << 16) >> 16).to(torch.int16))


@torch.no_grad()
def split_step_(
    *,
    weight: Tensor,
    remainder: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    hyper: AdamWHyper,
    grad_scale: float,
) -> None:
    """One AdamW step in place; exactly `reference.adamw_` on the decoded master."""
    scalars = AdamWScalars.of(hyper, grad_scale)
    for start in range(0, weight.numel(), _RANGE):
        part = slice(start, start + _RANGE)
        p = split_decode(weight[part], remainder[part])
        g = grad[part].to(torch.float32) * scalars.grad_scale
        adamw_elements_(p, exp_avg[part], exp_avg_sq[part], g, scalars)
        split_encode_(p, weight[part], remainder[part])


@dataclass(frozen=True, slots=True, kw_only=True)
class Dither:
    """Rounding offsets for the 32 positions of a group, int32 `[32]` each.

    `tie` is added to a rounded master that has no code: one step down or up.
    """

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    tie: Tensor


def dither(step: int | None, device: torch.device) -> Dither:
    """Offsets for a step, from low-discrepancy sequences in (position, step); None rounds to nearest.

    Over steps each value is rounded up as often as the part that is cut off says, so small changes are not lost.
    """
    positions = range(GROUP)
    if step is None:
        master, moment, root = [1 << 7] * GROUP, [1 << 18] * GROUP, [1 << 17] * GROUP
    else:
        mask = 0xFFFFFFFF
        master = [((i * _B + step * _A) & mask) >> 24 for i in positions]
        moment = [((i * _C + step * _B) & mask) >> 13 for i in positions]
        root = [((i * _A + step * _C) & mask) >> 14 for i in positions]
    tie = [0x100 if offset > 1 << 18 else -0x100 for offset in moment]
    values = (torch.tensor(x, dtype=torch.int32, device=device) for x in (master, moment, root, tie))
    return Dither(**dict(zip(("master", "exp_avg", "exp_avg_sq", "tie"), values, strict=True)))


def _grouped(plane: Tensor) -> Tensor:
    """`[groups, 32]`; a partial last group is completed with zeros in a copy."""
    short = -plane.numel() % GROUP
    if short:
        plane = torch.cat([plane, plane.new_zeros(short)])
    return plane.view(-1, GROUP)


def _base(scale: Tensor, fraction: int) -> Tensor:
    octave = (scale.view(torch.int16).to(torch.int32) >> 7) & 0xFF
    return ((octave - (OCTAVES - 1)).clamp_(min=0) << fraction).unsqueeze(1)


def _decode_master(weight: Tensor, remainder: Tensor) -> Tensor:
    bits = (weight.view(torch.int16).to(torch.int32) << 16) + (remainder.to(torch.int32) << 8)
    return bits.view(torch.float32)


def _decode_moment(code: Tensor, scale: Tensor) -> Tensor:
    x = code.to(torch.int32)
    magnitude = x & 0x7F
    bits = (magnitude + _base(scale, MOMENT_FRACTION)) << MOMENT_SHIFT
    return (torch.where(magnitude == 0, magnitude, bits) | (x & _INT32_MIN)).view(torch.float32)


def _decode_root(code: Tensor, scale: Tensor) -> Tensor:
    x = code.to(torch.int32)
    bits = (x + _base(scale, ROOT_FRACTION)) << ROOT_SHIFT
    return torch.where(x == 0, x, bits).view(torch.float32)


def _encode_master_(p: Tensor, offsets: Dither, weight: Tensor, remainder: Tensor) -> None:
    bits = (p.view(torch.int32) + offsets.master) & ~0xFF
    # A tie under an even high half would need the remainder +128. Always moving it to one side would be a wall that
    # small updates cannot cross; the dither moves it to either side.
    bits = torch.where((bits & 0x1FFFF) == 0x8000, bits + offsets.tie, bits)
    bits = bits.masked_fill_(p != p, _QUIET_NAN)
    code = _bf16_code(bits)
    rest = (bits - (code << 16)) >> 8
    count = weight.numel()
    weight.view(torch.int16).copy_(code.view(-1)[:count].to(torch.int16))
    remainder.copy_(rest.view(-1)[:count].to(torch.int8))


def _scale(octave: Tensor) -> Tensor:
    return (octave << 7).to(torch.int16).view(torch.bfloat16)


def _encode_moment_(m: Tensor, offset: Tensor, code: Tensor, scale: Tensor) -> None:
    bits = m.view(torch.int32)
    rounded = ((bits & 0x7FFFFFFF) + offset) >> MOMENT_SHIFT
    octave = rounded.amax(dim=1) >> MOMENT_FRACTION
    scale.copy_(_scale(octave))
    magnitude = (rounded - _base(scale, MOMENT_FRACTION)).clamp_(min=0)
    signed = torch.where(bits < 0, magnitude - 128, magnitude)  # sign and magnitude: bit 7 set
    code.copy_(signed.view(-1)[: code.numel()].to(torch.int8))


def _encode_root_(root: Tensor, offset: Tensor, code: Tensor, scale: Tensor) -> None:
    rounded = (root.view(torch.int32) + offset) >> ROOT_SHIFT
    octave = rounded.amax(dim=1) >> ROOT_FRACTION
    scale.copy_(_scale(octave))
    floor = rounded.clamp(max=1)  # a non-zero variance never encodes to zero
    value = torch.maximum(rounded - _base(scale, ROOT_FRACTION), floor)
    code.copy_(value.view(-1)[: code.numel()].to(torch.uint8))


def _bounded(x: Tensor) -> Tensor:
    """`x` within +-GRAD_LIMIT; NaN becomes the lower bound."""
    x = torch.where(x > -GRAD_LIMIT, x, -GRAD_LIMIT)
    return torch.where(x < GRAD_LIMIT, x, GRAD_LIMIT)


@torch.no_grad()
def compact_step_(
    *,
    weight: Tensor,
    remainder: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    exp_avg_scale: Tensor,
    exp_avg_sq_scale: Tensor,
    grad: Tensor,
    hyper: AdamWHyper,
    grad_scale: float,
) -> None:
    """One AdamW step in place: decode, the operations of the contract on a bounded gradient, encode with dither."""
    scalars = AdamWScalars.of(hyper, grad_scale)
    offsets = dither(hyper.step, weight.device)
    for start in range(0, weight.numel(), _RANGE):
        part = slice(start, start + _RANGE)
        groups = slice(start // GROUP, (start + _RANGE) // GROUP)
        p = _decode_master(_grouped(weight[part]), _grouped(remainder[part]))
        m = _decode_moment(_grouped(exp_avg[part]), exp_avg_scale[groups])
        root = _decode_root(_grouped(exp_avg_sq[part]), exp_avg_sq_scale[groups])
        raw = _grouped(grad[part]).to(torch.float32) * scalars.grad_scale
        root = adamw_elements_(p, m, root * root, _bounded(raw), scalars)
        p.add_(raw * 0.0)  # a non-finite gradient marks the parameter
        _encode_master_(p, offsets, weight[part], remainder[part])
        _encode_moment_(m, offsets.exp_avg, exp_avg[part], exp_avg_scale[groups])
        _encode_root_(root, offsets.exp_avg_sq, exp_avg_sq[part], exp_avg_sq_scale[groups])


@torch.no_grad()
def compact_encode_(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    weight: Tensor,
    remainder: Tensor,
    avg_code: Tensor,
    sq_code: Tensor,
    avg_scale: Tensor,
    sq_scale: Tensor,
) -> None:
    """Write the planes of fp32 values, each rounded to nearest."""
    offsets = dither(None, weight.device)
    for start in range(0, weight.numel(), _RANGE):
        part = slice(start, start + _RANGE)
        groups = slice(start // GROUP, (start + _RANGE) // GROUP)
        root = sqrt_f32(_grouped(exp_avg_sq[part]))
        root = torch.where(root < GRAD_LIMIT, root, GRAD_LIMIT)  # NaN: the upper bound, never a small variance
        root = torch.where(root > 0.0, root, 0.0)
        _encode_master_(_grouped(master[part]), offsets, weight[part], remainder[part])
        _encode_moment_(_bounded(_grouped(exp_avg[part])), offsets.exp_avg, avg_code[part], avg_scale[groups])
        _encode_root_(root, offsets.exp_avg_sq, sq_code[part], sq_scale[groups])


@torch.no_grad()
def compact_decode(
    *, weight: Tensor, remainder: Tensor, avg_code: Tensor, sq_code: Tensor, avg_scale: Tensor, sq_scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """fp32 (master, exp_avg, exp_avg_sq) of the planes, new tensors."""
    count = weight.numel()
    root = _decode_root(_grouped(sq_code), sq_scale)
    decoded = (
        _decode_master(_grouped(weight), _grouped(remainder)),
        _decode_moment(_grouped(avg_code), avg_scale),
        root * root,
    )
    return tuple(x.view(-1)[:count] for x in decoded)  # type: ignore[return-value]
