"""What the keys of DeepSpeed's ``aio`` section are called here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NO_EQUIVALENT = {
    "single_submit": "requests are submitted in batches",
    "overlap_events": "submission and completion always overlap",
    "use_gds": "there is no GPUDirect Storage engine",
}


def aio_equivalent(values: Any) -> str:
    """One line for a configuration that has an ``aio`` section (``values``): the ``[swap]`` keys that do the same."""
    if not isinstance(values, Mapping):
        values = {}
    block = values.get("block_size", 1048576)
    depth = values.get("queue_depth", 8)
    threads = values.get("intra_op_parallelism", values.get("thread_count", 1))
    flight = depth * threads if isinstance(depth, int) and isinstance(threads, int) else depth
    text = f"aio: a section of DeepSpeed; the equivalent here is swap.block = {block} (block_size), "
    text += f"swap.queue_depth = {flight}"
    text += " (queue_depth times intra_op_parallelism)" if threads != 1 else " (queue_depth)"
    idle = [f"{key} ({why})" for key, why in _NO_EQUIVALENT.items() if key in values]
    if idle:
        text += f"; without equivalent: {', '.join(idle)}"
    return text + "; or leave both 'auto': 'offload bench io PATH' prints the best for your drive"
