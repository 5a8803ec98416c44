"""Parameters of several dtypes in one unit: `precision.keep`, models that come in several, masters of each.

Compared with `torch.equal` to a twin whose parameters have these dtypes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine.binding_models import WIDTH, Stack, inputs
from tests.engine.common import DTYPES, Case
from tests.models.common import cover, duo


class Scaled(nn.Module):
    """A linear layer in low precision whose result a scale in fp32 multiplies, as norms and routers are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.lin(x).float() * self.scale + self.shift
        return x + y.to(x.dtype)


def loss(model: Any, dtype: torch.dtype, seed: int) -> Tensor:
    return model(inputs(seed=seed).to(dtype)).float().square().sum() * 0.1  # type: ignore[no-any-return]


@pytest.mark.parametrize(("how", "case"), cover(["kept in bf16", "kept in fp16", "as they come"], share=2))
def test_several_dtypes_in_a_unit(how: str, case: Case, swap_folder: Path) -> None:
    name = how[-4:] if how.startswith("kept") else "bf16"
    dtype, model = DTYPES[name], Stack(2, block=Scaled)
    precision: dict[str, Any] = {"compute_dtype": name, "keep": ["*.scale", "blocks.?.shift"]}
    if name == "fp16":
        precision["loss_scale"] = 1.0
    if how == "as they come":
        precision = {}
        model.to(dtype)
        for block in model.blocks:
            block.scale.data, block.shift.data = block.scale.data.float(), block.shift.data.float()
    with duo(model, case, swap_folder, precision=precision, max_grad_norm=0.5) as pair:
        for seed in range(3):
            pair.backward(lambda m, seed=seed: loss(m, dtype, seed))
            pair.step()
        kept = [p.dtype == torch.float32 for n, p in pair.offloaded.named_parameters() if "scale" in n or "shift" in n]
        assert all(kept) and pair.offloaded.blocks[0].lin.weight.dtype == dtype
