"""The largest batch or length that memory has room for, found in few measures."""

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
    """The largest number in `low` … `high` whose measure has room; None if that of `low` has none.

    A step's peak is the highest of several moments, each of which grows in proportion to rows and by a polynomial of
    their length: a convex function. A chord is never below it between its ends, nor above it past them: a number past two
    that were measured takes at least what the line through them says. The search ends where that line leaves no room for the
    next one, so that a step in proportion takes three measures, or one where all of it fits.

    Args:
        measure: bytes; grows with the number.
        high, low: the numbers looked at.
        room: bytes.
        enough: asked about a number that has room and a larger one that has none: whether those between are of no interest.
        high_first: whether `high` is measured before `low`.
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
    """The number to measure next, in `best` … `limit` - 1: the largest that the line through two known points leaves room for.

    Where only one below the limit is known: the one that a chord to the limit promises, or the limit itself.
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
