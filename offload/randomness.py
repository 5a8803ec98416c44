"""Global generators seeded per (seed, step, micro-batch): dropout is the same in every order of micro-batches."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from offload.initialization import seed_for


def seed_everything(seed: int, step: int, micro_batch: int) -> None:
    """Seeds Python's, numpy's and torch's global generators (all devices)."""
    value = seed_for(seed, f"step {step} micro-batch {micro_batch}")
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    torch.manual_seed(value)


class RandomState(NamedTuple):
    """The states of all generators that `seed_everything` seeds; of accelerators only the current device's."""

    python: Any
    numpy: Any
    cpu: Tensor
    cuda: Tensor | None

    @classmethod
    def take(cls) -> RandomState:
        """What the generators are at now."""
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda)

    def restore(self) -> None:
        """Puts the generators back."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda)
