"""Whether ranks that wait for long wait for each other, which no time will end.

A rank that is stuck in an operation of a channel says so in the job's store. Two ranks are in contradiction if they are
to do different things as the same operation of one channel; or if each of them waits, in different channels, for an
operation that the other one has not come to. The latter is certain only where each of the two takes part in the other's
operation: replicas of shards gather apart from each other, and one may be ahead. What a rank has said of an operation
holds as long as this rank has not come to it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from offload.parallel.ranks import Ranks

GATHERS = "gather the weights of "
"""How the names of operations begin that a forward or a backward waits for."""
READS = "read "
"""How those begin that read a parameter's whole value."""
CHANNELS = ("gather", "reduce", "vote")
"""Those whose operations a program waits for itself."""
_ADVICE = "all ranks have to use the same modules and call the engine in the same order"
_GATHERS = (
    "; in stage 3 every forward gathers weights, in evaluation and generation too: give all ranks the same number of "
    "forwards, or have all of them enter engine.gathered() around those that differ"
)
_READS = (
    "; what is divided is read by all ranks together: call state_dict(), save_pretrained(), get_full() and their like "
    "on all of them, and write the result on one"
)
SAME_NUMBER = (
    "all ranks need the same number of batches and steps, in stage 3 of forwards too, also in evaluation and "
    "generation, unless all of them enter engine.gathered() around these"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """Operation `number` of a channel, which does not end; whether the program `waits` for it; the ranks that it
    `needs`; and how many operations this rank has `come_to`, by channel.
    """

    number: int
    what: str
    waits: bool
    come_to: Mapping[str, int]
    needs: list[int] = field(default_factory=list)


def say(ranks: Ranks, channel: str, stall: Stall) -> None:
    """Lets the other ranks know."""
    ranks.publish(f"{channel}/{ranks.rank}", json.dumps(asdict(stall)))


def said(ranks: Ranks, channel: str, rank: int) -> Stall | None:
    """What a rank has said of a channel, if it has not gone on; or only just."""
    text = ranks.look_up(f"{channel}/{rank}")
    return Stall(**json.loads(text)) if text else None


def unsay(ranks: Ranks, channel: str) -> None:
    """It has gone on."""
    ranks.publish(f"{channel}/{ranks.rank}", "")


def contradiction(ranks: Ranks, channel: str, own: Stall) -> str | None:
    """Why this rank's operation cannot end, if that is certain."""
    for rank in ranks.members("world"):
        other = None if rank == ranks.rank else said(ranks, channel, rank)
        if other is not None and other.number == own.number and other.what != own.what:
            return (
                f"ranks do different things: rank {ranks.rank} is to {own.what}, but rank {rank} is to {other.what}; "
                f"{_advice(own, other)}"
            )
    return _circle(ranks, channel, own) if own.waits and channel in own.come_to else None


def _advice(*stalls: Stall) -> str:
    if any(stall.what.startswith(READS) for stall in stalls):
        return _ADVICE + _READS
    return _ADVICE + (_GATHERS if any(stall.what.startswith(GATHERS) for stall in stalls) else "")


def why_closed(what: str) -> str:
    """Why a rank that has closed its engine may be missed in an operation."""
    return f"it has closed its engine: {SAME_NUMBER}{_READS if what.startswith(READS) else ''}"


def _circle(ranks: Ranks, channel: str, own: Stall) -> str | None:
    for rank in own.needs:
        for elsewhere, come_to in own.come_to.items():
            other = None if rank == ranks.rank or elsewhere == channel else said(ranks, elsewhere, rank)
            if other is None or not other.waits or other.number <= come_to or ranks.rank not in other.needs:
                continue
            if other.come_to.get(channel, own.number) < own.number:
                return (
                    f"ranks wait for each other: rank {ranks.rank} is to {own.what}, which rank {rank} has not come "
                    f"to; it is to {other.what}, which rank {ranks.rank} has not come to; {_advice(own, other)}"
                )
    return None


def whereabouts(ranks: Ranks, rank: int) -> str:
    """What a rank that does not come has said that it is to do, as part of a message."""
    found = [stall.what for channel in CHANNELS if (stall := said(ranks, channel, rank)) is not None]
    return f"; rank {rank} waits to {' and to '.join(found)}" if found else ""
