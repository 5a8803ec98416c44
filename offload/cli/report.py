"""``offload report``: pictures of a run."""

from __future__ import annotations

from pathlib import Path

import click

from offload.checkpoint.places import why_not_writable
from offload.cli.failures import reported
from offload.config import ConfigError
from offload.telemetry import dump_json


@click.command("report")
@click.argument("run", metavar="RUN")
@click.option("--out", default=None, help="Folder for the files; by default the run directory.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as one JSON object, and draw nothing.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def report_command(run: str, out: str | None, as_json: bool, debug: bool) -> None:
    """Draw what a run did: memory by tier, seconds of its steps, resources against their floors.

    RUN is the directory of a run. Writes report.html and a PNG for each picture. Needs the `report` extra.
    """
    with reported(debug=debug):
        from offload.report import figures, read_run, write_report

        record = read_run(run)
        if as_json:
            click.echo(dump_json(figures(record)))
            return
        folder = run if out is None else out
        if (reason := why_not_writable(Path(folder))) is not None:
            raise ConfigError([f"{folder}: {reason}; choose another place with --out"])
        for path in write_report(record, out):
            click.echo(str(path))
