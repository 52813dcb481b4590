"""The settings nearest to those of a step that does not fit, with which it does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from isotype.core.commands import printed_command
from isotype.core.errors import IsotypeError
from isotype.core.units import format_bytes
from isotype.data.methods import METHODS
from isotype.model.recompute import CHECKPOINTING
from isotype.planning.from_request import plan_of_request
from isotype.planning.record import Row, picked
from isotype.planning.request import PlanRequest, parse_request
from isotype.precision.devices.profile import device_profile
from isotype.precision.devices.room import room_of
from isotype.records.finding import Finding
from isotype.train.preflight.fit import fits_first
from isotype.train.preflight.plan import StepPlan

_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")


def nearest(request: PlanRequest) -> Row | None:
    """A row of the same storage, else of another, with rows of the same length; the longest that fit, where none are so long.

    Every layer is computed again in it, which takes the least memory: what fits is found in the fewest traces.
    """
    plan = plan_of_request(
        replace(request, step=replace(request.step, auto=False, checkpointing=CHECKPOINTING))
    )
    fitting = [row for row in plan.rows if row.fits]
    same = [row for row in fitting if row.storage == plan.rows[0].storage]
    return picked(same, "balanced") or plan.chosen


def with_nearest(
    findings: tuple[Finding, ...], step: StepPlan, command: Sequence[str]
) -> tuple[Finding, ...]:
    """The findings on a step that does not fit, with the nearest that does as the first fix; those with such a fix stay.

    Args:
        findings: on the step.
        step: what was checked.
        command: the training command.
    """
    memory = [finding for finding in findings if finding.kind == "memory"]
    if not memory or any(fix.verified for each in memory for fix in each.fixes):
        return findings
    if METHODS[step.method].loss == "policy":
        return findings  # its rows are completions of prompts: their length is no argument of the step alone
    request = PlanRequest(
        step,
        tuple(command),
        (step.device,),
        count=step.devices,
        length=step.length,
        step_rows=max(step.rows, step.step_rows) * step.devices,
    )
    try:
        row = nearest(request)
    except IsotypeError:
        return findings  # what the plan meets, the check has said
    if row is None:
        return findings
    return fits_first(findings, row.command, f"{format_bytes(row.peak)} are used")


def ran_out(error: BaseException) -> bool:
    """Whether a training has ended because there was no memory: torch says so in an error of its own or in words."""
    return isinstance(error, (MemoryError, RuntimeError)) and (
        isinstance(error, MemoryError) or any(words in str(error) for words in _OUT_OF_MEMORY)
    )


def advice(method: str, argv: Sequence[str]) -> str:
    """What fits instead of a training that has run out of memory, as a line; why nothing can be said, where nothing can."""
    try:
        request, _ = parse_request([method, *argv])
        profile = device_profile(request.devices[0])
        if profile.kind != "cpu" and profile.memory_bytes:
            # What this process still holds is free for the next one.
            request = replace(request, memory=room_of(profile, all_free=True).size)
        row = nearest(replace(request, length=request.length or request.step.length))
    except IsotypeError as error:
        return f"what fits is not known: {error.headline}"
    if row is None:
        return "out of memory, and nothing smaller of this model fits: isotype plan says what would on another device"
    return f"out of memory; this fits ({format_bytes(row.peak)}):\n{printed_command(row.command, indent=4)}"
