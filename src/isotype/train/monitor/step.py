"""An optimizer step of a trainer: its inputs and measurements, which are collected on the device and read once.

A step whose loss or gradient is not finite must not change the weights. PyTorch's fused Adam and AdamW on CUDA skip an
update if `found_inf` is set (a flag on the device, which GradScaler also uses). With these optimizers, the host reads the
values one step later, without waiting. With other optimizers and devices, the host reads the values before the update.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from isotype.compat.torch import PLAIN
from isotype.core.random_states import RandomStates
from isotype.report.run.record import StepRecord

DEFERRED_ON = ("cuda",)
"""Device types on which fused optimizers read `found_inf`. ROCm has the type `cuda`."""

_LOSS, _NORM = 1, 3
"""Indices of loss and norm in the tensor of five values that `launch` makes."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Inputs of one call of `compute_loss`. Tensors are not copied."""

    model: Any
    inputs: Any
    items: Any
    states: RandomStates


@dataclass
class Step:
    """An optimizer step. `read` converts loss, norm and scale from scalars on the device to Python numbers.

    Attributes:
        tokens: number of tokens in the batches of all processes, without padding (set by `read`).
        loss: sum of the losses of this process's micro-batches. `read` averages the sums of all processes.
        grad_norm: norm of the unscaled gradients before clipping, or None if it was not measured.
        scale: the loss scale in the backward, or None without loss scaling.
        stops: number of processes that have received a stop signal (set by `read`).
        began: start of the step by `time.perf_counter`, in seconds.
        memory_bytes: peak memory of this process, or 0 if it was not measured.
    """

    number: int
    learning_rate: float = 0.0
    batches: list[MicroBatch] = field(default_factory=list)
    tokens: int = 0
    loss: Any = 0.0
    grad_norm: Any = None
    scale: Any = None
    stops: int = 0
    is_read: bool = False
    began: float = field(default_factory=time.perf_counter)
    seconds: float = 0.0
    memory_bytes: int = 0
    skipped: bool = False
    _values: torch.Tensor | None = None
    _processes: int = 1
    _arrived: Any = None

    @property
    def waits(self) -> bool:
        """True between `launch` and `read`, while the values are on the device."""
        return self._values is not None and not self.is_read

    def launch(self, device: torch.device, accelerator: Any = None, stops: bool = False) -> None:
        """Collect the values in one tensor on the device, without waiting for the device.

        Args:
            accelerator: sums tokens, losses and stop signals over all processes (a collective operation). If `accelerator`
                is None, only the loss of this process is collected, and tokens are not counted.
            stops: True if this process has received a stop signal.
        """
        # MPS and some XPUs have no float64. In float32, numbers of tokens above 2^24 would be rounded.
        wide = torch.float64 if device.type in ("cpu", "cuda") else torch.float32
        tokens = sum(count_tokens(batch.inputs) for batch in self.batches) if accelerator is not None else 0
        values = torch.stack(
            [
                torch.as_tensor(part, dtype=wide, device=device)
                if isinstance(part, torch.Tensor)
                # `full` writes the number on the device; a copy from the host would wait for the device.
                else torch.full((), math.nan if part is None else float(part), dtype=wide, device=device)
                for part in (tokens, self.loss, stops, self.grad_norm, self.scale)
            ]
        )
        if accelerator is not None and accelerator.num_processes > 1:
            self._processes = accelerator.num_processes
            values[:_NORM] = accelerator.reduce(values[:_NORM], reduction="sum")
        self._values = values

    def broken(self) -> torch.Tensor:
        """Return a float32 scalar on the device: 1 if the step's loss or norm is not finite, and 0 otherwise."""
        assert self._values is not None
        finite = self._values[_LOSS].isfinite()
        if self.grad_norm is not None:
            finite = finite & self._values[_NORM].isfinite()
        return finite.logical_not().to(torch.float32)

    def send(self) -> None:
        """Begin to copy the values on the device to the host, without waiting for the copy."""
        assert self._values is not None
        if self._values.device.type != "cpu":
            host = torch.empty(self._values.shape, dtype=self._values.dtype, pin_memory=True)
            host.copy_(self._values, non_blocking=True)
            self._arrived = torch.get_device_module(self._values.device).Event()
            self._arrived.record()
            self._values = host

    def read(self) -> None:
        assert self._values is not None
        if self._arrived is not None:
            self._arrived.synchronize()
        tokens, loss, stops, norm, scale = self._values.tolist()
        self.tokens, self.loss, self.stops = int(tokens), loss / self._processes, int(stops)
        self.grad_norm = None if self.grad_norm is None else norm
        self.scale = None if self.scale is None else scale
        self.is_read = True

    def record(self) -> StepRecord:
        return StepRecord(
            step=self.number,
            loss=self.loss,
            learning_rate=self.learning_rate,
            grad_norm=self.grad_norm,
            tokens=self.tokens,
            seconds=self.seconds,
            memory_bytes=self.memory_bytes,
            loss_scale=self.scale,
            skipped=self.skipped,
        )


_MASKS = {"input_ids": "attention_mask", "prompt_ids": "prompt_mask", "completion_ids": "completion_mask"}


def count_tokens(batch: Mapping[str, Any]) -> torch.Tensor | int:
    """Count the tokens in a batch's attention masks, without the extra sequences for KTO's KL estimate."""
    total: torch.Tensor | int = 0
    for ids, mask in _MASKS.items():
        if batch.get(ids) is not None:
            # The sum stays on the device: reading it would make every micro-batch wait for the GPU.
            total = total + (batch[ids].numel() if batch.get(mask) is None else batch[mask].sum())
    return total


def skipping_optimizer(optimizer: Any, accelerator: Any, device: torch.device) -> Any | None:
    """Return the optimizer inside accelerate's wrapper if it skips an update when `found_inf` is set, else None.

    Return None with a GradScaler, because GradScaler sets `found_inf` itself. Return None with several processes, because
    the host must read the stop signals of all processes before the update.
    """
    scaler = getattr(accelerator, "scaler", None)
    if device.type not in DEFERRED_ON or accelerator.num_processes > 1 or scaler is not None:
        return None
    inner = getattr(optimizer, "optimizer", optimizer)
    if type(inner) not in (torch.optim.Adam, torch.optim.AdamW):
        return None
    fused = all(group.get("fused") for group in inner.param_groups)
    held = (p for group in inner.param_groups for p in group["params"])
    plain = all(type(p) in PLAIN and p.device.type == device.type for p in held)
    return inner if fused and plain else None
