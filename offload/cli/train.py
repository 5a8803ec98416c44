"""``offload train``: checks everything that can be checked first, then trains."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

import click

from offload.cli.failures import USER_ERROR, exit_status, reported
from offload.config import DEFAULT_FILE, Config, ConfigError, load_config
from offload.interruption import Interruption
from offload.telemetry import Progress, RunDirectory, dump_json


@click.command("train")
@click.argument("arguments", nargs=-1, metavar="[CONFIG] [SECTION.KEY=VALUE]...")
@click.option("--run-dir", help="Directory of the run; by default runs/<date>-<time>.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON on stdout, all else on stderr.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def train_command(arguments: Sequence[str], run_dir: str | None, as_json: bool, debug: bool) -> None:
    """Train a language model on text.

    CONFIG is a .toml or .json file. Without one, a Llama of about 20M parameters learns the text that ships with
    Python, its whole state in swap files. Any key can be set on the command line: train.steps=200 memory.host=1GiB.
    """
    with reported(debug=debug), Interruption() as interruption:
        status = _train(_config(arguments, run_dir), interruption, as_json=as_json)
    sys.exit(status)


def _config(arguments: Sequence[str], run_dir: str | None) -> Config:
    named = bool(arguments) and "=" not in arguments[0]
    source = arguments[0] if named else DEFAULT_FILE
    overrides = list(arguments[1:] if named else arguments)
    if run_dir is not None:
        overrides.append(f"run_dir={run_dir}")
    config = load_config(source, overrides)
    problems = [
        f"checkpoint.{key} = {value!r}: not in this version; remove the key"
        for key, value in config.checkpoint
        if value is not None
    ]
    if config.data.files:
        from offload.data import find_files

        try:
            find_files(config.data.files)
        except ValueError as error:
            problems.append(str(error))
    if config.model.factory is not None and os.getcwd() not in sys.path:
        # A factory beside the configuration is the usual case, and a console script does not look there by itself.
        sys.path.insert(0, os.getcwd())
    if problems:
        raise ConfigError(problems)
    return config


def _train(config: Config, interruption: Interruption, *, as_json: bool) -> int:
    stream = sys.stderr if as_json else sys.stdout
    run = RunDirectory(config.run_dir)
    progress = Progress(total=config.train.steps, stream=stream)
    try:
        run.write_config(config)
        with progress:
            with progress.phase("loading torch"):
                from offload.train import closing_lines, train
            summary = train(config, run=run, progress=progress, interruption=interruption)
    except Exception as error:
        if exit_status(error) == USER_ERROR and run.records == 0:
            run.discard()
        raise
    finally:
        run.close()
    for line in closing_lines(summary, run.path):
        click.echo(line, file=stream)
    if as_json:
        click.echo(dump_json(summary))
    return 128 + signal.Signals[summary["interrupted"]] if summary["interrupted"] else 0
