"""DeepSpeed's keys are refused with what they are called here; none is dropped without a word."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import offload
from offload.config import load_config

ZERO: list[tuple[str, Any, str]] = [
    ("stage", 3, "parallel.stage = 3 (stage)"),
    ("zero_hpz_partition_size", 8, "parallel.reshard_after_forward = 8"),
    ("zero_hpz_partition_size", 1, "parallel.reshard_after_forward = true"),
    ("mics_shard_size", 4, "parallel.shard_size = 4"),
    ("mics_shard_size", -1, "parallel.shard_size = 'auto'"),
    ("stage3_max_live_parameters", 1e9, "memory.device"),
    ("stage3_prefetch_bucket_size", 50_000_000, "parallel.limit_gathers = 100000000 (bytes"),
    ("stage3_param_persistence_threshold", 100_000, "units.persistent_below = 200000 (bytes"),
    ("stage3_param_persistence_threshold", "auto", "without equivalent: stage3_param_persistence_threshold ('auto'"),
    ("offload_optimizer", {"device": "nvme", "nvme_path": "/d"}, "placement.optimizer = 'nvme' with memory.nvme_paths"),
    ("offload_param", {"device": "cpu"}, "placement.parameters = 'host'"),
    ("overlap_comm", True, "overlap_comm (always so: collectives run beside compute)"),
    ("reduce_bucket_size", 5e8, "reduce_bucket_size (a unit is one buffer"),
    ("allgather_bucket_size", 5e8, "allgather_bucket_size (a unit is one buffer"),
    ("reduce_scatter", True, "reduce_scatter (always so"),
    ("contiguous_gradients", True, "contiguous_gradients (always so"),
    ("round_robin_gradients", True, "round_robin_gradients (every rank owns an equal part"),
    ("zero_quantized_weights", True, "zero_quantized_weights (nothing is quantised"),
    ("some_new_key", 1, "not known: some_new_key"),
]
OTHERS: list[tuple[str, Any, str]] = [
    ("fp16", {"enabled": True}, "precision.compute_dtype = 'fp16' (enabled)"),
    ("fp16", {"loss_scale": 0}, "precision.loss_scale = 'dynamic'"),
    ("fp16", {"loss_scale": 128}, "precision.loss_scale = 128"),
    ("fp16", {"initial_scale_power": 16}, "precision.initial_loss_scale = 65536.0"),
    ("fp16", {"loss_scale_window": 500}, "precision.loss_scale_window = 500"),
    ("fp16", {"hysteresis": 2}, "precision.hysteresis = 2"),
    ("fp16", {"min_loss_scale": 1}, "precision.min_loss_scale = 1"),
    (
        "fp16",
        {"consecutive_hysteresis": True},
        "without equivalent: consecutive_hysteresis (the hysteresis is",
    ),
    ("bf16", {"enabled": True}, "precision.compute_dtype = 'bf16'"),
    ("data_types", {"grad_accum_dtype": "fp32"}, "precision.accumulate_dtype = 'fp32'"),
    ("communication_data_type", "bfp16", "precision.reduce_dtype = 'bfp16'"),
    ("communication_data_type", "bfloat16", "precision.reduce_dtype = 'bf16'"),
    ("gradient_accumulation_steps", 8, "train.micro_batches = 8"),
    ("gradient_clipping", 1.0, "optimizer.max_grad_norm = 1.0"),
    ("train_micro_batch_size_per_gpu", 4, "train.batch_size, of all ranks: 4 times their number"),
    ("train_batch_size", 64, "the product of train.batch_size and train.micro_batches"),
]


@pytest.mark.parametrize(("key", "value", "said"), ZERO, ids=[f"{key}={value}" for key, value, _ in ZERO])
def test_every_key_of_zero_is_answered(key: str, value: Any, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        offload.Config(zero_optimization={key: value})


@pytest.mark.parametrize(("key", "value", "said"), OTHERS, ids=[f"{key}={value}" for key, value, _ in OTHERS])
def test_other_keys(key: str, value: Any, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        offload.Config(**{key: value})


def test_a_file_is_answered_section_by_section(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}, "aio": {}}))
    with pytest.raises(offload.ConfigError) as caught:
        load_config(path)
    said = caught.value.problems
    assert len(said) == 3 and all(line.startswith(f"{path}: ") for line in said)
    # What the lines say is a configuration.
    assert load_config(None, ["parallel.stage=2", "precision.compute_dtype='bf16'"]).parallel.number == 2
