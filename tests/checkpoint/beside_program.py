"""What a save costs the steps beside it: `beside_program.py DIRECTORY [STEPS]`. Prints one JSON object.

A compute-bound workload (a tower of matrices, many rows), its states in host memory. The same number of steps is timed
without a save, with one beside them, and with one between two of them.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

import offload
from tests.checkpoint.large_program import Tower


def main(directory: str, steps: int) -> None:
    root = Path(directory)
    root.mkdir(parents=True, exist_ok=True)
    with offload.empty_init():
        model = Tower(8, 2048)
    engine = offload.initialize(
        model,
        {
            "device": "cpu",
            "placement": {"parameters": "host", "optimizer": "host", "gradients": "host"},
            "precision": {"compute_dtype": "bf16"},
        },
    )
    x = torch.randn(1024, 2048).bfloat16()

    def run(save: str) -> float:
        began = time.perf_counter()
        for step in range(steps):
            if step == 1 and save != "none":
                engine.save_checkpoint(root / "ck", wait=save == "between", share=0.5, keep=1)
            engine.backward(engine(x))
            engine.step()
        engine.synchronize()
        return time.perf_counter() - began

    run("none")
    seconds = {save: run(save) for save in ("none", "beside", "between")}
    engine.wait_checkpoint()
    print(json.dumps({"seconds": seconds, "beside_over_none": seconds["beside"] / seconds["none"]}))
    engine.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 8)
