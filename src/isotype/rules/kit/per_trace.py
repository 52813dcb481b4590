"""What several rules ask of a trace is worked out once, and forgotten with the trace."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from isotype.records.trace import Trace

T = TypeVar("T")


def per_trace(function: Callable[[Trace], T]) -> Callable[[Trace], T]:
    """`function`, called once for each trace: a training that was checked at its start must not keep the trace."""
    known: WeakKeyDictionary[Trace, Any] = WeakKeyDictionary()

    @wraps(function)
    def once(trace: Trace) -> T:
        if trace not in known:
            known[trace] = function(trace)
        result: T = known[trace]
        return result

    return once
