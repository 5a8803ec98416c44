"""What must be remembered of the last step boundary: random states and buffers.

Weights and optimizer states change in steps only, but a forward pass draws random numbers and may change buffers
(running statistics). A checkpoint taken in the middle of an accumulation drops what was accumulated, and a resumed run
replays those micro-batches; so it must hold random states and buffers as they were at the boundary.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from offload.checkpoint.errors import DamagedCheckpointError
from offload.checkpoint.format import decode_state, encode_state


def raw_rng() -> dict[str, Any]:
    """The global random states of Python, numpy and torch, on all devices in use."""
    version, keys, position, has_gauss, cached = np.random.get_state()
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (str(version), np.asarray(keys).tobytes(), int(position), int(has_gauss), float(cached)),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def encode_rng(state: dict[str, Any]) -> Any:
    """`raw_rng()` as JSON."""
    return encode_state(state, "random states")


def restore_rng(encoded: Any, where: str) -> None:
    """Sets encoded random states; all or, if one of them cannot be, none."""
    state, before = decode_state(encoded, where), raw_rng()
    try:
        _set_rng(state)
    except Exception as error:
        _set_rng(before)
        raise DamagedCheckpointError(f"{where}: random states that cannot be set: {error}") from error


def _set_rng(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    version, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((version, np.frombuffer(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        for index, one in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(one, index)


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that a state dict holds, each once, under its first name."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set and id(buffer) not in seen:
                seen.add(id(buffer))
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


class Boundary:
    """Random states and changing buffers at the last step boundary.

    Only buffers that have changed since the engine was made are copied at each boundary; most never do.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._first: dict[str, tuple[int, Tensor]] = {}
        self._copies: dict[str, Tensor] = {}
        self._rng: dict[str, Any] = {}
        self.crossed = False
        """Whether a forward or backward has begun since."""
        self.mark()

    def mark(self) -> None:
        """The present is a step boundary."""
        self._rng = raw_rng()
        self.crossed = False
        for name, buffer in persistent_buffers(self._model).items():
            known = self._first.get(name)
            if known is None:
                self._first[name] = (buffer._version, buffer.detach().to("cpu", copy=True))
            elif known[0] != buffer._version or name in self._copies:
                self._copies[name] = buffer.detach().to("cpu", copy=True)

    def rng(self) -> Any:
        """Encoded random states to save: the present ones, or those of the boundary once something has begun."""
        return encode_rng(self._rng if self.crossed else raw_rng())

    def buffers(self) -> dict[str, Tensor]:
        """CPU tensors to save, by name."""
        found = {}
        for name, buffer in persistent_buffers(self._model).items():
            if self.crossed and name in self._first:
                found[name] = self._copies.get(name, self._first[name][1])
            else:
                found[name] = buffer.detach().to("cpu", copy=True)
        return found
