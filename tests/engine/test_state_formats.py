"""The engine with every state format: `split` is `fp32` in fewer bytes, and none depends on where its planes rest."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import offload
from offload.models import Llama, LlamaConfig
from optimizer_cpu.formats import format_names

SIZES = LlamaConfig(vocab_size=97, hidden_size=24, layers=3, heads=2, max_positions=16, tie_embeddings=True)


def trained(tmp_path: Path, state_format: str, tier: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    with offload.empty_init():
        model = Llama(SIZES)
    config = {
        "memory": {"nvme_paths": [str(tmp_path)]},
        "placement": {name: tier for name in ("parameters", "gradients", "optimizer")},
        "optimizer": {"lr": 1e-2, "max_grad_norm": 0.5, "weight_decay": 0.1, "state_format": state_format},
        "precision": {"compute_dtype": "bf16"},
    }
    losses = []
    with offload.initialize(model, config) as engine:
        for step in range(8):
            ids = torch.randint(0, 97, (2, 16), generator=torch.Generator().manual_seed(step))
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses, {name: value.clone() for name, value in engine.named_full_parameters()}


def equal(a: tuple[list[float], dict[str, torch.Tensor]], b: tuple[list[float], dict[str, torch.Tensor]]) -> bool:
    return a[0] == b[0] and all(torch.equal(a[1][name], b[1][name]) for name in a[1])


def test_formats_and_tiers(tmp_path: Path) -> None:
    results = {(f, t): trained(tmp_path, f, t) for f in format_names() for t in ("host", "nvme")}
    for state_format in format_names():
        assert equal(results[state_format, "host"], results[state_format, "nvme"]), state_format
    assert equal(results["split", "nvme"], results["fp32", "host"])
    assert results["compact", "host"][0][-1] == pytest.approx(results["fp32", "host"][0][-1], rel=0.02)
    assert not equal(results["compact", "host"], results["fp32", "host"])


def test_formats_for_bf16_weights_are_refused_for_others(tmp_path: Path) -> None:
    model = Llama(SIZES)
    config = {"optimizer": {"state_format": "compact"}, "precision": {"compute_dtype": "fp32"}}
    with pytest.raises(ValueError, match="'compact' cannot hold float32 weights"):
        offload.initialize(model, config)
