"""What `isotype run` was asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PREFLIGHT_SECONDS = 10.0
"""Seconds that the trace before the first step may take: enough for thousands of operators."""


@dataclass(frozen=True)
class Options:
    """What `isotype run` was asked.

    Attributes:
        target: path of the script, or name of the module.
        module: whether `target` is a module (`-m`).
        arguments: the script's own.
        steps: optimizer steps to watch.
        device: profile to judge for; None for the device the model is on.
        seconds: that tracing the first step on fake tensors may take before it runs; 0 for no such trace.
        watch: whether the values of the whole training are watched, and a loss that is no number ends it.
    """

    target: str
    module: bool
    arguments: tuple[str, ...]
    steps: int = 1
    device: str | None = None
    seconds: float = PREFLIGHT_SECONDS
    watch: bool = False

    def flags(self) -> Sequence[str]:
        """Return the arguments of `isotype run` that ask for the same, without what is run."""
        device = () if self.device is None else ("--device", self.device)
        watch = ("--watch",) if self.watch else ()
        return ("--steps", str(self.steps), *device, *watch, "--preflight-seconds", f"{self.seconds:g}")
