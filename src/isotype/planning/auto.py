"""Resolve `auto` in a training command: the rows, the length and the storage that the plan chooses."""

from __future__ import annotations

from dataclasses import replace

from isotype.core.errors import Problem, UsageError
from isotype.core.formats import MIXED
from isotype.core.names import format_bytes
from isotype.planning.from_request import plan_of_request
from isotype.planning.record import Row
from isotype.planning.request import PlanRequest, request_of
from isotype.planning.text import speed_of
from isotype.train.command.command import Command, with_storage
from isotype.train.command.spec import AUTO, PLANNED
from isotype.train.launched import processes

BATCH, LENGTH, STORAGE = PLANNED


def resolve_auto(command: Command) -> tuple[Command, Row]:
    """Return the command with the plan's values in place of `auto`, and the row they come from.

    Raises:
        UsageError: nothing fits, or there are several processes, which would each plan for themselves.
    """
    if processes() > 1:
        fix = f"isotype plan … --devices {processes()} prints the command for all of them"
        problem = Problem(f"auto in {processes()} processes", "numbers, the same in every process", fix)
        raise UsageError("a launched training cannot plan", [problem])
    plan = plan_of_request(_question(command))
    row = plan.chosen
    if row is None:
        least = min((each.peak for each in plan.rows), default=0)
        need = f"a step takes {format_bytes(least)} at least, and may take {plan.devices[0].room}"
        fix = "a smaller model, or a larger device: isotype plan MODEL --device NAME says what fits on one"
        raise UsageError("nothing fits", [Problem(need, "a step that fits", fix)])
    return _with_values(command, row), row


def _question(command: Command) -> PlanRequest:
    """Return the plan request that resolves a command's `auto` on this machine."""
    auto = command.planned
    pinned = None if BATCH in auto else command.given(BATCH)
    request = replace(request_of(command, (command["device"],), rows=pinned), quantize=STORAGE in auto)
    if LENGTH in auto:
        return request
    # Rows are cut as the training cuts them.
    return replace(request, length=request.length or request.step.length)


def _with_values(command: Command, row: Row) -> Command:
    auto = command.planned
    values: dict[str, int | bool] = {}
    if BATCH in auto:
        values[BATCH] = row.rows
        values["gradient_accumulation_steps"] = row.accumulation
    if LENGTH in auto:
        values[LENGTH] = row.length
    recompute = row.checkpointing_value
    if recompute is not None and command.given("gradient_checkpointing") in (None, AUTO):
        values["gradient_checkpointing"] = recompute
    command = command.but(tokens_per_step=None, **values)
    if STORAGE not in auto:
        return command
    if row.base_memory is not None:
        return with_storage(command, MIXED, row.base_memory)
    return with_storage(command, row.policy.quantization)


def words_of(row: Row) -> str:
    """Describe the chosen row in one line."""
    speed = speed_of(row)
    foreseen = f", {speed} tokens/s foreseen" if speed else ""
    times = f" × {row.accumulation}" if row.accumulation > 1 else ""
    room = "" if row.room is None else f" of the {format_bytes(row.room)} that it may take"
    return (
        f"planned: {row.storage}, {row.rows} of {row.length:,} tokens{times}, checkpointing {row.checkpointing}: "
        f"{format_bytes(row.peak)}{room}{foreseen}"
    )
