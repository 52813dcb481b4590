"""The memory that torch's allocator gives out while a function runs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

from torch.profiler import ProfilerActivity, profile


def peak_of(run: Callable[[], Any]) -> tuple[int, Any]:
    """Return (the most bytes that were allocated on the CPU at once, the function's result)."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = run()
    recorded: Any = profiler.profiler
    events = [event for event in recorded.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(accumulate((int(event.nbytes()) for event in events), initial=0)), result
