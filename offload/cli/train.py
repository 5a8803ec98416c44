"""``offload train``: checks everything that can be checked first, then trains."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from offload.checkpoint.places import directory_of, newest_run, resolve_resume
from offload.cli.checks import check, unwritable
from offload.cli.failures import NOT_SAVED, USER_ERROR, exit_status, reported
from offload.config import DEFAULT_FILE, Config, ConfigError, load_config
from offload.interruption import FORCE_AFTER_SECONDS, LAUNCHED_SECONDS, Interruption
from offload.machine import map_large_blocks_apart
from offload.parallel.job import Follower, Job, launched_ranks
from offload.telemetry import Progress, RunDirectory, dump_json


@click.command("train")
@click.argument("arguments", nargs=-1, metavar="[CONFIG] [SECTION.KEY=VALUE]...")
@click.option("--run-dir", help="Directory of the run; by default runs/<date>-<time>.")
@click.option("--resume", help="Continue: 'auto' from the newest complete checkpoint, if any; or the PATH of one.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON on stdout, all else on stderr.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def train_command(
    arguments: Sequence[str], run_dir: str | None, resume: str | None, as_json: bool, debug: bool
) -> None:
    """Train a language model on text.

    CONFIG is a .toml or .json file. Without one, a Llama of about 20M parameters learns the text that ships with
    Python, its whole state in swap files. Any key can be set on the command line: train.steps=200 memory.host=1GiB.

    With --resume auto the same command can be repeated until the run is done; without --run-dir it continues the run
    below runs/ that saved last, and without CONFIG as that run was configured. SIGTERM and SIGUSR1 save a checkpoint
    and end the run with status 143 or 138; a second signal ends it at once. Under torchrun a signal to any rank ends
    all of them so. A run whose last checkpoint could not be saved ends with status 3.
    """
    map_large_blocks_apart()  # `initialize` does so too, but by then there are holes from building the model
    apart = FORCE_AFTER_SECONDS if launched_ranks() == 1 else LAUNCHED_SECONDS
    with reported(debug=debug), Interruption(apart) as interruption:
        try:
            config = _config(arguments, run_dir, resume)
        except ConfigError:
            if launched_ranks() > 1 and os.environ.get("LOCAL_RANK", "0") != "0":
                sys.exit(USER_ERROR)  # the first rank of this machine finds the same, and says it
            raise
        if resume == "auto" and config.run_dir is None and config.checkpoint.directory is None:
            found = newest_run()
            config = config if found is None else _config(arguments, str(found), resume)
        status = _train(config, interruption, resume, as_json=as_json)
    sys.exit(status)


def _config(arguments: Sequence[str], run_dir: str | None, resume: str | None = None) -> Config:
    named = bool(arguments) and "=" not in arguments[0]
    saved = None if resume is None or run_dir is None else Path(run_dir) / "config.toml"
    default = saved if saved is not None and saved.exists() else DEFAULT_FILE
    source = arguments[0] if named else default
    overrides = list(arguments[1:] if named else arguments)
    if run_dir is not None:
        overrides.append(f"run_dir={run_dir}")
    config = load_config(source, overrides)
    check(config, saves=True, resume=resume)
    return config


def _train(config: Config, interruption: Interruption, resume: str | None, *, as_json: bool) -> int:
    try:
        job = Job(config)
    except ValueError as error:
        raise ConfigError(" ".join(str(error).split())) from error
    try:
        return _train_together(job, config, interruption, resume, as_json=as_json)
    except BaseException as error:
        job.failed(error)
        raise
    finally:
        job.close()


def _train_together(job: Job, config: Config, interruption: Interruption, resume: str | None, *, as_json: bool) -> int:
    stream = job.stream(sys.stderr if as_json else sys.stdout)
    made: list[RunDirectory] = []

    def open_run() -> str:
        made.append(RunDirectory(config.run_dir, resume=resume is not None))
        if config.checkpoint.directory is None and (problems := unwritable(directory_of(config, made[0].path))):
            made[0].discard()
            raise ConfigError(problems)
        return str(made[0].path)

    path = job.agree("run directory", open_run)
    run: RunDirectory | Follower = made[0] if made else Follower(Path(path))
    progress = Progress(total=config.train.steps, stream=stream, errors=job.stream(sys.stderr))
    try:
        run.write_config(config)
        with progress:
            with progress.phase("loading torch"):
                from offload.train import closing_lines, train
            found = None
            if resume is not None:
                at = resume

                def resolve() -> str:
                    return str(resolve_resume(at, directory_of(config, run.path)) or "")

                where = job.agree("checkpoint to resume", resolve)
                found = Path(where) if where else None
            summary = train(config, run=run, progress=progress, interruption=interruption, resume=found, job=job)
    except Exception as error:
        if exit_status(error) == USER_ERROR and run.records == 0:
            run.discard()
        raise
    finally:
        run.close()
    for line in closing_lines(summary, run.path):
        click.echo(line, file=stream)
    if as_json and job.leads:
        click.echo(dump_json(summary))
    if summary["interrupted"] or summary["last_checkpoint_failed"]:
        job.leave_together()
    if summary["last_checkpoint_failed"] and summary["interrupted"] != "SIGINT":
        return NOT_SAVED
    return 128 + signal.Signals[summary["interrupted"]] if summary["interrupted"] else 0
