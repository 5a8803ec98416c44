"""``offload plan``: what a run will take, before it begins."""

from __future__ import annotations

from collections.abc import Sequence

import click

from offload.cli.checks import check
from offload.cli.failures import reported
from offload.config import DEFAULT_FILE, ConfigError, load_config
from offload.telemetry import dump_json


@click.command("plan")
@click.argument("arguments", nargs=-1, metavar="[CONFIG] [SECTION.KEY=VALUE]...")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def plan_command(arguments: Sequence[str], as_json: bool, debug: bool) -> None:
    """Bytes per tier, seconds per phase, and what would help.

    CONFIG is a file as for `offload train`. Measures this machine for some seconds: memory, the model's operations,
    the optimizer's kernel, and a drive that no run has used yet. Nothing of the model is allocated.
    """
    with reported(debug=debug):
        named = bool(arguments) and "=" not in arguments[0]
        config = load_config(arguments[0] if named else DEFAULT_FILE, list(arguments[1:] if named else arguments))
        check(config)
        from offload.planner.plan import plan_config

        try:
            report = plan_config(config)
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(" ".join(str(error).split())) from error
        click.echo(dump_json(report.to_dict()) if as_json else str(report))
