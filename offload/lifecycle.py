"""The life cycle of an engine."""

from __future__ import annotations

import enum


class Status(enum.Enum):
    """Life cycle of an engine."""

    READY = "ready"
    STEPPING = "in its optimizer step"
    AWAY = "off its device until reload_states()"
    FAILED = "failed"
    CLOSED = "closed"


TRANSITIONS = {
    (Status.READY, Status.STEPPING),
    (Status.STEPPING, Status.READY),
    (Status.STEPPING, Status.FAILED),
    (Status.READY, Status.FAILED),
    (Status.READY, Status.AWAY),
    (Status.AWAY, Status.READY),
    (Status.READY, Status.CLOSED),
    (Status.AWAY, Status.CLOSED),
    (Status.FAILED, Status.CLOSED),
    (Status.STEPPING, Status.CLOSED),
}
