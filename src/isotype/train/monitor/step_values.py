"""The values of an optimizer step: brought together on the device that trains, and read by the host once.

A step whose loss or gradient is not finite must not change the weights. Where the optimizer is torch's fused Adam or AdamW on CUDA, the
device itself leaves the update out (`found_inf`, which the GradScaler uses), so the host launches the update first and reads a step later,
when the values have long arrived: it waits for nothing. Elsewhere it reads before the update.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from isotype.compat.torch import PLAIN

DEFERRED_ON = ("cuda",)
"""Device types whose work is queued, and whose fused optimizers leave an update out; ROCm's is cuda."""

TOKENS, LOSS, STOPS, NORM, SCALE = range(5)


@dataclass(frozen=True)
class StepValues:
    """What is read of an optimizer step, all at once.

    Attributes:
        tokens: that its losses are computed on, over all processes.
        loss: of the step, over all processes.
        grad_norm: of its gradients before clipping, None where it was not measured.
        scale: the loss scale that its backward ran with, None without one.
        stops: processes that were asked to stop.
    """

    tokens: int
    loss: float
    grad_norm: float | None
    scale: float | None = None
    stops: int = 0


@dataclass(frozen=True)
class LaunchedValues:
    """Values of a step on their device.

    Attributes:
        values: float64 or float32 `[5]`: tokens, loss, requests to stop, norm, scale; NaN where there is none.
        processes: that the loss is summed over.
        has_norm, has_scale: whether there is one.
        host: where the values are on their way to, in pinned memory; None: they are read from the device.
        arrived: the event after which they are there.
    """

    values: torch.Tensor
    processes: int
    has_norm: bool
    has_scale: bool
    host: torch.Tensor | None = None
    arrived: Any = None

    def sent(self) -> LaunchedValues:
        """On their way to the host, which does not wait for them here."""
        if self.values.device.type == "cpu":
            return self
        host = torch.empty(self.values.shape, dtype=self.values.dtype, pin_memory=True)
        host.copy_(self.values, non_blocking=True)
        arrived = torch.get_device_module(self.values.device).Event()
        arrived.record()
        return LaunchedValues(self.values, self.processes, self.has_norm, self.has_scale, host, arrived)

    def read(self) -> StepValues:
        """The values; waits until they have arrived."""
        if self.arrived is not None:
            self.arrived.synchronize()
        tokens, loss, stops, norm, scale = (self.values if self.host is None else self.host).tolist()
        return StepValues(
            int(tokens),
            loss / self.processes,
            norm if self.has_norm else None,
            scale if self.has_scale else None,
            int(stops),
        )

    def broken(self) -> torch.Tensor:
        """float32 scalar on the device: 1 where loss or norm is not finite, else 0."""
        finite = self.values[LOSS].isfinite()
        if self.has_norm:
            finite = finite & self.values[NORM].isfinite()
        return finite.logical_not().to(torch.float32)


def launched(
    parts: Sequence[torch.Tensor | float | None], device: torch.device, accelerator: Any
) -> LaunchedValues:
    """Bring the values of a step together, without waiting for the device.

    Args:
        parts: tokens, loss, whether this process was asked to stop, norm, loss scale; None where there is none.
        device: that trains.
        accelerator: sums the first three where there are several processes; every process has to call it.
    """
    # MPS has no float64, nor has every XPU; in float32 more than 2^24 tokens a step would be rounded.
    wide = torch.float64 if device.type in ("cpu", "cuda") else torch.float32
    values = torch.stack(
        [
            torch.as_tensor(part, dtype=wide, device=device)
            if isinstance(part, torch.Tensor)
            # A number is written by the device itself: to copy it there would wait for the device.
            else torch.full((), math.nan if part is None else float(part), dtype=wide, device=device)
            for part in parts
        ]
    )
    count = accelerator.num_processes
    if count > 1:
        values[:NORM] = accelerator.reduce(values[:NORM], reduction="sum")
    return LaunchedValues(values, count, parts[NORM] is not None, parts[SCALE] is not None)


def skipping_optimizer(optimizer: Any, accelerator: Any, device: torch.device) -> Any | None:
    """The optimizer below accelerate's wrapper, where it leaves an update out by a flag on its device; else None.

    Not where there is a GradScaler, which sets the flag itself, nor with several processes, whose requests to stop are read with the values.
    """
    scaler = getattr(accelerator, "scaler", None)
    if device.type not in DEFERRED_ON or accelerator.num_processes > 1 or scaler is not None:
        return None
    inner = getattr(optimizer, "optimizer", optimizer)
    if type(inner) not in (torch.optim.Adam, torch.optim.AdamW):
        return None
    fused = all(group.get("fused") for group in inner.param_groups)
    plain = all(
        type(p) in PLAIN and p.device.type == device.type
        for group in inner.param_groups
        for p in group["params"]
    )
    return inner if fused and plain else None
