"""What a run writes to each drive, as a part of the writing that the drive is made for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from swap.geometry import format_bytes

_log = logging.getLogger(__name__)

WORTH_A_WORD = 0.01
"""The part of a drive's life above which a run is warned about, once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathWear:
    """Wear of one path: bytes written so far and in a step, and with a known endurance what that means.

    ``percent_of_life``: of the endurance, used by this run. ``steps_left``: until the endurance is used up, by this
    run alone; None while it is not known what a step writes.
    """

    path: str
    written_bytes: int
    bytes_per_step: float
    percent_of_life: float | None
    steps_left: int | None

    def to_dict(self) -> dict[str, int | float | None]:
        """For JSON, without the path."""
        return {
            "written_bytes": self.written_bytes,
            "bytes_per_step": self.bytes_per_step,
            "percent_of_life": self.percent_of_life,
            "steps_left": self.steps_left,
        }


class WearLedger:
    """Counts for ``paths``, each a drive that may be written ``endurance`` bytes in its life (None: not known)."""

    def __init__(self, paths: Sequence[str], endurance: int | None) -> None:
        self._paths = tuple(paths)
        self._endurance = endurance
        self._lock = threading.Lock()
        self._warned = False
        self._start: tuple[int, ...] | None = None
        """Bytes written before the first step: setting up is not what a step writes."""

    @property
    def threshold(self) -> float:
        """Bytes on one path from which on a warning is due."""
        return float("inf") if self._endurance is None else self._endurance * WORTH_A_WORD

    def begin_steps(self, written: Sequence[int]) -> None:
        """No step has begun yet."""
        self._start = tuple(written)

    def report(self, written: Sequence[int], steps: int) -> list[PathWear]:
        """The wear of every path after ``steps`` steps."""
        start = self._start or (0,) * len(self._paths)
        found = []
        for path, now, before in zip(self._paths, written, start, strict=True):
            per_step = (now - before) / steps if steps else 0.0
            life = left = None
            if self._endurance is not None:
                life = 100.0 * now / self._endurance
                left = int(max(0, self._endurance - now) / per_step) if per_step else None
            found.append(
                PathWear(path=path, written_bytes=now, bytes_per_step=per_step, percent_of_life=life, steps_left=left)
            )
        return found

    def check(self, written: Sequence[int], *, steps: int = 0, total_steps: int | None = None) -> None:
        """Warn once if the run has used, or by its end will have used, more than ``WORTH_A_WORD`` of a drive's life."""
        if self._endurance is None or self._warned:
            return
        for wear in self.report(written, steps):
            left = max(0, (total_steps or 0) - steps)
            expected = wear.written_bytes + (wear.bytes_per_step * left if steps else 0)
            if expected > self.threshold:
                with self._lock:
                    first, self._warned = not self._warned, True
                if first:
                    _log.warning("%s", self._warning(wear, expected))
                return

    def _warning(self, wear: PathWear, expected: float) -> str:
        assert self._endurance is not None
        text = (
            f"swap: this run writes {format_bytes(int(expected))} to {wear.path}, "
            f"{100 * expected / self._endurance:.1f} % of what the drive is made for (swap.endurance_tbw = "
            f"{self._endurance / 1e12:g})"
        )
        if wear.steps_left is not None:
            text += f"; {wear.steps_left:,} steps are left in it"
        return text + "; place the optimizer on 'host', or accumulate more micro-batches in a step"
