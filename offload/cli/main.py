"""Command group and the commands that need no engine."""

from __future__ import annotations

import sys
from typing import Any

try:
    import atexit
    import gc
    import importlib.metadata
    import platform

    import click

    from offload.cli.bench import bench_group
    from offload.cli.checkpoints import convert_command, inspect_command, verify_command
    from offload.cli.clean import clean_command
    from offload.cli.doctor import doctor_command
    from offload.cli.plan import plan_command
    from offload.cli.report import report_command
    from offload.cli.single import on_one_rank
    from offload.cli.train import train_command
except KeyboardInterrupt:
    # Ctrl-C in the first moments, before any command can handle it.
    print("error: interrupted by SIGINT", file=sys.stderr)
    sys.exit(130)


class _Commands(click.Group):
    """Commands that a Ctrl-C ends with the status that shells expect; click's own is 1."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("error: interrupted by SIGINT", err=True)
            sys.exit(130)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.pass_context
def main(ctx: click.Context) -> None:
    """Train models whose training state does not fit in memory."""
    if ctx.invoked_subcommand not in (None, "train", "bench"):
        on_one_rank(ctx.invoked_subcommand)
    # The interpreter's last collection goes through all of torch, seconds on a busy machine, for garbage that goes with
    # the process anyway. A library must not decide this for others, whose files may hang on it; a command may.
    atexit.register(gc.freeze)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def version(as_json: bool) -> None:
    """Print the versions of offload, torch and Python."""
    from offload.telemetry import dump_json

    versions = {name: _version_of(name) for name in ("offload", "torch")} | {"python": platform.python_version()}
    click.echo(dump_json(versions) if as_json else "\n".join(f"{name} {value}" for name, value in versions.items()))


def _version_of(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


main.add_command(train_command)
main.add_command(plan_command)
main.add_command(report_command)
main.add_command(bench_group)
main.add_command(convert_command)
main.add_command(inspect_command)
main.add_command(verify_command)
main.add_command(clean_command)
main.add_command(doctor_command)
