"""Commands that are for one process, under a launcher that has started several."""

from __future__ import annotations

import os
import sys

import click

from offload.parallel.job import launched_ranks, without_launcher


def on_one_rank(command: str) -> None:
    """Ends every rank but the first, successfully; the first goes on as if nobody had launched it."""
    ranks = launched_ranks()
    if ranks < 2:
        return
    if os.environ.get("RANK", "0") != "0":
        sys.exit(0)
    click.echo(f"offload {command} is for one process: rank 0 of {ranks} carries it out alone", err=True)
    alone = without_launcher(os.environ)
    for name in set(os.environ) - set(alone):
        del os.environ[name]
