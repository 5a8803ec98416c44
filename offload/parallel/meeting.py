"""Waiting for other ranks in the job's store: a step at a time, so that signals take effect and the failure of another
rank is seen at once.

A store's own wait, and the making of a process group, sleep until the timeout whatever happens meanwhile; nor do they
tell who did not come. So ranks meet here first.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from offload.errors import ParallelError
from offload.parallel.exits import is_forsaken
from offload.parallel.reach import Reach

_SHORTEST, _LONGEST = 0.005, 0.2  # seconds between looks
_REFUSED = 10.0  # seconds for which a launcher's store may refuse connections


class AbsentError(RuntimeError):
    """Not all ranks have come in time; the text says who has not."""


class Meeting:
    """The ranks of a job at its store. `failure` gives what a rank that has failed has said, if one has."""

    def __init__(self, reach: Reach, rank: int, world: int, timeout: float, failure: Callable[[], str | None]) -> None:
        self._reach, self._rank, self._world, self._timeout = reach, rank, world, timeout
        self._failure = failure

    def exchange(self, name: str, text: str = "") -> list[str]:
        """Everybody's `text`, by rank; returns once all ranks have come here.

        Raises:
            AbsentError: some have not come within the timeout.
            ParallelError: a rank has failed, or the store cannot be reached.
        """
        self._ask(lambda store: (store.set(f"{name}/{self._rank}", f"={text}"), store.add(name, 1)))
        if not self._wait(lambda store: store.add(name, 0) >= self._world, self._timeout, heeding=True):
            absent = [r for r in range(self._world) if not self._ask(partial(_has, f"{name}/{r}"))]
            plural = "s" if len(absent) > 1 else ""
            more = f" and {len(absent) - 8} more" if len(absent) > 8 else ""
            raise AbsentError(f"rank{plural} {', '.join(map(str, absent[:8]))}{more} did not come")
        return [str(self._reach.look_up(f"{name}/{rank}")).removeprefix("=") for rank in range(self._world)]

    def await_keys(self, keys: list[str], timeout: float, *, heeding: bool = False) -> bool:
        """Whether something is published under all of `keys` within `timeout` seconds. `heeding`: the failure of a rank
        ends the wait.

        Raises:
            ParallelError: the store cannot be reached; or as `exchange` when heeding.
        """
        return self._wait(lambda store: store.check(keys), timeout, heeding=heeding)

    def _wait(self, there: Callable[[Any], bool], timeout: float, *, heeding: bool) -> bool:
        deadline, pause, looked = time.monotonic() + timeout, _SHORTEST, time.monotonic()
        while not self._ask(there):
            now = time.monotonic()
            if heeding and now - looked > _LONGEST:
                looked = now
                if (said := self._failure()) is not None:
                    raise ParallelError(f"another rank has failed; {said}")
            if now > deadline:
                return False
            time.sleep(pause)
            pause = min(_LONGEST, 1.5 * pause)
        return True

    def _ask(self, function: Callable[[Any], Any]) -> Any:
        found = self._reach.call(function)
        if self._reach.lost:
            raise ParallelError("the job's store, which the launcher or rank 0 serves, cannot be reached any more")
        return found


def _has(key: str, store: Any) -> bool:
    return bool(store.check([key]))


def await_server(timeout: float) -> None:
    """Returns once something answers where the launcher says that the job's store is: torch's own client waits without
    seeing signals. A launcher's store is there before its ranks are, so one that refuses connections is not waited for
    long.

    Raises:
        ParallelError: the launcher is gone, or nothing answers in time.
    """
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if host is None or not port.isdigit():
        return  # the rendezvous says what is missing
    began, gone = time.monotonic(), False
    while not gone:
        limit = timeout
        try:
            with socket.create_connection((host, int(port)), timeout=1.0):
                return
        except ConnectionRefusedError:
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
                limit = min(limit, _REFUSED)
        except OSError:
            pass
        gone = is_forsaken() or time.monotonic() > began + limit
        time.sleep(_LONGEST)
    raise ParallelError(
        f"nothing answers at {host}, port {port} (MASTER_ADDR, MASTER_PORT) after {time.monotonic() - began:.0f} s "
        f"(parallel.timeout = {timeout:g} s): the launcher or rank 0, which serves the job's store there, is gone or "
        "has not come"
    )


def answers() -> bool:
    """Whether something does so already, where a launcher has said that the job's store is."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    try:
        with socket.create_connection((host or "", int(port)), timeout=1.0):
            return True
    except (OSError, ValueError):
        return False
