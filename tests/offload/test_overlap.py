"""Overlap, read off the trace of a run: compute goes on while the disk works."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import offload
from offload.models import Llama, presets
from offload.telemetry.trace import COMPUTE, DISK_READ, DISK_WRITE, STEP, coincidence

TOKENS, MICRO_BATCHES, STEPS = 256, 4, 3


@pytest.mark.acceptance
@pytest.mark.timeout(900)
def test_the_disk_works_while_the_model_computes(tmp_path: Path) -> None:
    """States on nvme, four micro-batches unit by unit: at least 80 % of the shorter of the two times coincide."""
    sizes = presets["438m"]
    with offload.empty_init():
        model = Llama(sizes)
    config = {
        "device": "cpu",
        "memory": {"nvme_paths": [str(tmp_path)]},
        "placement": {"parameters": "host", "gradients": "host", "optimizer": "nvme"},
        "precision": {"compute_dtype": "bf16"},
        "optimizer": {"max_grad_norm": 1.0, "state_format": "compact"},
        "schedule": {"micro_batch_order": "layer_major"},
        "log": {"trace": True},
    }
    generator = torch.Generator().manual_seed(0)
    with offload.initialize(model, config) as engine:
        for _ in range(STEPS):
            ids = [torch.randint(0, sizes.vocab_size, (1, TOKENS), generator=generator) for _ in range(MICRO_BATCHES)]
            engine.train_batch([{"input_ids": part, "labels": part} for part in ids])
        spans = engine.spans.spans()
    steps = [span for span in spans if span.track == STEP]
    assert len(steps) == STEPS
    begun, ended = steps[1].begun_ns, steps[-1].ended_ns
    inside = [span for span in spans if span.ended_ns > begun and span.begun_ns < ended]
    compute, disk, both = coincidence(inside, [COMPUTE], [DISK_READ, DISK_WRITE])
    share = both / min(compute, disk)
    print(f"compute {compute:.2f} s, disk {disk:.2f} s, both at once {both:.2f} s: {100 * share:.0f} % of the shorter")
    assert share >= 0.8
