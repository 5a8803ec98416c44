"""Tiered memory: byte budgets, exact host memory, staging, and swap files with asynchronous I/O.

A leaf package: it imports torch and the operating system only. ``swap.devices`` holds the accelerators.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swap.budget import TIERS, Budget, Reservation
    from swap.engines.protocol import Priority
    from swap.errors import BudgetError, SwapError, SwapIOError, SwapPathError
    from swap.extents import Extent, Segment
    from swap.faults import FaultPlan
    from swap.files import find_leftovers, remove_leftovers
    from swap.geometry import PAGE, align_up, format_bytes, parse_bytes
    from swap.slabs import HostPool
    from swap.staging import Slot, StagingPool
    from swap.stats import StatsSnapshot, SwapStats
    from swap.store import SwapStore
    from swap.tickets import Ticket, wait_all

__all__ = [
    "PAGE",
    "TIERS",
    "Budget",
    "BudgetError",
    "Extent",
    "FaultPlan",
    "HostPool",
    "Priority",
    "Reservation",
    "Segment",
    "Slot",
    "StagingPool",
    "StatsSnapshot",
    "SwapError",
    "SwapIOError",
    "SwapPathError",
    "SwapStats",
    "SwapStore",
    "Ticket",
    "align_up",
    "find_leftovers",
    "format_bytes",
    "parse_bytes",
    "remove_leftovers",
    "wait_all",
]

_HOMES = {
    "Priority": "swap.engines.protocol",
    "Budget": "swap.budget",
    "BudgetError": "swap.errors",
    "Extent": "swap.extents",
    "FaultPlan": "swap.faults",
    "HostPool": "swap.slabs",
    "PAGE": "swap.geometry",
    "Reservation": "swap.budget",
    "Segment": "swap.extents",
    "Slot": "swap.staging",
    "StagingPool": "swap.staging",
    "StatsSnapshot": "swap.stats",
    "SwapError": "swap.errors",
    "SwapIOError": "swap.errors",
    "SwapPathError": "swap.errors",
    "SwapStats": "swap.stats",
    "SwapStore": "swap.store",
    "TIERS": "swap.budget",
    "Ticket": "swap.tickets",
    "align_up": "swap.geometry",
    "find_leftovers": "swap.files",
    "format_bytes": "swap.geometry",
    "parse_bytes": "swap.geometry",
    "remove_leftovers": "swap.files",
    "wait_all": "swap.tickets",
}


def __getattr__(name: str) -> Any:
    # Lazy, so that sizes can be parsed (by the configuration) without loading torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'swap' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
