"""``offload bench step``."""

from __future__ import annotations

import shutil
import sys

import click

from offload.cli.failures import reported
from offload.cli.options import FOLDER, SIZE
from offload.config import ConfigError


@click.command("step")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; progress goes to stderr.")
@click.option("--model", default="438m", show_default=True, help="Preset of the small Llama.")
@click.option("--tokens", type=click.IntRange(min=2), default=256, show_default=True, help="Of one micro-batch.")
@click.option("--micro-batches", type=click.IntRange(min=1), multiple=True, help="In a step; 1 and 4 by default.")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True, help="Interleaved repetitions.")
@click.option("--steps", type=click.IntRange(min=1), default=5, show_default=True, help="Of each process.")
@click.option("--swap", type=FOLDER, default=".", help="Folder for swap files.")
@click.option("--peers", is_flag=True, help="Also FSDP2 with CPU offload and DeepSpeed ZeRO-3, where they are.")
@click.option("--peers-python", default=None, help="The Python that has them; by default this one.")
@click.option("--only", multiple=True, type=click.Choice(["a", "b", "c"]), help="Not all of our configurations.")
@click.option("--no-recompute", is_flag=True, help="Without the row that recomputes activations.")
@click.option("--schedule", type=click.Choice(["auto", "barrier", "deferred", "eager"]), default="auto")
@click.option("--disk-bytes", type=SIZE, default="1GiB", show_default=True, help="Of one measurement of the drive.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def step_command(
    as_json: bool,
    model: str,
    tokens: int,
    micro_batches: tuple[int, ...],
    rounds: int,
    steps: int,
    swap: str,
    peers: bool,
    peers_python: str | None,
    only: tuple[str, ...],
    no_recompute: bool,
    schedule: str,
    disk_bytes: int,
    debug: bool,
) -> None:
    """Whole training steps beside their floors, and beside plain PyTorch and other systems.

    (a) compact states on nvme, weights and gradients on host; (b) compact, everything on nvme; (c) fp32 states and
    weights on nvme, gradients on host. Each in a process of its own, rounds interleaved, medians.
    """
    with reported(debug=debug):
        if peers_python is not None and shutil.which(peers_python) is None:
            raise ConfigError([f"--peers-python {peers_python}: no such program"])
        from offload.bench import step

        try:
            text = step.run(
                as_json,
                model=model,
                tokens=tokens,
                micro_batches=micro_batches or (1, 4),
                rounds=rounds,
                steps=steps,
                swap=swap,
                peers=peers,
                peers_python=peers_python or sys.executable,
                only=only,
                recompute=not no_recompute,
                schedule=schedule,
                disk_bytes=disk_bytes,
                say=lambda line: click.echo(line, err=True),
            )
        except ValueError as error:
            raise ConfigError([" ".join(str(error).split())]) from error
        except RuntimeError as error:
            raise click.ClickException(" ".join(str(error).split())) from error
        click.echo(text)
