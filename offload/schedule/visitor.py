"""What a binding tells the schedule of a step about the current thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from offload.residency import Unit


class Visitor(Protocol):
    """Told where in the model the current thread is. Calls from threads that it does not know change nothing.

    `entering`, `reaching` and `gradient_due` may let other threads run before they return; the caller holds no lock.
    """

    def entering(self, units: Sequence[Unit], *, graded: bool) -> None:
        """A forward of the first of `units` begins, outside any backward; the others are those that it borrows from."""

    def reaching(self, units: Sequence[Unit]) -> None:
        """A backward comes to `units`."""

    def leased(self, units: Sequence[Unit]) -> None:
        """`units` are resident now."""

    def gradient_due(self, unit: int, name: str) -> None:
        """A gradient of a parameter of `unit` is about to be added."""

    def gradient_added(self, unit: int, name: str, *, nested: bool) -> None:
        """It was; `nested`: by a backward within a backward."""

    def paused(self, thread: int) -> bool:
        """Whether the thread waits for its turn."""
        ...

    def kept(self) -> list[Unit]:
        """Units that the visitor itself has leased, only for speed."""
        ...

    def drop(self, unit: Unit) -> None:
        """Ends such a lease, if there is one."""
