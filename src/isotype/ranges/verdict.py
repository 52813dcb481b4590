"""Decision whether to continue a training with a non-finite loss or gradient."""

from __future__ import annotations

import math
from collections.abc import Callable

_SKIPS = 10
"""Consecutive skipped steps, down to a loss scale of 1, after which a run is stopped."""


class Verdict:
    """Judges the steps of one training in order."""

    def __init__(self) -> None:
        self._skips = 0

    def of(self, loss: float, norm: float | None, scale: Callable[[], float] | None) -> str | None:
        """Return why the training has to end; None if it may continue.

        A non-finite gradient is normal under a GradScaler, which skips the step and lowers the scale, until
        the scale cannot be lowered. A non-finite loss always ends the training. `scale` reads the loss scale;
        None without a GradScaler.
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
