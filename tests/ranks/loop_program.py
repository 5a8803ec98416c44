"""A user's own loop under `torchrun`, which fails, or ends, on one rank as the first argument says."""

from __future__ import annotations

import os
import sys

import torch

import offload
from tests.engine.common import decoder, token_batches


def main(how: str) -> None:
    rank = int(os.environ["RANK"])
    config = {
        "device": "cpu",
        "memory": {"host": "1GiB", "device": "1GiB"},
        "placement": dict.fromkeys(("parameters", "gradients", "optimizer"), "host"),
        "parallel": {"stage": 3, "timeout": 8},
    }
    engine = offload.initialize(decoder(), config)
    if rank == 0:
        print(f"{torch.get_num_threads()} threads", flush=True)

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
            engine.step()

    if how == "raises-in-with":
        with engine:
            train(1000)
    elif how == "done":
        train(2)
        engine.close()
        assert sys.excepthook.__module__ != "offload.parallel.exits"
        assert torch.get_num_threads() == 1
        print(f"rank {rank} done", flush=True)
    elif how == "forgets":
        train(2)
        print(f"rank {rank} done", flush=True)
    else:
        train(1000)


if __name__ == "__main__":
    main(sys.argv[1])
