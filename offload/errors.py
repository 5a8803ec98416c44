"""Exceptions of the engine. User errors are `ValueError`s; faults of a run are `RuntimeError`s."""

from __future__ import annotations


class OffloadError(RuntimeError):
    """A fault of a running engine: an impossible transition, a broken step, use after close."""


class PlanError(ValueError):
    """The run cannot fit the budgets, the machine or the model; raised before anything large is allocated."""


class UnsupportedModelError(ValueError):
    """The model contains something that cannot be carried; the message names it."""


class StaleWeightsError(OffloadError):
    """A backward pass needs weights of an earlier generation: they were changed after its forward."""


class GradientError(OffloadError):
    """A gradient arrived, or was asked for, in a way that has no correct meaning."""


class ParallelError(OffloadError):
    """Something that ranks do together failed; the message names the operation and, where it is known, the rank."""
