"""Kinds of values that options of several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from swap.geometry import parse_bytes

if TYPE_CHECKING:
    _Bytes = click.ParamType[int]
else:
    _Bytes = click.ParamType  # generic only to type checkers before click 8.5


class Size(_Bytes):
    """Bytes, as '5GB' or '512MiB': a whole number of at least one."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Fails as click does for what is no size."""
        try:
            size = parse_bytes(int(value) if isinstance(value, str) and value.strip().isdigit() else value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if size < 1:
            self.fail(f"{value!r} must be at least one byte", param, ctx)
        return size


class Folder(click.Path):
    """A directory that is there and in which files can be made."""

    name = "folder"

    def __init__(self) -> None:
        super().__init__(exists=True, file_okay=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Fails as click does for a path that is none, or where nothing can be written."""
        from offload.checkpoint.places import why_not_writable

        path = super().convert(value, param, ctx)
        if (reason := why_not_writable(Path(str(path)))) is not None:
            self.fail(reason, param, ctx)
        return path


SIZE = Size()
FOLDER = Folder()
