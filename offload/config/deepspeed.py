"""What DeepSpeed's keys are called here. Its sections are refused with their equivalents, so nothing is lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Meaning = str | Callable[[Any], str]
"""Why a key has no equivalent, or what says the equivalent of its value."""


def _same(ours: str) -> Callable[[Any], str]:
    return lambda value: f"{ours} = {_toml(value)}"


def _dtype(ours: str) -> Callable[[Any], str]:
    return lambda value: f"{ours} = {_toml(_DTYPES.get(value, value))}"


def _bytes(ours: str) -> Callable[[Any], str]:
    """From elements to bytes, of weights of 2 bytes each."""
    return lambda value: f"{ours} = {_toml(2 * value if _is_count(value) else value)} (bytes, of bf16 weights)"


def _tier(ours: str) -> Callable[[Any], str]:
    def meant(value: Any) -> str:
        device = value.get("device", "none") if isinstance(value, Mapping) else value
        paths = ""
        if isinstance(value, Mapping) and value.get("nvme_path"):
            paths = f" with memory.nvme_paths = [{_toml(str(value['nvme_path']))}]"
        return f"{ours} = {_toml({'cpu': 'host', 'none': 'device'}.get(str(device), device))}{paths}"

    return meant


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_ONE_BUFFER = "a unit is one buffer and one collective; its size follows from units.wrap"
_ALWAYS = "always so"
_NOT_QUANTISED = "nothing is quantised on its way; precision.reduce_dtype chooses the dtype of gradients"

_ZERO: dict[str, Meaning] = {
    "stage": _same("parallel.stage"),
    "zero_hpz_partition_size": lambda n: (
        "parallel.reshard_after_forward = " + ("true" if n == 1 else _toml(n))  # a group of one is none at all there
    ),
    "mics_shard_size": lambda n: f"parallel.shard_size = {_toml(n) if _is_count(n) and n > 0 else repr('auto')}",
    "param_persistence_threshold": _bytes("units.persistent_below"),
    "prefetch_bucket_size": _bytes("parallel.limit_gathers"),
    "max_live_parameters": lambda _: "memory.device, a budget in bytes of all that is on the device",
    "offload_param": _tier("placement.parameters"),
    "offload_optimizer": _tier("placement.optimizer"),
    "overlap_comm": f"{_ALWAYS}: collectives run beside compute",
    "reduce_scatter": f"{_ALWAYS} from stage 1 on",
    "contiguous_gradients": f"{_ALWAYS}: gradients of a unit are one buffer",
    "reduce_bucket_size": _ONE_BUFFER,
    "allgather_bucket_size": _ONE_BUFFER,
    "use_multi_rank_bucket_allreduce": _ONE_BUFFER,
    "allgather_partitions": f"{_ALWAYS}: updated weights are gathered",
    "round_robin_gradients": "every rank owns an equal part of every unit, so there is nothing to balance",
    "sub_group_size": "the step goes through units chunk by chunk; swap.chunk sets the size in bytes",
    "max_reuse_distance": "units are released after use; parallel.reshard_after_forward = false keeps them",
    "model_persistence_threshold": "units.persistent_below has no cap on the sum",
    "gather_16bit_weights_on_model_save": f"{_ALWAYS}: export_safetensors writes whole tensors",
    "ignore_unused_parameters": _ALWAYS,
    "elastic_checkpoint": f"{_ALWAYS}: checkpoints load at any number of ranks",
    "load_from_fp32_weights": _ALWAYS,
    "mics_hierarchical_params_gather": "gathers go from rank to rank within a group",
    "zero_quantized_weights": _NOT_QUANTISED,
    "zero_quantized_nontrainable_weights": _NOT_QUANTISED,
    "zero_quantized_gradients": _NOT_QUANTISED,
}
_FP16: dict[str, Meaning] = {
    "enabled": lambda on: f"precision.compute_dtype = {_toml('fp16' if on else 'auto')}",
    "loss_scale": lambda scale: f"precision.loss_scale = {_toml('dynamic' if scale == 0 else scale)}",
    "initial_scale_power": lambda power: (
        f"precision.initial_loss_scale = {2.0**power if _is_count(power) and abs(power) < 1000 else power}"
    ),
    "loss_scale_window": _same("precision.loss_scale_window"),
    "hysteresis": _same("precision.hysteresis"),
    "min_loss_scale": _same("precision.min_loss_scale"),
    "consecutive_hysteresis": "the hysteresis is refilled where the scale changes",
    "auto_cast": "inputs are not cast",
    "fp16_master_weights_and_grads": "master weights are fp32; optimizer.state_format = 'compact' is smaller",
}
_BF16: dict[str, Meaning] = {
    "enabled": lambda on: f"precision.compute_dtype = {_toml('bf16' if on else 'auto')}",
    "check_grad_overflow": _same("optimizer.check_finite"),
    "immediate_grad_update": "schedule.optimizer_step says when units are updated",
    "bf16_master_weights_and_grads": "master weights are fp32; optimizer.state_format = 'compact' is smaller",
    "bf16_optimizer_states": "optimizer.state_format = 'compact' is smaller",
}
_SECTIONS: dict[str, dict[str, Meaning]] = {
    "zero_optimization": _ZERO,
    "fp16": _FP16,
    "bf16": _BF16,
    "bfloat16": _BF16,
    "data_types": {"grad_accum_dtype": _dtype("precision.accumulate_dtype")},
}
_KEYS: dict[str, Meaning] = {
    "communication_data_type": _dtype("precision.reduce_dtype"),
    "gradient_accumulation_steps": _same("train.micro_batches"),
    "gradient_clipping": _same("optimizer.max_grad_norm"),
    "train_micro_batch_size_per_gpu": lambda n: f"train.batch_size, of all ranks: {_toml(n)} times their number",
    "train_batch_size": "the product of train.batch_size and train.micro_batches",
    "prescale_gradients": "gradients are summed in fp32 and divided once",
    "gradient_predivide_factor": "gradients are summed in fp32 and divided once",
    "zero_allow_untested_optimizer": "the optimizer is AdamW",
    "zero_force_ds_cpu_optimizer": "the optimizer is AdamW",
}


def equivalent(key: str, value: Any) -> str | None:
    """One line for a key of DeepSpeed at the top level: what does the same here, what is of no use, and what of it is
    not known; None for others.
    """
    if key == "aio":
        return aio_equivalent(value)
    if key in _KEYS:
        meaning = _KEYS[key]
        said = f"no equivalent is needed ({meaning})" if isinstance(meaning, str) else f"here {meaning(value)}"
        return f"{key}: a key of DeepSpeed; {said}"
    if key not in _SECTIONS:
        return None
    known, ours, idle, strange = _SECTIONS[key], [], [], []
    for name, setting in (value if isinstance(value, Mapping) else {}).items():
        meaning_of = known.get(str(name).removeprefix("stage3_"))
        if meaning_of is None:
            strange.append(str(name))
        elif isinstance(meaning_of, str):
            idle.append(f"{name} ({meaning_of})")
        elif setting == "auto":
            idle.append(f"{name} ('auto', as here)")
        else:
            ours.append(f"{meaning_of(setting)} ({name})")
    text = f"{key}: a section of DeepSpeed"
    text += f"; the equivalent here is {', '.join(ours)}" if ours else ""
    text += f"; without equivalent: {', '.join(idle)}" if idle else ""
    return text + (f"; not known: {', '.join(strange)}" if strange else "")


_NO_EQUIVALENT = {
    "single_submit": "requests are submitted in batches",
    "overlap_events": "submission and completion always overlap",
    "use_gds": "there is no GPUDirect Storage engine",
}


def aio_equivalent(values: Any) -> str:
    """One line for a configuration that has an ``aio`` section (``values``): the ``[swap]`` keys that do the same."""
    if not isinstance(values, Mapping):
        values = {}
    block = values.get("block_size", 1048576)
    depth = values.get("queue_depth", 8)
    threads = values.get("intra_op_parallelism", values.get("thread_count", 1))
    flight = depth * threads if isinstance(depth, int) and isinstance(threads, int) else depth
    text = f"aio: a section of DeepSpeed; the equivalent here is swap.block = {block} (block_size), "
    text += f"swap.queue_depth = {flight}"
    text += " (queue_depth times intra_op_parallelism)" if threads != 1 else " (queue_depth)"
    idle = [f"{key} ({why})" for key, why in _NO_EQUIVALENT.items() if key in values]
    if idle:
        text += f"; without equivalent: {', '.join(idle)}"
    return text + "; or leave both 'auto': 'offload bench io PATH' prints the best for your drive"
