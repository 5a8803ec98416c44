"""What a unit's forward leaves behind for its backward: everything, its inputs only, or those on another tier.

`keep`: what autograd saved. `recompute`: the unit's inputs, from which the forward is repeated. `host` and `nvme`: the
same, but the inputs wait in host memory or in a swap file. `auto`: everything while it fits `room` bytes, then the
inputs only. All give the same bits.
"""

from __future__ import annotations

import logging
import threading
import weakref
from typing import TYPE_CHECKING, Any

from torch import Tensor

from offload.binding_recompute import Root, Visit
from offload.binding_saved import check_version
from offload.residency import Residency
from offload.schedule.spill import Spill
from offload.tiers import Tier

if TYPE_CHECKING:
    from offload.build import Blueprint

log = logging.getLogger("offload")

_AMPLE = 2
"""How much more than is known of there has to be room for: what a forward saves may depend on its data too."""
_SIGNATURES = 64
"""Kinds of inputs whose bytes are remembered for a root."""


class Kept:
    """A tensor that stays where it is."""

    __slots__ = ("_value", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._value, self._version = tensor.detach(), tensor._version

    def prefetch(self) -> None:
        return None

    def bring(self) -> Tensor:
        return check_version(self._value, self._version).detach()


class Tally:
    """Bytes that one forward keeps alive, `nbytes`: what is expected of it until it has ended, then what it saved.

    They count until the last tensor that it saved is gone: the hooks that unpack these hold this. The graph itself may
    stay for as long as somebody has its loss.
    """

    __slots__ = ("_activations", "_root", "_signature", "nbytes", "storages")

    def __init__(self, activations: Activations, root: Root, signature: Any, nbytes: int) -> None:
        self._activations, self._root, self._signature, self.nbytes = activations, root, signature, nbytes
        self.storages: dict[int, int] = {}
        """Bytes of what the forward has saved so far."""

    def ended(self) -> None:
        """The forward has ended well."""
        self._activations.measured(self, sum(self.storages.values()))
        self._activations.learn(self._root, self._signature, self.nbytes)
        self.storages.clear()

    def __del__(self) -> None:
        self._activations.gone(self.nbytes)


class Activations:
    """Decides what becomes of a visit, and counts. `room`: bytes that `auto` may keep at a time (None: any number)."""

    def __init__(self, mode: str, room: int | None) -> None:
        self.mode, self.room = mode, room
        self.spill: Spill | None = None
        self.kept_bytes = 0
        self.recomputed = self.kept = 0
        """Visits so far whose activations were let go, and were kept."""
        self._lock = threading.RLock()  # a garbage collection within it may end others' activations

    @property
    def explicit(self) -> bool:
        """Whether activations are let go as a rule."""
        return self.mode not in ("keep", "auto")

    def wants(self, root: Root) -> bool:
        """Whether a forward of `root` may be one that is not kept."""
        return self.mode != "keep" and root.repeatable

    def surely_kept(self, root: Root, signature: Any) -> Tally | None:
        """Counts a forward with these inputs as kept if there is ample room for what such forwards keep alive: then
        nothing has to be noted that a repetition would need. None if that is not known.
        """
        nbytes = root.sizes.get(signature) if self.mode == "auto" and signature is not None else None
        if nbytes is None:
            return None
        with self._lock:
            if self.room is not None and _AMPLE * (self.kept_bytes + nbytes) > self.room:
                return None
            self.kept_bytes += nbytes
            self.kept += 1
        return Tally(self, root, signature, nbytes)

    def measured(self, tally: Tally, nbytes: int) -> None:
        """What a forward keeps alive is known."""
        with self._lock:
            self.kept_bytes += nbytes - tally.nbytes
            tally.nbytes = nbytes

    def learn(self, root: Root, signature: Any, nbytes: int) -> None:
        """A forward of `root` with such inputs has kept so many bytes alive. Inputs that do not come again are
        forgotten.
        """
        with self._lock:
            most = max(nbytes, root.sizes.pop(signature, 0))
            if len(root.sizes) >= _SIGNATURES:
                del root.sizes[next(iter(root.sizes))]
            root.sizes[signature] = most

    def ended(self, visit: Visit) -> bool:
        """A forward has ended well: keeps what it saved, or lets it go. True if it was let go."""
        saved = visit.saved_bytes()
        if not visit.unchanged():
            visit.root.repeatable = False
            log.info(
                "unit %s: its forward writes to its inputs, buffers or attributes, so its activations are kept",
                visit.root.units[0].name,
            )
            saved = 0
        elif visit.signature is not None:
            self.learn(visit.root, visit.signature, saved + visit.input_bytes())
        if saved == 0 or (self.mode == "auto" and self._fits(visit, saved)):
            self.kept += 1
            visit.keep()
            return False
        self.recomputed += 1
        visit.let_go(Kept if self.spill is None else self.spill.put)
        return True

    def _fits(self, visit: Visit, saved: int) -> bool:
        nbytes = saved + visit.input_bytes()
        with self._lock:
            if self.room is not None and self.kept_bytes + nbytes > self.room:
                return False
            self.kept_bytes += nbytes
        weakref.finalize(visit, self.gone, nbytes).atexit = False
        return True

    def gone(self, nbytes: int) -> None:
        """What was kept is not there any more."""
        with self._lock:
            self.kept_bytes -= nbytes

    def settle(self) -> None:
        """Waits until everything that was put away is, and what is not needed any more is free."""
        if self.spill is not None:
            self.spill.settle()

    def close(self) -> None:
        """Ends what is under way. Idempotent."""
        if self.spill is not None:
            self.spill.close()


def open_activations(blueprint: Blueprint, residency: Residency) -> Activations:
    """What the configuration asks for; `device` is another word for `keep`."""
    mode = blueprint.config.placement.activations
    activations = Activations("keep" if mode == "device" else mode, activation_room(blueprint))
    if mode in ("host", "nvme"):
        planned = blueprint.plan.total(Tier.DEVICE)
        make_room = residency.make_room
        activations.spill = Spill(residency.memory, Tier(mode), planned=planned, make_room=make_room, keep=Kept)
    return activations


def activation_room(blueprint: Blueprint) -> int:
    """Bytes that activations may take by `auto`: three quarters of what the plan leaves of the memory they are in."""
    plan, limits = blueprint.plan, blueprint.limits
    if blueprint.device.kind == "cuda" and limits.device is not None:
        left = limits.device - plan.total(Tier.DEVICE)
    else:
        left = limits.memory_available - plan.total(Tier.HOST) - plan.total(Tier.DEVICE)
    return max(0, left) * 3 // 4
