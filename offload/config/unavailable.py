"""Legal settings that this version cannot carry out: each is refused with one line instead of being ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offload.config.schema import Config


def unavailable(config: Config, environ: Mapping[str, str]) -> list[str]:
    """One line for every setting of ``config`` (or of the launcher, in ``environ``) that this version lacks."""
    problems = []

    def refuse(key: str, value: object, remedy: str) -> None:
        problems.append(f"{key} = {value!r}: not in this version; {remedy}")

    world_size = environ.get("WORLD_SIZE", "1")
    if world_size.isdigit() and int(world_size) > 1:
        problems.append(f"WORLD_SIZE = {world_size}: this version trains in one process; start one rank only")
    for key in ("shard_size", "replicate_size"):
        value = getattr(config.parallel, key)
        if value not in ("auto", 1):
            refuse(f"parallel.{key}", value, "use 1 or 'auto'")
    return problems
