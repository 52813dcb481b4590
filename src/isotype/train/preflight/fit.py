"""The largest batch or length with which a step fits, found by tracing it again and told as a command."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from isotype.core.units import format_bytes
from isotype.records.finding import Finding, Fix
from isotype.train.preflight.command import set_flag, without_flag

if TYPE_CHECKING:
    from isotype.report.check.report import Report
    from isotype.train.preflight.plan import StepPlan

_SECANTS, _ATTEMPTS = 5, 14
"""Secant steps before bisection takes over; measurements in all."""
_LENGTHS = 64  # tokens that a length is a multiple of


def fitting(
    report: Report, plan: StepPlan, length: int, command: Sequence[str], peak: Callable[[int, int], int]
) -> Report:
    """The report with a command that fits as the first fix of what does not fit, where a smaller batch or length does.

    Args:
        report: of a step that does not fit; another one is returned as it is.
        plan: what was checked.
        length: tokens of a row in it.
        command: the training command.
        peak: bytes at the peak of the step with so many rows of so many tokens.
    """
    room = report.trace.setup.limit.size
    if report.fits is not False or room is None or plan.completion:
        return report
    at_once = report.memory.peak
    most = _below(plan.rows, at_once, room, lambda rows: peak(rows, length))
    flags = {"--per_device_train_batch_size": most}
    if most is None:
        top = -(-length // _LENGTHS)
        at_one = at_once if plan.rows == 1 else peak(1, length)
        units = _below(top, at_one, room, lambda units: peak(1, units * _LENGTHS))
        if units is None:
            return report
        flags = {"--per_device_train_batch_size": 1, "--max_length": units * _LENGTHS}
        most = 1
    if plan.rows > 1:
        flags["--gradient_accumulation_steps"] = -(-max(plan.rows, plan.step_rows) // most)
    if plan.length is not None and not plan.data:
        flags = {"--max_length": length, **flags}
    # The command is for the machine that was judged; a profile's name means nothing there.
    tokens = list(command) if report.trace.setup.profile.present else without_flag(command, "--device")
    for name, value in flags.items():
        tokens = set_flag(tokens, name, str(value))
    findings = fits_first(report.findings, tokens, f"at most {format_bytes(room)} are used")
    return replace(report, findings=findings)


def fits_first(findings: Iterable[Finding], command: Iterable[str], outcome: str) -> tuple[Finding, ...]:
    """The findings, those on memory with a command that fits as their first fix."""
    fix = Fix("this fits", "safe", verified=True, outcome=outcome, command=tuple(command))
    return tuple(
        replace(finding, fixes=(fix, *finding.fixes)) if finding.kind == "memory" else finding
        for finding in findings
    )


def _below(high: int, at_high: int, room: int, measure: Callable[[int], int]) -> int | None:
    """The largest number below `high`, whose measure is known and has no room, or near it; None if 1 has none."""
    return largest(
        lambda number: at_high if number == high else measure(number),
        high,
        room,
        enough=lambda low, high: high - low <= max(1, low // 16),
    )


def largest(
    measure: Callable[[int], int],
    high: int,
    room: int,
    low: int = 1,
    *,
    enough: Callable[[int, int], bool] = lambda low, high: high - low <= 1,
    high_first: bool = True,
) -> int | None:
    """The largest number in `low` … `high` whose measure has room; None where that of `low` has none.

    What a step takes is the highest of several moments, each of which grows in proportion to rows and by a polynomial of
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
