"""Global generators seeded per (seed, step, micro-batch): dropout is the same in every order of micro-batches."""

from __future__ import annotations

import random

import numpy as np
import torch

from offload.initialization import seed_for


def seed_everything(seed: int, step: int, micro_batch: int) -> None:
    """Seeds Python's, numpy's and torch's global generators (all devices)."""
    value = seed_for(seed, f"step {step} micro-batch {micro_batch}")
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    torch.manual_seed(value)
