"""The largest batch or length with which a step fits, found by tracing it again and told as a command."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from isotype.core.units import format_bytes
from isotype.records.finding import Fix
from isotype.train.preflight.command import set_flag, without_flag

if TYPE_CHECKING:
    from isotype.report.check.report import Report
    from isotype.train.preflight.step_plan import StepPlan

_TRACES = 4
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
    most = _largest(lambda rows: peak(rows, length), plan.rows, report.memory.peak, room)
    flags = {"--per_device_train_batch_size": most}
    if most is None:
        top = -(-length // _LENGTHS)
        at_one = report.memory.peak if plan.rows == 1 else peak(1, length)
        units = _largest(lambda units: peak(1, units * _LENGTHS), top, at_one, room)
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
    fix = Fix(
        f"this fits: {shlex.join(tokens)}",
        "safe",
        verified=True,
        outcome=f"at most {format_bytes(room)} are used",
    )
    findings = tuple(
        replace(finding, fixes=(fix, *finding.fixes)) if finding.kind == "memory" else finding
        for finding in report.findings
    )
    return replace(report, findings=findings)


def _largest(measure: Callable[[int], int], high: int, at_high: int, room: int) -> int | None:
    """The largest number below `high` whose measure has room, as far as a few measures tell; None where 1 has none.

    Memory grows nearly in proportion to rows: the secant finds it in one or two traces.
    """
    if high <= 1:
        return None
    low, at_low = 1, measure(1)
    if at_low > room:
        return None
    for _ in range(_TRACES):
        guess = low + (room - at_low) * (high - low) // max(1, at_high - at_low)
        guess = min(max(guess, low + 1), high - 1)
        if guess <= low:
            break
        value = measure(guess)
        if value <= room:
            low, at_low = guess, value
        else:
            high, at_high = guess, value
    return low
