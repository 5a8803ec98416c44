"""``offload bench``: measurements of this machine and of our own code on it."""

from __future__ import annotations

import click


@click.group("bench")
def bench_group() -> None:
    """Measure this machine and what offload makes of it."""


@bench_group.command("optimizer")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--elements", type=click.IntRange(min=4096), default=None, help="Parameters per case; 32Mi by default.")
@click.option("--rounds", type=click.IntRange(min=1), default=None, help="Interleaved repetitions; 15 by default.")
@click.option("--threads", type=click.IntRange(min=1), default=None, help="By default those of a training run.")
@click.option("--quick", is_flag=True, help="Only bf16 gradients and one thread count.")
def optimizer_command(
    as_json: bool, elements: int | None, rounds: int | None, threads: int | None, quick: bool
) -> None:
    """The CPU optimizer's kernels against the memory bandwidth of this machine and against other optimizers.

    One process times everything in turn: streaming bandwidth, each state format, torch's fused AdamW between the copies
    that low-precision training needs around it, and DeepSpeedCPUAdam where it is installed.
    """
    from offload.bench import optimizer

    try:
        text = optimizer.run(
            as_json,
            elements=elements or optimizer.DEFAULT_ELEMENTS,
            rounds=rounds or optimizer.DEFAULT_ROUNDS,
            threads=threads,
            quick=quick,
        )
    except ValueError as error:  # OFFLOAD_ISA, OFFLOAD_THREADS
        raise click.UsageError(str(error)) from None
    click.echo(text)
