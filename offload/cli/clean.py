"""``offload clean``: removes what killed runs left under swap directories."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import click

from offload.cli.failures import reported
from offload.config import ConfigError
from offload.telemetry import dump_json, format_bytes
from swap.files import find_leftovers, remove_leftovers


@click.command("clean")
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@click.option("--dry-run", is_flag=True, help="Only list what would be removed.")
@click.option("--any-host", is_flag=True, help="Also what runs on other machines left; make sure that they are over.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def clean_command(paths: Sequence[str], dry_run: bool, any_host: bool, as_json: bool, debug: bool) -> None:
    """Remove what killed runs left.

    PATH is a directory for swap files or the directory of a run. Swap files have no name, so a killed run leaves at
    most an empty directory or, on filesystems that keep names of open files, one swap file. Files of a live run are
    locked and stay.
    """
    with reported(debug=debug):
        missing = [f"{path}: no such directory" for path in paths if not Path(path).is_dir()]
        if missing:
            raise ConfigError(missing)
        found: dict[str, int] = {}
        for root in paths:
            for directory in (Path(root), Path(root) / "swap"):
                sizes = {path: _bytes_in(path) for path in find_leftovers(directory, any_host=any_host)}
                gone = sizes if dry_run else remove_leftovers(directory, any_host=any_host)
                found |= {str(path): sizes.get(path, 0) for path in gone}
            if not dry_run and (Path(root) / "metrics.jsonl").exists():
                # The directory that a run makes for its swap files when it is given none.
                with contextlib.suppress(OSError):
                    (Path(root) / "swap").rmdir()
        if as_json:
            click.echo(dump_json({"removed" if not dry_run else "found": found}))
            return
        for name, size in found.items():
            click.echo(f"{name}: {format_bytes(size)}")
        click.echo(f"{len(found)} {'found' if dry_run else 'removed'}, {format_bytes(sum(found.values()))}")


def _bytes_in(directory: Path) -> int:
    total = 0
    with contextlib.suppress(OSError):
        total = sum(path.stat().st_blocks * 512 for path in directory.iterdir())
    return total
