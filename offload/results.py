"""What steps and reports return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from swap.geometry import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The outcome of one optimizer step.

    `stepped` is False if the step was skipped, for `skipped_reason`; then no weight, moment or step count has changed.
    `grad_norm` is the global norm of the unscaled gradients before clipping, None if nothing asked for it (no clipping,
    no finite check). `loss` is set by `train_batch`.
    """

    stepped: bool
    skipped_reason: str | None = None
    grad_norm: float | None = None
    loss_scale: float = 1.0
    loss: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoverReport:
    """Bytes that `offload_states` took off the device (or `reload_states` brought back), and where they are meanwhile.

    `device` counts what the device's budget got back: less than the sum of the others while somebody keeps views.
    """

    device: int
    host: int
    nvme: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """Bytes by tier and kind: planned before the run, in use now, and the largest so far.

    `workspace` is what the process holds beyond the budgets' host memory (interpreter, libraries, autograd's
    temporaries, allocator slack); `device` counts as host memory where the device is the CPU.
    """

    planned: dict[str, dict[str, int]]
    current: dict[str, dict[str, int]]
    peak: dict[str, dict[str, int]]
    limits: dict[str, int | None]
    resident: int
    workspace: int

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dicts, for JSON."""
        return {
            "planned": self.planned,
            "measured": self.peak,
            "current": self.current,
            "limits": self.limits,
            "resident": self.resident,
            "workspace": self.workspace,
        }

    def __str__(self) -> str:
        lines = [f"{'tier':8}{'kind':22}{'planned':>12}{'peak':>12}{'now':>12}"]
        for tier in self.planned:
            kinds = sorted({*self.planned[tier], *self.peak.get(tier, {})})
            for kind in kinds:
                cells = (table.get(tier, {}).get(kind, 0) for table in (self.planned, self.peak, self.current))
                lines.append(f"{tier:8}{kind:22}" + "".join(f"{format_bytes(n):>12}" for n in cells))
        lines.append(f"resident {format_bytes(self.resident)}, workspace {format_bytes(self.workspace)}")
        return "\n".join(lines)
