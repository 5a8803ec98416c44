"""``offload bench memory`` and ``offload bench communication``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from offload.cli.failures import reported
from offload.config import ConfigError


def _options(function: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--debug", is_flag=True, help="Show the traceback of an error."),
        click.option("--layers", type=click.IntRange(min=1), default=6, show_default=True, help="Blocks of the model."),
        click.option(
            "--hidden", type=click.IntRange(min=16), default=512, show_default=True, help="Width of the model."
        ),
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object."),
    ):
        function = option(function)
    return function


def _say(run: Callable[..., str | None], as_json: bool, hidden: int, layers: int, debug: bool) -> None:
    with reported(debug=debug):
        try:
            text = run(as_json, hidden=hidden, layers=layers)
        except ValueError as error:
            raise ConfigError([" ".join(str(error).split())]) from error
        if text is not None:
            click.echo(text)


@click.command("memory")
@_options
def memory_command(as_json: bool, hidden: int, layers: int, debug: bool) -> None:
    """Bytes per parameter of every stage on the launcher's ranks: torchrun --nproc_per_node N -m offload bench memory.

    Counted from live tensors between the last backward and the step, beside ZeRO's formula.
    """
    from offload.bench import memory

    _say(memory.run, as_json, hidden, layers, debug)


@click.command("communication")
@_options
def communication_command(as_json: bool, hidden: int, layers: int, debug: bool) -> None:
    """Bytes through collectives in a step of every stage, beside their formula and the loopback interface's count.

    torchrun --nproc_per_node N -m offload bench communication
    """
    from offload.bench import communication

    _say(communication.run, as_json, hidden, layers, debug)
