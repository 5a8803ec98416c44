"""Memory for transfers in tests."""

from __future__ import annotations

import torch

from swap import Budget, HostPool


def aligned(nbytes: int, seed: int | None = None) -> torch.Tensor:
    """Page-aligned memory with random bytes, or zeros without a seed."""
    tensor = HostPool(Budget({}), "host", "test").take(nbytes)
    if seed is None:
        return tensor.zero_()
    generator = torch.Generator().manual_seed(seed)
    return tensor.copy_(torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator))
