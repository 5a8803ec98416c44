"""What a run shows while it goes: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

PLAIN_SECONDS = 10.0
"""Longest silence between two plain lines while steps go on."""


def format_bytes(count: float) -> str:
    """A count of bytes in decimal units with three digits: ``1.25 GB``."""
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if abs(count) < 999.5 or unit == "TB":
            break
        count /= 1000
    digits = 0 if unit == "B" or count >= 99.95 else 1 if count >= 9.995 else 2
    return f"{count:.{digits}f} {unit}"


class Progress:
    """Shows steps, loss, tokens/s, bytes moved, and the name of the phase while nothing else moves.

    ``stream``: where to write; ``errors``: where warnings go. On a terminal a bar is redrawn; elsewhere each phase is a
    line, and steps are lines at least every ten seconds and at most twenty a run.
    """

    def __init__(self, *, total: int, stream: IO[str], errors: IO[str]) -> None:
        self.total = total
        self._errors = errors
        self.console = Console(file=stream, highlight=False, soft_wrap=True)
        self._bar: Bar | None = None
        self._task = TaskID(0)
        self._shown_step, self._shown_at = 0, time.monotonic()
        if self.console.is_terminal:
            self._bar = Bar(
                SpinnerColumn(),
                TextColumn("{task.fields[phase]:<11}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[values]}"),
                TimeElapsedColumn(),
                console=self.console,
            )
            self._task = self._bar.add_task("", total=total, phase="", values="")

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Names what goes on while the block runs; "training" comes back after it."""
        if self._bar is not None:
            self._bar.update(self._task, phase=name)
        else:
            self.say(f"{name} ...")
        try:
            yield
        finally:
            if self._bar is not None:
                self._bar.update(self._task, phase="training")

    def say(self, text: str) -> None:
        """Prints text above the bar, without markup."""
        self.console.print(text, markup=False)

    def warn(self, text: str) -> None:
        """Says that something is not as it should be: one line on the stream of errors."""
        if self._bar is not None and self._errors.isatty():
            self.say(f"warning: {text}")  # what is written past the bar would be drawn over
        else:
            print(f"warning: {text}", file=self._errors, flush=True)

    def step(self, number: int, *, loss: float, tokens_per_second: float, read: int, written: int) -> None:
        """Shows that step ``number`` (from 1) is done. ``read`` and ``written``: bytes of swap files so far."""
        values = (
            f"loss {loss:.3f}  {tokens_per_second:,.0f} tokens/s  "
            f"nvme read {format_bytes(read)}, written {format_bytes(written)}"
        )
        if self._bar is not None:
            self._bar.update(self._task, completed=number, phase="training", values=values)
            return
        now = time.monotonic()
        due = number - self._shown_step >= max(1, self.total // 20) or now - self._shown_at >= PLAIN_SECONDS
        if due or number in (1, self.total):
            self._shown_step, self._shown_at = number, now
            self.say(f"step {number}/{self.total}  {values}")
