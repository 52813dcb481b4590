"""For a step that does not fit, finds the settings that fit and change the least."""

from __future__ import annotations

from dataclasses import replace

from isotype.core.errors import IsotypeError
from isotype.core.names import format_bytes
from isotype.core.terminal import printed_command
from isotype.data.methods import METHODS
from isotype.model.recompute import CHECKPOINTING
from isotype.planning.from_request import is_out_of_reach, plan_of_request
from isotype.planning.record import Row, picked
from isotype.planning.request import PlanRequest, request_of
from isotype.precision.devices.profile import device_profile
from isotype.precision.devices.room import room_of
from isotype.records.finding import Finding, Fix
from isotype.train.command.command import Command
from isotype.train.preflight.plan import StepPlan

_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")


def nearest(request: PlanRequest) -> Row | None:
    """Return the first row that fits: with a smaller micro-batch, then with recomputation, other storage or shorter rows."""
    step = request.step
    again = replace(step, auto=False, checkpointing=CHECKPOINTING)
    tries = [again] if step.auto or step.checkpointing == CHECKPOINTING else [step, again]
    for tried in tries:
        plan = plan_of_request(replace(request, step=tried, quantize=False, longest=False))
        if any(row.fits for row in plan.rows):
            return plan.chosen
    for longest in (False, True):  # the search for the longest row takes most of the time
        others = plan_of_request(replace(request, step=again, quantize=True, longest=longest))
        fits = picked([row for row in others.rows if row.fits], "balanced")
        if fits is not None or is_out_of_reach(others.rows):
            return fits
    shorter = plan_of_request(replace(request, step=again, quantize=False))
    return shorter.chosen or others.chosen


def with_nearest(findings: tuple[Finding, ...], step: StepPlan, command: Command) -> tuple[Finding, ...]:
    """If no fix of a memory finding is verified, add a first fix to these findings: the nearest settings that fit."""
    memory = [finding for finding in findings if finding.kind == "memory"]
    if not memory or any(fix.verified for finding in memory for fix in finding.fixes):
        return findings
    if METHODS[step.method].loss == "policy":
        return findings  # no argument of the step alone sets the length of a policy's rows, prompts and completions
    rows, count = step.rows, step.devices
    if "per_device_train_batch_size" not in command:
        # The check of a bare model has fewer rows than a training.
        command = command.but(per_device_train_batch_size=rows)
    step_rows = max(rows, step.step_rows) * count
    request = PlanRequest(step, command, (step.device,), count=count, at_most=rows, length=step.length)
    try:
        row = nearest(replace(request, step_rows=step_rows))
    except IsotypeError:
        return findings  # the check has reported this error already
    if row is None:
        return findings
    words, other = _changes(command, row), row.command
    same = other.rows == command.rows * other.processes // command.processes and not words
    used = f"{format_bytes(row.peak)} are used"
    fix = Fix(f"this fits{words}", "safe" if same else "unsafe", True, outcome=used, command=other.tokens())
    return tuple(replace(f, fixes=(fix, *f.fixes)) if f.kind == "memory" else f for f in findings)


_LIKE = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing", "dataset_name",
    "device", "fsdp", "model_name_or_path",
)  # fmt: skip
"""Arguments that change the trained weights only by rounding."""


def _changes(command: Command, row: Row) -> str:
    """Return a description of the arguments that differ in the command that fits; "" if all of them are in `_LIKE`."""
    changes = command.difference(row.command).items()
    changed = [f"{n} {after} instead of {before}" for n, (before, after) in changes if n not in _LIKE]
    return f", with {', '.join(changed)}" if changed else ""


def ran_out(error: BaseException) -> bool:
    """Return True if an error means that memory ran out: it is a MemoryError, or a RuntimeError whose message says so."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)
    )


def advice(command: Command) -> str:
    """Return a message for a training that ran out of memory: settings that fit, or the reason why none fit."""
    try:
        request = request_of(command, (command["device"],))
        profile = device_profile(request.devices[0])
        if profile.kind != "cpu" and profile.memory_bytes:
            # Memory that this process still holds is free for the next process.
            request = replace(request, memory=room_of(profile, all_free=True).size)
        row = nearest(replace(request, length=request.length or request.step.length))
    except IsotypeError as error:
        return f"out of memory; settings that fit could not be searched: {error.headline}"
    if row is None:
        return "out of memory, and no smaller settings of this model fit: isotype plan shows what fits on another device"
    used, changes = format_bytes(row.peak), _changes(command, row)
    return f"out of memory; this fits{changes} ({used}):\n{printed_command(row.command.tokens(), indent=4)}"
