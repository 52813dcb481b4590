"""Whether a training whose loss or gradient is not finite may go on."""

from __future__ import annotations

import math
from collections.abc import Callable

_SKIPS = 10
"""Steps that a GradScaler skips in a row, down to a scale of 1, before a run is stopped: nothing is left to lower."""


class Verdict:
    """Judges the steps of one training, one after the other."""

    def __init__(self) -> None:
        self._skips = 0

    def of(self, loss: float, norm: float | None, scale: Callable[[], float] | None) -> str | None:
        """What ends the training; None while it may go on.

        A gradient that is not finite is ordinary under a GradScaler, which skips its step and lowers the scale, until
        nothing is left to lower; a loss never is.

        Args:
            loss: of the step.
            norm: of its gradients, None where it was not measured.
            scale: reads the loss scale; None without a GradScaler.
        """
        if not math.isfinite(loss):
            return "the loss is not finite"
        if norm is None or math.isfinite(norm):
            self._skips = 0
            return None
        if scale is None:
            return "the gradient is not finite"
        self._skips += 1
        if self._skips < _SKIPS or scale() > 1:
            return None
        return f"the gradient is not finite at any loss scale: {self._skips} steps were skipped in a row"
