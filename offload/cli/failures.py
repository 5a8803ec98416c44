"""One line and an exit status for everything that can end a command.

2: the user can mend it (configuration, plan, paths). 1: a fault while it ran. 3: a run that trained to its end, or to a
signal that asks for a checkpoint, but whose last checkpoint could not be saved. 130, 143, 138: SIGINT, SIGTERM and
SIGUSR1.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import click

from offload.config import ConfigError

USER_ERROR = 2
FAULT = 1
NOT_SAVED = 3


@contextmanager
def reported(*, debug: bool) -> Iterator[None]:
    """Turns exceptions of a command into ``error:`` lines on stderr and an exit status; ``debug`` adds tracebacks."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show  # type: ignore[assignment]
            yield
    except (click.ClickException, click.exceptions.Exit, click.Abort):
        raise
    except Exception as error:
        status = exit_status(error)
        if status is None:
            raise
        if debug:
            traceback.print_exc()
        lines = error.problems if isinstance(error, ConfigError) else [" ".join(str(error).split())]
        for line in lines:
            click.echo(f"error: {line}", err=True)
        sys.exit(status)


def _show(message: Warning | str, *_: object) -> None:
    """A warning as people read it: without the line of ours that gave it, and once for all ranks of a machine."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        click.echo(f"warning: {' '.join(str(message).split())}", err=True)


def exit_status(error: Exception) -> int | None:
    """The exit status for ``error``, or ``None`` for a defect of ours, which keeps its traceback."""
    if isinstance(error, ConfigError):
        return USER_ERROR
    # Both packages are loaded by the time that their exceptions can arrive here.
    from offload.checkpoint.errors import CheckpointError
    from offload.errors import OffloadError, PlanError, UnsupportedModelError
    from swap.errors import BudgetError, SwapError, SwapPathError

    if isinstance(error, (CheckpointError, PlanError, UnsupportedModelError, SwapPathError, BudgetError)):
        return USER_ERROR
    if isinstance(error, (SwapError, OffloadError, MemoryError, OSError)):
        return FAULT
    return None
