"""One configuration of `offload bench step` in a process of its own: `python -m offload.bench.step_worker SPEC`.

SPEC is a JSON object; the last line on stdout is another: seconds of each step (also of its forwards and backwards,
where the step is ours to take apart), bytes of disk per step (our own: of all steps on average), peak resident memory.
Peers run here too, under any Python that has them: of this package only the small reference model is imported then.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

LR, WEIGHT_DECAY, CLIP = 1e-3, 0.01, 1.0
Batches = list[Any]
Step = Callable[[Batches], dict[str, float]]
Built = tuple[Step, Callable[[], Mapping[str, Any]]]


def main(text: str) -> dict[str, Any]:
    """Runs what the JSON object in `text` says; returns what is printed.

    Keys: `system`, `model` (a preset), `tokens`, `micro_batches`, `steps`, `swap` (a folder), and for our own
    configurations `config`.
    """
    spec = json.loads(text)
    if spec["system"] == "offload":
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        from offload.machine import map_large_blocks_apart

        map_large_blocks_apart()  # as `offload train` does: before there is a heap to speak of
    import torch

    from offload.models import presets

    torch.manual_seed(0)
    sizes = presets[spec["model"]]
    step, close = _BUILDERS[spec["system"]](spec)
    generator = torch.Generator().manual_seed(1)
    rows: list[dict[str, float]] = []
    for _ in range(spec["steps"]):
        shape = (1, spec["tokens"])
        batches = [torch.randint(0, sizes.vocab_size, shape, generator=generator) for _ in range(spec["micro_batches"])]
        before, start = disk_bytes(), time.perf_counter()
        row = step(batches)
        row["seconds"] = time.perf_counter() - start
        after = disk_bytes()
        row.setdefault("disk_read_bytes", after[0] - before[0])
        row.setdefault("disk_write_bytes", after[1] - before[1])
        rows.append(row)
    about = dict(close())
    return {"steps": rows, "peak_rss_bytes": peak_rss_bytes(), **about}


def disk_bytes() -> tuple[int, int]:
    """Bytes that this process has had read from and written to block devices."""
    try:
        with open("/proc/self/io", encoding="ascii") as file:
            fields = dict(line.split(": ") for line in file.read().splitlines())
        return int(fields["read_bytes"]), int(fields["write_bytes"])
    except (OSError, KeyError):
        return 0, 0


def peak_rss_bytes() -> int:
    """Largest resident memory of this process so far."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))


def _ours(spec: Mapping[str, Any]) -> Built:
    import offload
    from offload.models import Llama, presets

    with offload.empty_init():
        model = Llama(presets[spec["model"]])
    engine = offload.initialize(model, spec["config"])
    before = engine.counters()

    def step(batches: Batches) -> dict[str, float]:
        result = engine.train_batch([{"input_ids": ids, "labels": ids} for ids in batches])
        return {"loss": float(result.loss or 0.0)}

    def close() -> dict[str, Any]:
        memory, text = engine.memory().to_dict(), engine.describe()
        # Updates and their writes reach into the step after their own, so that only all steps together have exact
        # bytes: those of what is at rest in the end.
        engine.synchronize()
        moved = {key: engine.counters()[key] - before[key] for key in ("nvme_read_bytes", "nvme_write_bytes")}
        engine.close()
        return {
            "memory": memory,
            "description": text,
            "disk_read_bytes": moved["nvme_read_bytes"] / spec["steps"],
            "disk_write_bytes": moved["nvme_write_bytes"] / spec["steps"],
        }

    return step, close


def _model(spec: Mapping[str, Any]) -> Any:
    from offload.models import Llama, presets

    return Llama(presets[spec["model"]])


def _plain(spec: Mapping[str, Any]) -> Built:
    """bf16 model in memory, fp32 masters, torch's fused AdamW, and the copies between them."""
    import torch

    model = _model(spec).bfloat16()
    masters = [torch.nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=LR, weight_decay=WEIGHT_DECAY, fused=True)

    def step(batches: Batches) -> dict[str, float]:
        loss_sum = forward = backward = 0.0
        for ids in batches:
            start = time.perf_counter()
            loss = model(ids, labels=ids).loss
            middle = time.perf_counter()
            (loss / len(batches)).backward()
            forward, backward = forward + middle - start, backward + time.perf_counter() - middle
            loss_sum += float(loss.detach())
        for master, parameter in zip(masters, model.parameters(), strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, CLIP)
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
                master.grad = None
        return {"loss": loss_sum / len(batches), "forward_seconds": forward, "backward_seconds": backward}

    return step, dict


def _single_process() -> None:
    for name, value in (("MASTER_ADDR", "127.0.0.1"), ("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        os.environ[name] = value
    import socket

    with socket.socket() as probe:  # a port that is free now
        probe.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(probe.getsockname()[1])


def _fsdp2(spec: Mapping[str, Any]) -> Built:
    """FSDP2 with CPUOffloadPolicy: a unit per block, bf16 compute over fp32 parameters."""
    _single_process()
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (1,))
    model = _model(spec)
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=False),
    }
    for block in model.layers:
        fully_shard(block, **options)
    sharded: Any = fully_shard(model, **options)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, fused=True)

    def step(batches: Batches) -> dict[str, float]:
        loss_sum = 0.0
        for number, ids in enumerate(batches, 1):
            sharded.set_requires_gradient_sync(number == len(batches))
            loss = sharded(ids, labels=ids).loss
            (loss / len(batches)).backward()
            loss_sum += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(sharded.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss_sum / len(batches)}

    def close() -> dict[str, Any]:
        dist.destroy_process_group()
        return {}

    return step, close


def _deepspeed(spec: Mapping[str, Any], tier: str) -> Built:
    """ZeRO-3 with parameters and optimizer states on `tier`: "cpu" or "nvme"."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    _single_process()
    import importlib

    from offload.models import presets

    deepspeed: Any = importlib.import_module("deepspeed")
    sizes = presets[spec["model"]]
    # DeepSpeed counts elements, and asserts where a buffer or their number is too small.
    largest = max(sizes.vocab_size * sizes.hidden_size, sizes.hidden_size * sizes.mlp_width)
    group = max(largest // 2, 1_000_000)
    place: dict[str, Any] = {"device": tier, "pin_memory": False}
    if tier == "nvme":
        place["nvme_path"] = spec.get("swap") or tempfile.mkdtemp(dir=".")
    zero = {
        "stage": 3,
        "sub_group_size": group,
        "reduce_bucket_size": group,
        "stage3_prefetch_bucket_size": group,
        "stage3_max_live_parameters": 2 * largest,
        "stage3_max_reuse_distance": 0,
        "offload_optimizer": {**place, "pipeline_read": True, "pipeline_write": True, "buffer_count": 14},
        "offload_param": {**place, "buffer_count": 24, "buffer_size": largest + 4096, "max_in_cpu": 0},
    }
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": spec["micro_batches"],
        "bf16": {"enabled": True},
        "gradient_clipping": CLIP,
        "steps_per_print": 1_000_000_000,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": WEIGHT_DECAY}},
        "zero_optimization": zero,
        "aio": {"block_size": 1 << 20, "queue_depth": 32, "overlap_events": True, "intra_op_parallelism": 1},
    }
    deepspeed.init_distributed(dist_backend="gloo")
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = _model(spec)
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())

    def step(batches: Batches) -> dict[str, float]:
        loss_sum = 0.0
        for ids in batches:
            loss = engine(ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            loss_sum += float(loss.detach())
        return {"loss": loss_sum / len(batches)}

    return step, dict


_BUILDERS: dict[str, Callable[[Mapping[str, Any]], Built]] = {
    "offload": _ours,
    "plain": _plain,
    "fsdp2-cpu": _fsdp2,
    "deepspeed-cpu": lambda spec: _deepspeed(spec, "cpu"),
    "deepspeed-nvme": lambda spec: _deepspeed(spec, "nvme"),
}

if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])), flush=True)
