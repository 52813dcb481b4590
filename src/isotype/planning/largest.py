"""The largest batch or length that fits in memory, found with few measurements."""

from __future__ import annotations

from collections.abc import Callable, Mapping

_SECANTS, _ATTEMPTS = 5, 14
"""Secant steps before bisection takes over; measurements in all."""


def largest(
    measure: Callable[[int], int],
    high: int,
    room: int,
    low: int = 1,
    *,
    enough: Callable[[int, int], bool] = lambda low, high: high - low <= 1,
    high_first: bool = True,
) -> int | None:
    """Return the largest number in `low` … `high` whose measure (bytes) is at most `room`; None if that of `low` is
    more.

    A step's peak is the maximum of moments that are each linear in the rows and polynomial in their length: a convex
    function. Past two measured points it is at least their secant. The search ends once the secant leaves no room for
    the next number: after three measurements if the function is linear, after one if `high` fits. `enough(low, high)`
    ends it earlier.
    """
    known: dict[int, int] = {}

    def fits(number: int) -> bool:
        known[number] = measure(number)
        return known[number] <= room

    if high_first and fits(high):
        return high
    if not fits(low):
        return None
    if low == high:
        return low
    for attempt in range(_ATTEMPTS):
        best = max(number for number in known if known[number] <= room)
        limit = min((number for number in known if known[number] > room), default=high + 1)
        tried = _next(known, best, limit, room)
        if tried <= best or enough(best, min(limit, tried + 1)):
            return best
        if attempt >= _SECANTS:
            tried = min(tried, max(best + 1, (best + limit) // 2))
        fits(tried)
    return max(number for number in known if known[number] <= room)


def _next(known: Mapping[int, int], best: int, limit: int, room: int) -> int:
    """Return the number to measure next, in `best` … `limit` - 1: the largest that fits by the secant of two known
    points.

    If only one point below the limit is known: the one by the chord to the limit, or the limit itself.
    """
    below = [number for number in known if number < best]
    if below:
        before = max(below)
        slope = (known[best] - known[before]) / (best - before)
        return min(limit - 1, best + int((room - known[best]) / slope)) if slope > 0 else limit - 1
    if limit in known:
        slope = (known[limit] - known[best]) / (limit - best)
        return min(limit - 1, max(best + 1, best + int((room - known[best]) / slope)))
    return limit - 1
