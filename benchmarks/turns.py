"""Calls that are timed in turns, and the quartiles of what they took, for the benchmarks that compare."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any


def in_turns(
    calls: Mapping[str, Callable[[], Any]], turns: int, *, warm_up: int = 1
) -> dict[str, list[float]]:
    """Milliseconds of each call in each turn, after those that warm up."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(warm_up + turns):
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            if turn >= warm_up:
                taken[name].append((time.perf_counter() - began) * 1e3)
    return taken


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """(lower quartile, median, upper quartile); of one value, that one."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high
