"""Argument checks shared by the reference and the native path.

Raw pointers know nothing of dtypes, strides or lengths, so everything is verified here, once, before a kernel runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

GRAD_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_plane(name: str, tensor: Tensor, dtypes: Sequence[torch.dtype], like: Tensor | None = None) -> None:
    """Raise ValueError unless `tensor` is a contiguous 1-D strided tensor of one of `dtypes`.

    With `like`, length and device must match it too. The message names the argument, what it is and what was expected.
    """
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        allowed = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise ValueError(f"{name} has dtype {str(tensor.dtype).removeprefix('torch.')}; expected {allowed}")
    if tensor.layout != torch.strided or tensor.dim() != 1:
        raise ValueError(
            f"{name} must be a 1-D strided tensor, got shape {tuple(tensor.shape)}, layout {tensor.layout}; "
            "pass a flat view such as tensor.view(-1)"
        )
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name} is not contiguous (stride {tensor.stride()[0]}); "
            "kernels never copy silently, pass a contiguous slice"
        )
    if tensor.is_meta:
        raise ValueError(f"{name} is on the meta device and has no memory")
    if like is not None:
        if tensor.numel() != like.numel():
            raise ValueError(f"{name} has {tensor.numel()} elements; expected {like.numel()} as in the first plane")
        if tensor.device != like.device:
            raise ValueError(f"{name} is on {tensor.device}; expected {like.device} as the first plane")


def same_memory(a: Tensor, b: Tensor) -> bool:
    """True where both tensors are one plane: same address and dtype, whatever Python objects hold them."""
    return a is b or (a.dtype == b.dtype and a.device == b.device and a.data_ptr() == b.data_ptr())
