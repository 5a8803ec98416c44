"""Modules that cannot be carried are refused by name before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import offload

CONFIG = {"device": "cpu", "placement": {"parameters": "host", "optimizer": "host", "gradients": "host"}}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("traced", [False, True])
def test_scripted_modules(traced: bool) -> None:
    plain = nn.Linear(8, 8)
    scripted = torch.jit.trace(plain, torch.ones(2, 8)) if traced else torch.jit.script(plain)
    with pytest.raises(offload.UnsupportedModelError, match=r"\(root\).*torch\.jit\.ScriptModule.*pass the module"):
        offload.initialize(scripted, CONFIG)
    with pytest.raises(offload.UnsupportedModelError, match=r"^1 \(.*torch\.jit\.ScriptModule"):
        offload.initialize(nn.Sequential(nn.Linear(8, 8), scripted), CONFIG)
    assert torch.equal(scripted(torch.ones(2, 8)), plain(torch.ones(2, 8)))  # left as it was


class Shared(nn.Module):
    """Two linear layers; `share` makes memory common to several of its tensors."""

    def __init__(self, share: Callable[[Shared], None]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        share(self)


def tie_by_data(model: Shared) -> None:
    model.b.weight.data = model.a.weight.data


def tie_a_part(model: Shared) -> None:
    model.rows = nn.Parameter(model.a.weight.detach()[2:4])


def tie_a_transposed_part(model: Shared) -> None:
    model.columns = nn.Parameter(model.a.weight.detach()[:, 3:5].t())


def expand(model: Shared) -> None:
    model.row = nn.Parameter(torch.ones(1, 8).expand(4, 8))


def alias_a_buffer(model: Shared) -> None:
    model.register_buffer("view", model.a.weight.detach().view(-1))


@pytest.mark.parametrize(
    ("share", "named"),
    [
        (tie_by_data, r"a\.weight and b\.weight .*one nn\.Parameter in both places"),
        (tie_a_part, r"rows and a\.weight|a\.weight and rows"),
        (tie_a_transposed_part, r"columns and a\.weight|a\.weight and columns"),
        (expand, r"parameter row is an expanded tensor"),
        (alias_a_buffer, r"a\.weight and view .*compute the buffer"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_memory_in_common(share: Callable[[Shared], None], named: str) -> None:
    """In torch an update of one shows in the other; kept apart they would drift."""
    with pytest.raises(offload.UnsupportedModelError, match=named):
        offload.initialize(Shared(share), CONFIG)


def test_memory_side_by_side_or_never_trained_is_fine() -> None:
    def beside(model: Shared) -> None:
        whole = torch.randn(8, 16)
        model.a.weight.data, model.b.weight.data = whole[:, :8], whole[:, 8:]

    def frozen(model: Shared) -> None:
        tie_by_data(model)
        model.requires_grad_(False)

    for share in (beside, frozen):
        model = Shared(share)
        expected = [p.detach().clone() for p in model.parameters()]
        with offload.initialize(model, CONFIG) as engine:
            assert all(torch.equal(v, e) for (_, v), e in zip(engine.named_full_parameters(), expected, strict=True))
