"""How far `offload plan` is from what runs measure: four runs of a 110M-parameter Llama, each bound by something else.

    python examples/plan_accuracy.py --swap DIR

Prints a table of predicted and measured. Needs about 3 GB of memory and 5 GB of disk; nothing else should run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

COMMON = [
    "model.preset=110m",
    "train.batch_size=1",
    "train.steps=7",
    "train.eval_batches=0",
    "precision.compute_dtype=bf16",
    "optimizer.scheduler=none",
    "optimizer.warmup_steps=0",
    "memory.host=4GiB",
]


def placed(parameters: str, gradients: str, optimizer: str, state_format: str, context: int) -> list[str]:
    """Settings of one run."""
    return [
        f"placement.parameters={parameters}",
        f"placement.gradients={gradients}",
        f"placement.optimizer={optimizer}",
        f"optimizer.state_format={state_format}",
        f"data.context={context}",
    ]


RUNS = {
    "all in memory, 256 tokens": placed("host", "host", "host", "fp32", 256),
    "all in memory, 8 tokens": placed("host", "host", "host", "fp32", 8),
    "compact on nvme, 256 tokens": placed("nvme", "nvme", "nvme", "compact", 256),
    "fp32 on nvme, 32 tokens": placed("nvme", "nvme", "nvme", "fp32", 32),
}


def run(settings: list[str], swap: str) -> dict[str, object]:
    """The summary of one run."""
    with tempfile.TemporaryDirectory(dir=swap) as folder:
        command = [sys.executable, "-m", "offload", "train", *COMMON, *settings, f"memory.nvme_paths={swap}"]
        command += ["--run-dir", str(Path(folder) / "run"), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr)
        summary: dict[str, object] = json.loads(done.stdout)
        return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--swap", default=".", help="folder for swap files and run directories")
    parser.add_argument("--only", type=int, nargs="*", default=range(len(RUNS)), help="numbers of runs, from 0")
    arguments = parser.parse_args()
    print("| run | bound by | quantity | predicted | measured | off |\n|---|---|---|---|---|---|")
    for name, settings in [list(RUNS.items())[number] for number in arguments.only]:
        summary = run(settings, arguments.swap)
        plan, compared = summary["plan"], summary["predicted_against_measured"]
        assert isinstance(plan, dict) and isinstance(compared, dict), "no prediction was made"
        for quantity, row in compared.items():
            predicted, measured = row["predicted"], row["measured"]
            if not predicted and not measured:
                continue
            seconds = quantity == "step_seconds"
            cells = [f"{value:.2f} s" if seconds else f"{value / 1e6:,.1f} MB" for value in (predicted, measured)]
            off = f"{100 * (predicted / measured - 1):+.1f} %" if measured else "-"
            bound = plan["prediction"]["binding"]
            print(f"| {name} | {bound} | {quantity} | {cells[0]} | {cells[1]} | {off} |", flush=True)


if __name__ == "__main__":
    main()
