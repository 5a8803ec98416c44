"""What a save costs the steps beside it: `beside_program.py DIRECTORY [STEPS [ROUNDS]]`. Prints one JSON object.

A compute-bound workload (a tower of matrices, many rows), its states in host memory. The same number of steps is timed
without a save, with one beside them, and with one between two of them, in turn; ratios are those of the best rounds,
which whatever else the machine does has disturbed least. `ended`: whether the saves beside training were complete
within the time that was taken.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

import offload
from tests.checkpoint.large_program import Tower


def main(directory: str, steps: int, rounds: int) -> None:
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
    taken: dict[str, list[float]] = {"none": [], "beside": [], "between": []}
    ended = True
    for _ in range(rounds):
        for save, seconds in taken.items():
            seconds.append(run(save))
            ended = ended and not engine.saving
            engine.wait_checkpoint()
    best = {save: min(seconds) for save, seconds in taken.items()}
    ratios = {save: best[save] / best["none"] for save in ("beside", "between")}
    print(json.dumps({"seconds": taken, "over_none": ratios, "ended": ended}))
    engine.close()


if __name__ == "__main__":
    given = dict(enumerate(map(int, sys.argv[2:])))
    main(sys.argv[1], given.get(0, 6), given.get(1, 3))
