"""Saves, loads and exports a model of some size and says what it took:
`large_program.py DIRECTORY BLOCKS WIDTH TIER [ROUNDS]`.

Prints one JSON object: bytes of state, peak resident bytes of the whole process, seconds of each operation (the best of
the rounds), the disk's sequential bandwidth (bytes per second, direct I/O, the best of a few block sizes and of a probe
before each round and after the last), and `of_disk`: the time that the disk would take at that bandwidth over the time
that saving and loading took. With the states on nvme each byte is both read and written. ROUNDS 0: one round, and the
disk is not measured.
"""

from __future__ import annotations

import json
import mmap
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

import offload


class Tower(nn.Module):
    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width, bias=False)) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.float().pow(2).mean()


def disk(path: Path, total: int) -> dict[str, float]:
    """Sequential bandwidth of one thread's direct writes and reads of `total` bytes, the best block size of three."""
    best = {"write": 0.0, "read": 0.0}
    for block in (4 << 20, 8 << 20, 16 << 20):
        buffer = mmap.mmap(-1, block)
        buffer.write(os.urandom(1 << 20) * (block >> 20))
        fd = os.open(path / "probe", os.O_CREAT | os.O_RDWR | os.O_DIRECT, 0o644)
        try:
            os.posix_fallocate(fd, 0, total)
            for name, move in (("write", os.pwrite), ("read", lambda fd, b, at: os.preadv(fd, [b], at))):
                began = time.perf_counter()
                for at in range(0, total, block):
                    move(fd, buffer, at)
                os.fsync(fd)
                best[name] = max(best[name], total / (time.perf_counter() - began))
        finally:
            os.close(fd)
            os.unlink(path / "probe")
    return best


def build(blocks: int, width: int, tier: str, swap: Path) -> offload.Engine:
    with offload.empty_init():
        model = Tower(blocks, width)
    return offload.initialize(
        model,
        {
            "device": "cpu",
            "memory": {"nvme_paths": [str(swap)], "host": "400MiB" if tier == "nvme" else "auto"},
            "placement": {"parameters": tier, "optimizer": tier, "gradients": tier},
            "precision": {"compute_dtype": "bf16"},
        },
    )


def main(directory: str, blocks: int, width: int, tier: str, rounds: int) -> None:
    root = Path(directory)
    swap = root / "swap"
    swap.mkdir(parents=True)
    seconds: dict[str, float] = {}
    speeds = {"write": 0.0, "read": 0.0}

    def timed(name: str, action: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = action()
        seconds[name] = min(seconds.get(name, float("inf")), time.perf_counter() - began)
        return result

    def probe(total: int) -> None:
        speeds.update({name: max(speeds[name], speed) for name, speed in disk(root, total).items()})

    before = psutil.Process().memory_info().rss
    engine = build(blocks, width, tier, swap)
    x = torch.randn(2, width).bfloat16()
    engine.backward(engine(x))
    engine.step()
    engine.synchronize()
    size = min(1 << 30, max(64 << 20, engine.checkpoint_bytes()))
    for _ in range(max(1, rounds)):
        if rounds:
            probe(size)
        saved = timed("save", lambda: engine.save_checkpoint(root / "ck"))
        timed("load", lambda: (engine.load_checkpoint(root / "ck"), engine.synchronize()))
    if rounds:
        probe(size)
    exported = timed("export", lambda: engine.export_safetensors(root / "out", max_shard_size="2GB"))
    timed("verify", lambda: _verify(saved.path))
    engine.close()
    floor = {"save": saved.nbytes / speeds["write"], "load": saved.nbytes / speeds["read"]} if rounds else {}
    if tier == "nvme":
        floor = dict.fromkeys(floor, sum(floor.values()))
    result = {
        "state_bytes": blocks * width * width * 14,
        "checkpoint_bytes": saved.nbytes,
        "export_bytes": exported.nbytes,
        "seconds": seconds,
        "resident_before": before,
        "peak_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "disk": speeds,
        "of_disk": {name: floor[name] / seconds[name] for name in floor},
    }
    print(json.dumps(result))


def _verify(path: Path) -> None:
    with offload.checkpoint.Source(path) as source:
        source.verify()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5]) if len(sys.argv) > 5 else 1)
