"""The command line on several ranks: who writes, what all agree on, and how a failure of one ends all."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from offload.errors import ParallelError

if TYPE_CHECKING:
    from offload.config import Config
    from offload.parallel.ranks import Ranks

_RUN, _LEFT = "run", "left"
_REFUSED = "!"
LEAVING = 20.0
"""Seconds that an interrupted rank waits for slower ones at its end."""


def launched_ranks() -> int:
    """The number of processes that the launcher started, from its environment; 1 without one."""
    world = os.environ.get("WORLD_SIZE", "")
    return int(world) if world.isdigit() else 1


_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
"""How the names of the variables begin that a launcher sets."""


def without_launcher(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that takes no part in the job."""
    return {name: value for name, value in environ.items() if not name.startswith(_LAUNCHER)}


class Job:
    """This process's part in a command that a launcher started on several ranks; alone it is rank 0 of 1.

    Rank 0 writes the run directory and speaks. `close()` when done; does not wait for others.
    """

    def __init__(self, config: Config) -> None:
        self._ranks: Ranks | None = None
        if launched_ranks() > 1:
            from offload.parallel.together import open_ranks

            self._ranks = open_ranks(config)
        self.rank = 0 if self._ranks is None else self._ranks.rank
        self.world = 1 if self._ranks is None else self._ranks.world
        self._timeout = config.parallel.timeout

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def stream(self, wanted: IO[str]) -> IO[str]:
        """Where this rank writes what people read: `wanted`, or nowhere."""
        return wanted if self.leads else open(os.devnull, "w", encoding="utf-8")

    def agree(self, key: str, make: Callable[[], str]) -> str:
        """What `make` gave on rank 0, on every rank. If it raises there, it does so before others go on.

        Raises:
            ParallelError: rank 0 failed, or did not come within `parallel.timeout`.
        """
        if self._ranks is None:
            return make()
        if self.leads:
            try:
                text = make()
            except BaseException as error:
                self.failed(error)
                self._ranks.publish(f"{_RUN}/{key}", _REFUSED)
                raise
            self._ranks.publish(f"{_RUN}/{key}", f"={text}")
            return text
        if not self._ranks.meeting.await_keys([f"{_RUN}/{key}"], self._timeout, heeding=True):
            raise ParallelError(
                f"rank {self.rank} waited for rank 0's {key}: not there after parallel.timeout = {self._timeout:g} s"
            )
        found = self._ranks.look_up(f"{_RUN}/{key}") or _REFUSED
        if found == _REFUSED:
            raise ParallelError(f"rank 0 refused the run: {self._ranks.first_failure() or 'no message'}")
        return found.removeprefix("=")

    def failed(self, error: BaseException) -> None:
        """Tells the others of an error that ends this rank, so that they end with its text too."""
        if self._ranks is not None:
            self._ranks.report_failure(error)

    def interrupted_elsewhere(self) -> str | None:
        """The signal that has ended another rank before it was ready to train, by name."""
        said = None if self._ranks is None else self._ranks.first_failure()
        found = re.search(r"Interrupted: interrupted by (SIG\w+)", said or "")
        return None if found is None else found[1]

    def leave_together(self) -> None:
        """Waits, `LEAVING` seconds at most, until every rank has come here: a launcher kills all others as soon as one
        has ended with a status that is not 0, and they may still be writing.
        """
        if self._ranks is None:
            return
        self._ranks.publish(f"{_LEFT}/{self.rank}", "1")
        keys = [f"{_LEFT}/{rank}" for rank in range(self.world)]
        with suppress(ParallelError):  # the store may go with the rank that leaves first
            self._ranks.meeting.await_keys(keys, min(LEAVING, self._timeout))

    def close(self) -> None:
        """Leaves the process group, if this job has made it. Idempotent."""
        if self._ranks is not None:
            self._ranks.publish(f"{_LEFT}/{self.rank}", "1")
            self._ranks.close()


class Follower:
    """Stands for the run directory on ranks that write none: the same place, no records."""

    def __init__(self, path: Path) -> None:
        self.path, self.records = path, 0
        path.mkdir(parents=True, exist_ok=True)  # a machine of its own may not have it; swap files lie below

    def write_config(self, config: Config) -> None:
        """Nothing; rank 0 does."""

    def forget_after(self, step: int) -> None:
        """Nothing; rank 0 does."""

    def record(self, values: Any) -> None:
        """Only counts."""
        self.records += 1

    def write_summary(self, values: Any) -> None:
        """Nothing; rank 0 does."""

    def close(self) -> None:
        """Nothing is open."""

    def discard(self) -> None:
        """Nothing was written."""
