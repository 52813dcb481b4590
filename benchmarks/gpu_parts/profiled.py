"""Seconds of every step, and the kernels of the last one: in a loop (`with steps:`) or in a trainer (`steps.callback()`)."""

from __future__ import annotations

import time
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

TOP = 40
"""Kernels that are named."""


class Steps:
    """Measures steps one after another; the last one is profiled and not timed.

    Args:
        device: `cuda` or `cpu`; there operators stand for kernels.
        count: how many steps there will be.

    Attributes:
        seconds: of each step but the last.
        losses: of each step, as whoever runs them puts them here.
    """

    def __init__(self, device: str, count: int) -> None:
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self._device, self._count, self._done = device, count, 0
        self._began = 0.0
        self._profiled = 0.0
        self._profiler: Any = None

    def __enter__(self) -> None:
        if self._done == self._count - 1:
            kind = ProfilerActivity.CUDA if self._device == "cuda" else ProfilerActivity.CPU
            self._profiler = profile(activities=[kind])
            self._profiler.__enter__()
        self._wait()
        self._began = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._wait()
        took = time.perf_counter() - self._began
        if self._profiler is not None and self._done == self._count - 1:
            self._profiled = took
            self._profiler.__exit__(kind, error, trace)
        else:
            self.seconds.append(took)
        self._done += 1

    def _wait(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()

    def callback(self) -> Any:
        """A callback of transformers' Trainer that measures its steps."""
        from transformers import TrainerCallback

        steps = self

        class Clock(TrainerCallback):  # type: ignore[misc]
            def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
                steps.__enter__()

            def on_step_end(self, *args: Any, **kwargs: Any) -> None:
                steps.__exit__(None, None, None)

            def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
                if logs and "loss" in logs:
                    steps.losses.append(float(logs["loss"]))

        return Clock()

    def profile(self) -> dict[str, Any]:
        """Launches, the share of the profiled step in which a kernel ran, and the kernels that took longest.

        Returns:
            `kernels`: [name, how often, seconds] of the first `TOP` by seconds; empty where no step was profiled.
        """
        if self._profiler is None:
            return {"launches": 0, "busy": 0.0, "kernels": []}
        wanted = self._device.upper()
        events = [
            (str(event.name()), int(event.start_ns()), int(event.duration_ns()))
            for event in self._profiler.profiler.kineto_results.events()
            if event.device_type().name == wanted and not event.name().startswith("[")
        ]
        busy = covered((start, start + length) for _, start, length in events) / 1e9
        share = min(1.0, busy / self._profiled) if self._profiled else 0.0
        return {"launches": len(events), "busy": share, "profiled": self._profiled, "kernels": table(events)}


def table(events: Iterable[tuple[str, int, int]]) -> list[list[Any]]:
    """[name, how often, seconds] of (name, start, nanoseconds), those that took longest first."""
    sums: dict[str, tuple[int, int]] = {}
    for name, _, length in events:
        count, whole = sums.get(name, (0, 0))
        sums[name] = count + 1, whole + length
    longest = sorted(sums.items(), key=lambda item: -item[1][1])[:TOP]
    return [[name[:120], count, length / 1e9] for name, (count, length) in longest]


def covered(spans: Iterable[tuple[int, int]]) -> int:
    """The length of what any of the spans covers."""
    length, end = 0, None
    for first, last in sorted(spans):
        if end is None or first > end:
            length, end = length + last - first, last
        elif last > end:
            length, end = length + last - end, last
    return length
