"""Modules that cannot be carried are refused by name before anything is allocated."""

from __future__ import annotations

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
