"""I/O engines: interchangeable ways to move bytes between memory and swap files."""

from __future__ import annotations

import functools
import logging

from swap.engines.protocol import BounceSource, Engine, Request, System
from swap.native import UringProbe, built, probe_io_uring

ENGINES = ("io_uring", "threads", "aiofiles")
"""Names that ``create_engine`` accepts besides "auto"."""

_log = logging.getLogger(__name__)


def resolve_engine(name: str) -> str:
    """The engine that ``name`` stands for: io_uring steps down to threads, with one log line, where it cannot work.

    ValueError for an unknown name.
    """
    if name not in ("auto", *ENGINES):
        raise ValueError(f"swap.engine: unknown engine {name!r}; choose auto, {', '.join(ENGINES)}")
    if name not in ("auto", "io_uring"):
        return name
    probe = _probe()
    if probe.usable:
        return "io_uring"
    _step_down(probe.text)
    return "threads"


@functools.cache
def _probe() -> UringProbe:
    return probe_io_uring()


@functools.cache
def _step_down(text: str) -> None:
    """Said once for each reason. An installation without native code warns of that by itself."""
    _log.log(logging.WARNING if built() else logging.INFO, "swap: using threads instead of io_uring: %s", text)


def create_engine(
    name: str,
    *,
    system: System,
    bounce: BounceSource,
    queue_depth: int,
    block: int,
    owner: str = "",
    timeout: float = 0.0,
    burst: int = 0,
) -> Engine:
    """Start the engine ``name`` ("auto": the best there is) with ``queue_depth`` blocks in flight at most.

    ``timeout``: seconds without an answer after which a request is an error; 0 waits for ever.
    ``burst``: see the note on bursts in protocol.py.
    """
    resolved = resolve_engine(name)
    if queue_depth < 1:
        raise ValueError(f"swap.queue_depth must be at least 1, got {queue_depth}")
    if timeout < 0:
        raise ValueError(f"swap.timeout must not be negative, got {timeout}")
    if resolved == "aiofiles":
        from swap.engines.aiofiles import AiofilesEngine

        return AiofilesEngine(
            system=system, bounce=bounce, queue_depth=queue_depth, owner=owner, timeout=timeout, burst=burst
        )
    if resolved == "io_uring":
        from swap.engines.uring import UringEngine, UringUnavailable

        probe = _probe()
        try:
            engine = UringEngine(
                system=system,
                bounce=bounce,
                queue_depth=queue_depth,
                block=block,
                owner=owner,
                timeout=timeout,
                burst=burst,
                explained=bool(probe.reason),
            )
        except UringUnavailable as error:
            _step_down(str(error))
        else:
            if probe.reason:
                _log_once(f"swap: io_uring without registered memory: {probe.text}")
            return engine
    from swap.engines.threads import ThreadsEngine

    return ThreadsEngine(
        system=system, bounce=bounce, queue_depth=queue_depth, owner=owner, timeout=timeout, burst=burst
    )


@functools.cache
def _log_once(text: str) -> None:
    _log.warning("%s", text)


__all__ = ["ENGINES", "BounceSource", "Engine", "Request", "System", "create_engine", "resolve_engine"]
