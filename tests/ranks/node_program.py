"""What `test_namespaces` runs on every rank: trainings, whose hashes rank 0 prints, by number. With a second argument
they are followed by the endless one of `loop_program`.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.ranks import loop_program
from tests.ranks.training import Run, trained_digest


def main() -> None:
    runs = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    try:
        for number, values in enumerate(runs):
            run = Run(**{**values, "numbers": tuple(values["numbers"])})
            folder = Path.cwd() / f"run{number}"
            digest, _ = trained_digest(run, folder)
            if dist.get_rank() == 0:
                print(f"run {number} {digest}")
            # Each node has a path of its own, which only its ranks use.
            ranks = sorted(entry.name for entry in folder.iterdir())
            first = 2 * int(os.environ["NODE"])
            assert set(ranks) <= {f"rank{first}", f"rank{first + 1}"}, ranks
        dist.barrier()
        if sys.argv[2:] == ["endless"]:
            loop_program.main("endless", dist.get_world_size())
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
