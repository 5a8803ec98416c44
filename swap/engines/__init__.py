"""I/O engines: interchangeable ways to move bytes between memory and swap files."""

from __future__ import annotations

from swap.engines.protocol import BounceSource, Engine, Request, System

ENGINES = ("threads", "aiofiles")
"""Names that ``create_engine`` accepts besides "auto"."""


def resolve_engine(name: str) -> str:
    """The engine that ``name`` stands for; ValueError if this build has none of that name."""
    if name == "auto":
        return "threads"
    if name == "io_uring":
        raise ValueError(f"swap.engine: this build has no io_uring engine; choose auto, {', '.join(ENGINES)}")
    if name not in ENGINES:
        raise ValueError(f"swap.engine: unknown engine {name!r}; choose auto, {', '.join(ENGINES)}")
    return name


def create_engine(
    name: str, *, system: System, bounce: BounceSource, queue_depth: int, owner: str = ""
) -> Engine:
    """Start the engine ``name`` ("auto": the best there is) with ``queue_depth`` requests in flight at most."""
    resolved = resolve_engine(name)
    if queue_depth < 1:
        raise ValueError(f"swap.queue_depth must be at least 1, got {queue_depth}")
    if resolved == "aiofiles":
        from swap.engines.aiofiles import AiofilesEngine

        return AiofilesEngine(system=system, bounce=bounce, queue_depth=queue_depth, owner=owner)
    from swap.engines.threads import ThreadsEngine

    return ThreadsEngine(system=system, bounce=bounce, queue_depth=queue_depth, owner=owner)


__all__ = ["ENGINES", "BounceSource", "Engine", "Request", "System", "create_engine", "resolve_engine"]
