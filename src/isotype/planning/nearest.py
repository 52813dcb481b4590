"""The settings nearest to those of a step that does not fit, with which it does."""

from __future__ import annotations

from dataclasses import replace

from isotype.core.commands import printed_command
from isotype.core.errors import IsotypeError
from isotype.core.units import format_bytes
from isotype.data.methods import METHODS
from isotype.model.recompute import CHECKPOINTING
from isotype.planning.from_request import plan_of_request
from isotype.planning.record import Row, picked
from isotype.planning.request import PlanRequest, request_of
from isotype.precision.devices.profile import device_profile
from isotype.precision.devices.room import room_of
from isotype.records.finding import Finding, Fix, Safety
from isotype.train.command.command import Command
from isotype.train.preflight.plan import StepPlan

_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")


def nearest(request: PlanRequest) -> Row | None:
    """The row that fits and differs least from a request; None where none does.

    Tried one after the other, until rows of the same length fit: fewer rows at once, as many a step; every layer computed again; another
    storage. Else the longest rows that fit.
    """
    step = request.step
    again = replace(step, auto=False, checkpointing=CHECKPOINTING)
    tries = [again] if step.auto or step.checkpointing == CHECKPOINTING else [step, again]
    for each in tries:
        plan = plan_of_request(replace(request, step=each, quantize=False, longest=False))
        if any(row.fits for row in plan.rows):
            return plan.chosen
    others = plan_of_request(replace(request, step=again, quantize=True))
    fits = picked([row for row in others.rows if row.fits], "balanced")
    if fits is not None:
        return fits
    shorter = plan_of_request(replace(request, step=again, quantize=False))
    return shorter.chosen or others.chosen


def with_nearest(findings: tuple[Finding, ...], step: StepPlan, command: Command) -> tuple[Finding, ...]:
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
    rows = max(step.rows, step.step_rows) * step.devices
    command = command.but(**_said_by(step, command))
    request = PlanRequest(
        step,
        command,
        (step.device,),
        count=step.devices,
        at_most=step.rows,
        length=step.length,
        step_rows=rows,
    )
    try:
        row = nearest(request)
    except IsotypeError:
        return findings  # what the plan meets, the check has said
    if row is None:
        return findings
    safety: Safety = "safe" if _same_training(command, row) else "unsafe"
    words = _changes(command, row)
    fix = Fix(
        f"this fits{words}",
        safety,
        verified=True,
        outcome=f"{format_bytes(row.peak)} are used",
        command=row.command.tokens(),
    )
    return tuple(
        replace(finding, fixes=(fix, *finding.fixes)) if finding.kind == "memory" else finding
        for finding in findings
    )


def _said_by(step: StepPlan, command: Command) -> dict[str, int]:
    """The rows of a bare model's check, which the training would have more of by default."""
    return {} if "per_device_train_batch_size" in command else {"per_device_train_batch_size": step.rows}


_LIKE = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "gradient_checkpointing",
    "dataset_name",
    "device",
    "fsdp",
)
"""Arguments that a command which fits may change and train the same rows to the same weights, up to rounding."""


def _same_training(command: Command, row: Row) -> bool:
    other = row.command
    changed = set(command.difference(other)) - {*_LIKE, "model_name_or_path"}
    return other.rows == command.rows * other.processes // command.processes and not changed


def _changes(command: Command, row: Row) -> str:
    """What the command that fits trains otherwise, as a clause; "" where only its rows are split otherwise."""
    other = row.command
    changed = [
        f"{name} {after} in the place of {before}"
        for name, (before, after) in command.difference(other).items()
        if name not in (*_LIKE, "model_name_or_path")
    ]
    return f", with {', '.join(changed)}" if changed else ""


def ran_out(error: BaseException) -> bool:
    """Whether a training has ended because there was no memory: torch says so in an error of its own or in words."""
    return isinstance(error, (MemoryError, RuntimeError)) and (
        isinstance(error, MemoryError) or any(words in str(error) for words in _OUT_OF_MEMORY)
    )


def advice(command: Command) -> str:
    """What fits instead of a training that has run out of memory, as a line; why nothing can be said, where nothing can."""
    try:
        request = request_of(command, (command["device"],))
        profile = device_profile(request.devices[0])
        if profile.kind != "cpu" and profile.memory_bytes:
            # What this process still holds is free for the next one.
            request = replace(request, memory=room_of(profile, all_free=True).size)
        row = nearest(replace(request, length=request.length or request.step.length))
    except IsotypeError as error:
        return f"what fits is not known: {error.headline}"
    if row is None:
        return "out of memory, and nothing smaller of this model fits: isotype plan says what would on another device"
    used, changes = format_bytes(row.peak), _changes(command, row)
    return f"out of memory; this fits{changes} ({used}):\n{printed_command(row.command.tokens(), indent=4)}"
