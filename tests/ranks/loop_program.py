"""A user's own loop under `torchrun`, which fails, or ends, on one rank as the first argument says; the second is
`parallel.shard_size`.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import offload
from tests.engine.common import decoder, token_batches


def main(how: str, shard_size: int | None = None) -> None:
    rank = int(os.environ["RANK"])
    if how == "endless" and not dist.is_initialized():  # to begin may take long, where the engine's timeout is short
        dist.init_process_group("gloo", timeout=timedelta(minutes=5))
        dist.barrier()
    config: dict[str, Any] = {
        "device": "cpu",
        "memory": {"host": "1GiB", "device": "1GiB"},
        "placement": dict.fromkeys(("parameters", "gradients", "optimizer"), "host"),
        "parallel": {"stage": 3, "timeout": 8 if how == "endless" else 120},
    }
    if shard_size is not None:
        config["parallel"] |= {"shard_size": shard_size}
    engine = offload.initialize(decoder(), config)
    if rank == 0:
        print(f"{torch.get_num_threads()} threads\n", end="", flush=True)

    def train(steps: int) -> None:
        for step in range(steps):
            ids = token_batches(1, seed=step)[0]
            engine.backward(engine(ids, labels=ids).loss)
            if rank == 1 and step == 2:
                if how in ("raises", "raises-in-with"):
                    raise RuntimeError("the loader has no more")
                if how == "exits":
                    sys.exit(3)
                if how == "leaves":
                    return
                if how == "diverges":
                    engine.get_full("norm.weight", "grad")
            engine.step()
            if how == "endless" and rank == 0:
                print(f"step {step}\n", end="", flush=True)

    if how == "raises-in-with":
        with engine:
            train(1000)
    elif how == "done":
        train(2)
        engine.close()
        assert sys.excepthook.__module__ != "offload.parallel.exits"
        assert torch.get_num_threads() == 1
        print(f"rank {rank} done\n", end="", flush=True)
    elif how == "forgets":
        train(2)
        print(f"rank {rank} done\n", end="", flush=True)
    else:
        train(1_000_000)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:3]))
