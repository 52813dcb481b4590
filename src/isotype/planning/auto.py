"""`auto` in a training command: the rows, the length and the storage that its plan picks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from isotype.core.errors import Problem, UsageError
from isotype.core.formats import MIXED
from isotype.core.units import format_bytes
from isotype.planning.command import MEMORY
from isotype.planning.from_request import plan_of_request
from isotype.planning.record import Row
from isotype.planning.request import PlanRequest, parse_request
from isotype.planning.text import speed_of
from isotype.train.launched import processes
from isotype.train.preflight.command import set_flag, value_of, without_flag

BATCH, LENGTH, STORAGE = "--per_device_train_batch_size", "--max_length", "--quantization"
ACCUMULATION, CHECKPOINTING, TOKENS = (
    "--gradient_accumulation_steps",
    "--gradient_checkpointing",
    "--tokens_per_step",
)
AUTO = "auto"


def asks(argv: Sequence[str]) -> bool:
    """Whether a training command leaves rows, length or storage to its plan."""
    return any(value_of(argv, name) == AUTO for name in (BATCH, LENGTH, STORAGE))


def filled(method: str, argv: Sequence[str]) -> tuple[list[str], Row]:
    """(the command with the plan's values in the place of `auto`, the row that they are of).

    What was typed is pinned: the plan chooses among what is left.

    Raises:
        UsageError: nothing fits, or there are several processes, each of which would plan for itself.
    """
    if processes() > 1:
        fix = f"isotype plan … --devices {processes()} prints the command for all of them"
        problem = Problem(f"auto in {processes()} processes", "numbers, the same in every process", fix)
        raise UsageError("a launched training cannot plan", [problem])
    request = request_of(method, argv)
    plan = plan_of_request(request)
    row = plan.chosen
    if row is None:
        least = min((each.peak for each in plan.rows), default=0)
        need = f"a step takes {format_bytes(least)} at least, and may take {plan.devices[0].room}"
        fix = "a smaller model, or a larger device: isotype plan MODEL --device NAME says what fits on one"
        raise UsageError("nothing fits", [Problem(need, "a step that fits", fix)])
    return _with_values(list(argv), row), row


def request_of(method: str, argv: Sequence[str]) -> PlanRequest:
    """The question that a training command with `auto` asks of this machine."""
    rest = list(argv)
    auto = {name for name in (BATCH, LENGTH, STORAGE) if value_of(rest, name) == AUTO}
    for name in auto:
        rest = without_flag(rest, name)
    pinned = value_of(rest, BATCH)
    request, _ = parse_request([method, *rest, *(["--rows", pinned] if pinned is not None else [])])
    request = replace(request, quantize=STORAGE in auto)
    if LENGTH in auto:
        return request
    # Rows are cut as the training cuts them.
    return replace(request, length=request.length or request.step.length)


def _with_values(argv: list[str], row: Row) -> list[str]:
    tokens = without_flag(argv, TOKENS)
    if value_of(argv, BATCH) == AUTO:
        tokens = set_flag(tokens, BATCH, str(row.rows))
        if value_of(argv, ACCUMULATION) is None or value_of(argv, TOKENS) is not None:
            tokens = set_flag(tokens, ACCUMULATION, str(row.accumulation))
    if value_of(argv, LENGTH) == AUTO:
        tokens = set_flag(tokens, LENGTH, str(row.length))
    if value_of(argv, STORAGE) == AUTO:
        tokens = without_flag(tokens, STORAGE)
        if row.base_memory is not None:
            tokens += [STORAGE, MIXED, MEMORY, str(row.base_memory)]
        elif row.policy.quantized:
            tokens += [STORAGE, row.storage]
    if value_of(argv, CHECKPOINTING) in (None, AUTO) and row.checkpointing_flag is not None:
        tokens = set_flag(tokens, CHECKPOINTING, row.checkpointing_flag)
    return tokens


def words_of(row: Row) -> str:
    """What was taken, in a line."""
    speed = speed_of(row)
    foreseen = f", {speed} tokens/s foreseen" if speed else ""
    times = f" × {row.accumulation}" if row.accumulation > 1 else ""
    room = "" if row.room is None else f" of the {format_bytes(row.room)} that it may take"
    return (
        f"planned: {row.storage}, {row.rows} of {row.length:,} tokens{times}, checkpointing {row.checkpointing}: "
        f"{format_bytes(row.peak)}{room}{foreseen}"
    )
