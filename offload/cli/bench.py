"""``offload bench``: measurements of this machine and of our own code on it."""

from __future__ import annotations

import click

from offload.cli.bench_ranks import communication_command, memory_command
from offload.cli.bench_step import step_command
from offload.cli.options import FOLDER, SIZE
from offload.cli.single import on_one_rank


@click.group("bench")
@click.pass_context
def bench_group(ctx: click.Context) -> None:
    """Measure this machine and what offload makes of it."""
    if ctx.invoked_subcommand not in (None, "memory", "communication"):
        on_one_rank(f"bench {ctx.invoked_subcommand}")


bench_group.add_command(step_command)
bench_group.add_command(memory_command)
bench_group.add_command(communication_command)


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


@bench_group.command("overhead")
@click.argument("path", type=FOLDER, required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--rounds", type=click.IntRange(min=1), default=None, help="Interleaved repetitions; 15 by default.")
def overhead_command(path: str | None, as_json: bool, rounds: int | None) -> None:
    """What the engine's Python costs per unit and pass: 2,000 small parameters in 50 units, and 3 huge ones.

    Swap files go to a temporary folder under PATH, by default that of the system.
    """
    from offload.bench import overhead

    click.echo(overhead.run(as_json, rounds=rounds or overhead.DEFAULT_ROUNDS, path=path))


@bench_group.command("models")
@click.option("--mode", "modes", multiple=True, help="Only this mode: train, checkpointing, or 'compiled blocks'.")
@click.option(
    "--write",
    type=click.Path(exists=True, dir_okay=False, writable=True),
    metavar="FILE",
    default=None,
    help="Put the table into FILE.",
)
def models_command(modes: tuple[str, ...], write: str | None) -> None:
    """Small models of many architectures with and without offload, bit for bit. Needs transformers and peft."""
    from importlib.util import find_spec
    from pathlib import Path

    from offload.bench import architectures

    if unknown := set(modes) - set(architectures.MODES):
        raise click.UsageError(f"no mode {', '.join(sorted(unknown))}; there are {', '.join(architectures.MODES)}")
    # Each would be an error in a cell of its own, and with --write they would replace a good table.
    if absent := [name for name in ("transformers", "peft") if find_spec(name) is None]:
        raise click.UsageError(f"not installed: {', '.join(absent)}; pip install {' '.join(absent)}")
    click.echo(
        architectures.run(
            lambda line: click.echo(line, err=True),
            modes=modes or tuple(architectures.MODES),
            write=None if write is None else Path(write),
        )
    )


@bench_group.command("io")
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; progress goes to stderr.")
@click.option(
    "--bytes", "size", type=SIZE, default="4GiB", show_default=True, help="Bytes of the last, long measurement."
)
@click.option("--rounds", type=click.IntRange(min=1), default=1, show_default=True, help="Repetitions of it.")
@click.option("--engine", "engines", multiple=True, type=click.Choice(["io_uring", "threads", "aiofiles"]))
@click.option("--request", type=SIZE, default=None, help="Bytes of one request to the store; by default 64 MiB.")
@click.option("--checksum", is_flag=True, help="With swap.checksum in the long measurement.")
@click.option("--no-fio", is_flag=True, help="Do not run fio, even if it is installed.")
@click.option("--quick", is_flag=True, help="One setting per engine instead of a sweep.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def io_command(
    paths: tuple[str, ...],
    as_json: bool,
    size: int,
    rounds: int,
    engines: tuple[str, ...],
    request: int | None,
    checksum: bool,
    no_fio: bool,
    quick: bool,
    debug: bool,
) -> None:
    """The drives under PATH (striped over all), with every engine, and beside fio where that is installed.

    Writes several times --bytes to each path. Prints the rates, the best setting with its [swap] section, and the
    mixing penalty delta: a step that reads r and writes w bytes takes max(r/R, w/W) + delta * min(r/R, w/W).
    """
    from offload.cli.failures import reported
    from offload.config import ConfigError

    with reported(debug=debug):
        from offload.bench import io

        try:
            text = io.run(
                paths,
                nbytes=size,
                rounds=rounds,
                engines=engines,
                with_fio=not no_fio,
                quick=quick,
                request=request,
                checksum=checksum,
                as_json=as_json,
                say=lambda line: click.echo(line, err=True),
            )
        except ValueError as error:
            raise ConfigError([" ".join(str(error).split())]) from error
        click.echo(text)
