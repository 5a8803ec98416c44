"""Tiered memory: byte budgets, exact host memory, staging, and swap files with asynchronous I/O.

A leaf package: it imports torch and the operating system only. ``swap.devices`` holds the accelerators.
"""

from __future__ import annotations

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
