"""``offload doctor``: checks the machine."""

from __future__ import annotations

import sys

import click

from offload.cli.failures import reported
from offload.telemetry import dump_json


@click.command("doctor")
@click.argument("paths", nargs=-1, metavar="[PATH]...")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def doctor_command(paths: tuple[str, ...], as_json: bool, debug: bool) -> None:
    """What this machine gives and refuses: ok, warning or failure, each with the remedy.

    PATH is a directory for swap files (memory.nvme_paths); the working directory by default. Exit status 1 if a line
    is a failure.
    """
    with reported(debug=debug):
        from offload.doctor import examine, report, text, worst

        checks = examine(paths or (".",))
        click.echo(dump_json(report(checks)) if as_json else text(checks))
    sys.exit(1 if worst(checks) == "failure" else 0)
