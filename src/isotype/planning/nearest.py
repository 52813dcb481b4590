"""If a step does not fit, finds the settings that fit and differ least from the settings of the step."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from isotype.core.errors import IsotypeError
from isotype.core.names import format_bytes, plural
from isotype.core.terminal import printed_command
from isotype.data.methods import METHODS
from isotype.model.recompute import CHECKPOINTING
from isotype.planning.from_request import chosen_row, fitting_lighter, is_out_of_reach, searches_of
from isotype.planning.record import Row, picked
from isotype.planning.request import PlanRequest, request_of
from isotype.planning.search import Search
from isotype.precision.devices.profile import device_profile
from isotype.precision.devices.room import room_of
from isotype.records.finding import Finding, Fix
from isotype.train.command.command import Command
from isotype.train.preflight.plan import StepPlan

_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")


def nearest(request: PlanRequest) -> tuple[Row | None, str]:
    """Return (first row that fits, ""), or (None, clause about the tried settings) if no row fits.

    Smaller micro-batches are tried first, then recomputation, then other storage formats, then shorter rows.
    """
    step, lighter = request.step, None
    again = replace(step, auto=False, checkpointing=CHECKPOINTING)
    (search,), _ = searches_of(request, bounded=True)

    def rows_with(step: StepPlan, quantize: bool, longest: bool) -> list[Row]:
        step = replace(step, device=search.request.step.device)  # all requests use the same traces
        request = replace(search.request, step=step, quantize=quantize, longest=longest)
        return list(replace(search, request=request).rows())

    for tried in [again] if step.auto or step.checkpointing == CHECKPOINTING else [step, again]:
        if fits := picked(rows_with(tried, quantize=False, longest=False), request.goal):
            return fits, ""
    rows = rows_with(again, quantize=True, longest=False)
    if (fits := picked(rows, "balanced")) or is_out_of_reach(rows):
        return fits, "" if fits else _clause(search, rows)
    for quantize in (False, True):  # the search for the longest row takes most of the time
        rows = rows_with(again, quantize=quantize, longest=True)
        if (fits := chosen_row(search, rows, request.goal)) is None and not is_out_of_reach(rows):
            less = replace(request, step=again, quantize=quantize, longest=False)
            lighter = fitting_lighter(less, search.config)
            fits = picked(lighter[2], request.goal) if lighter else None
        if fits is not None:
            return fits, ""
    return None, _clause(search, rows, lighter)


def _clause(search: Search, rows: Sequence[Row], lighter: Any = None) -> str:
    """Return a clause about rows that do not fit, with their storage and memory. `lighter` is the result of `fitting_lighter`."""
    tried, untraced = [], []
    for row in rows:
        storage = f"{row.storage} {row.sharding}".strip()
        if traced := search.steps_of(row).traced:
            (number, tokens), step = min(traced.items(), key=lambda item: item[1].peak)
            size = f"{plural(number, 'row')} of {tokens:,} tokens"
            tried.append(f"{storage} needs {format_bytes(step.peak)} for {size}")
        else:
            untraced.append(f"{format_bytes(row.peak)} in {storage}")
    if untraced:
        tried.append(
            f"not traced, because weights and adapters alone exceed the limit: {', '.join(untraced)}"
        )
    if lighter is not None and lighter[2]:
        least = min(lighter[2], key=lambda row: row.peak)
        tried.append(f"without {lighter[0]}, {least.storage} needs at least {format_bytes(least.peak)}")
    limit = next(iter(search.rooms.values()))
    return f"no settings with less memory fit into {limit}: {'; '.join(dict.fromkeys((*tried, *search.refused)))}"


def with_nearest(findings: tuple[Finding, ...], step: StepPlan, command: Command) -> tuple[Finding, ...]:
    """Return the findings. If a memory finding has no verified fix, add the nearest settings that fit as its first fix."""
    memory = [finding for finding in findings if finding.kind == "memory"]
    if not memory or any(fix.verified for finding in memory for fix in finding.fixes):
        return findings
    if METHODS[step.method].loss == "policy":
        return findings  # the lengths of prompts and completions have several arguments
    rows, count = step.rows, step.devices
    if "per_device_train_batch_size" not in command:
        # `isotype check` with only a model traces fewer rows than a training has.
        command = command.but(per_device_train_batch_size=rows)
    step_rows = max(rows, step.step_rows) * count
    request = PlanRequest(step, command, (step.device,), count=count, at_most=rows, length=step.length)
    try:
        row, tried = nearest(replace(request, step_rows=step_rows))
    except IsotypeError:
        return findings  # the check has reported this error already
    if row is None:
        return tuple(replace(f, notes=(*f.notes, tried)) if f.kind == "memory" else f for f in findings)
    words, other = _changes(command, row), row.command
    same = other.rows == command.rows * other.processes // command.processes and not words
    used = f"{format_bytes(row.peak)} are used"
    fix = Fix(
        f"this command fits{words}", "safe" if same else "unsafe", True, outcome=used, command=other.tokens()
    )
    return tuple(replace(f, fixes=(fix, *f.fixes)) if f.kind == "memory" else f for f in findings)


_LIKE = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing", "dataset_name",
    "device", "fsdp", "model_name_or_path",
)  # fmt: skip
"""Arguments that change the trained weights only by rounding."""


def _changes(command: Command, row: Row) -> str:
    """Describe the arguments that the command of `row` changes; "" if it changes none. Arguments in `_LIKE` are not listed."""
    changes = command.difference(row.command).items()
    changed = [f"{n} {after} instead of {before}" for n, (before, after) in changes if n not in _LIKE]
    return f", with {', '.join(changed)}" if changed else ""


def ran_out(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)
    )


def advice(command: Command) -> str:
    try:
        request = request_of(command, (command["device"],))
        profile = device_profile(request.devices[0])
        if profile.kind != "cpu" and profile.memory_bytes:
            # Memory that this process still holds is free for the next process.
            request = replace(request, memory=room_of(profile, all_free=True).size)
        row, tried = nearest(replace(request, length=request.length or request.step.length))
    except IsotypeError as error:
        return f"out of memory; the search for settings that fit failed: {error.headline}"
    if row is None:
        return f"out of memory, and {tried}; isotype plan shows what fits on another device"
    used, changes = format_bytes(row.peak), _changes(command, row)
    return f"out of memory; this command fits{changes} ({used}):\n{printed_command(row.command.tokens(), indent=4)}"
