"""Command group and the commands that need no engine."""

from __future__ import annotations

import sys
from typing import Any

try:
    import atexit
    import contextlib
    import gc
    import importlib.metadata
    import platform
    from collections.abc import Iterator

    import click

    from offload import __version__
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
    """Commands that a Ctrl-C ends with the status that shells expect (click's own is 1), and whose wrong options are
    told in one line, as all that a user can mend.
    """

    def make_context(self, *arguments: Any, **named: Any) -> click.Context:
        with _one_line():
            return super().make_context(*arguments, **named)

    def invoke(self, ctx: click.Context) -> Any:
        with _one_line():
            return super().invoke(ctx)


@contextlib.contextmanager
def _one_line() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        click.echo("error: interrupted by SIGINT", err=True)
        sys.exit(130)
    except click.UsageError as error:
        if isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ())):  # click 8.2 and later
            raise
        text = " ".join(error.format_message().split()).removesuffix(".")
        hint = "" if error.ctx is None else f" ({error.ctx.command_path} --help shows what there is)"
        click.echo(f"error: {text}{hint}", err=True)
        sys.exit(error.exit_code)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="offload %(version)s")
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

    versions = {"offload": __version__, "torch": _version_of("torch"), "python": platform.python_version()}
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
