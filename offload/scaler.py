"""The loss scale of fp16 training: constant, or dynamic with hysteresis.

An overflow uses up one unit of hysteresis; when none is left the scale is halved (not below the minimum) and the
hysteresis is full again. After `window` steps in a row without overflow the scale doubles and the hysteresis is full
again. Powers of two change no bits of a gradient.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class LossScaler:
    """`scale` multiplies the loss; `update` is called once per optimizer step, `overflow` if its gradients were not
    finite.
    """

    scale: float
    dynamic: bool
    window: int
    minimum: float
    hysteresis: int
    good_steps: int = 0
    left: int = 0

    def __post_init__(self) -> None:
        self.left = self.hysteresis

    def update(self, *, overflow: bool) -> None:
        if not self.dynamic:
            return
        if overflow:
            self.good_steps = 0
            self.left -= 1
            if self.left <= 0:
                self.scale = max(self.minimum, self.scale / 2)
                self.left = self.hysteresis
            return
        self.good_steps += 1
        if self.good_steps % self.window == 0:
            self.scale *= 2
            self.left = self.hysteresis
