"""What a plan is asked for: the arguments of `isotype plan` and of `isotype.plan`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isotype.core.arguments import Parser
from isotype.core.errors import Problem, UsageError
from isotype.core.units import parse_size
from isotype.data.methods import METHODS
from isotype.planning.record import GOALS
from isotype.precision.damages import Damages
from isotype.train.options.arguments import count_problems
from isotype.train.preflight.plan import Options, StepPlan
from isotype.train.preflight.step_plan import plan_of

_DESCRIPTION = """\
Say what can be trained on a device, how fast, and print the command of the best settings: from a config alone, without
weights, a GPU or a data set.

  isotype plan MODEL --device rtx4090 [--data my.jsonl] [flags]
  isotype plan sft --model_name_or_path MODEL --device rtx4090 [flags]
  isotype plan --device t4 --data my.jsonl       which model: the largest of Qwen3 that fit

Every flag of `isotype sft` (dpo, …) works, and is in the command that is printed; these are the ones of a plan alone:"""

ROWS_OF_A_STEP = 8
"""Rows of a step where nothing says another number: TRL's default of `--per_device_train_batch_size`."""


@dataclass(frozen=True)
class PlanRequest:
    """A question.

    Attributes:
        step: the step as its arguments say, before anything is chosen.
        command: the training command that they make.
        devices: names of devices or profiles.
        goal: a key of `GOALS`.
        count: how many of the device train together.
        memory: bytes that a step may take; None: what the device has.
        rows: of a micro-batch; None: chosen.
        length: tokens of a row; None: the data's longest, or a default.
        step_rows: rows of a step, of all devices and micro-batches; None where `step_tokens` says it.
        step_tokens: tokens of a step; None where `step_rows` says it.
        epochs: of the training.
        quantize: whether storages are chosen where none is named; else the weights stay in the compute dtype.
        longest: whether the longest row that fits is looked for.
        damages: storage -> measured damage in nats, see `Row.damage`; what is not in it is unknown.
        layers: what each format of each layer does to the model, where somebody has measured it: what mixed storage is chosen by.
    """

    step: StepPlan
    command: tuple[str, ...]
    devices: tuple[str, ...]
    goal: str = "balanced"
    count: int = 1
    memory: int | None = None
    rows: int | None = None
    length: int | None = None
    step_rows: int | None = ROWS_OF_A_STEP
    step_tokens: int | None = None
    epochs: float = 3.0
    quantize: bool = True
    longest: bool = True
    damages: Mapping[str, float] = field(default_factory=dict)
    layers: Damages | None = None


@dataclass(frozen=True)
class Outputs:
    """Where a plan goes; `whole`: the text has what memory and time are made of."""

    json: bool
    html: Path | None
    whole: bool = False


def parser() -> Parser:
    """The arguments of a plan alone."""
    arguments = Parser(
        prog="isotype plan",
        usage="isotype plan MODEL [flags]",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
    add = arguments.add_argument
    add(
        "--device",
        action="append",
        metavar="NAME[,NAME]",
        help="cards to plan for (t4, rtx4090, a100-80g, …), or cpu, cuda; the machine at hand where none is named",
    )
    add("--data", metavar="DATA", help="the data set, for lengths and hours; short for --dataset_name")
    add("--method", choices=tuple(METHODS), help="training method (default: sft)")
    add(
        "--goal",
        choices=tuple(GOALS),
        default="balanced",
        help="what the row is chosen by (default: balanced)",
    )
    add("--devices", type=int, default=1, help="how many of the device train together (default: 1)")
    add("--max-memory", "--max_memory", metavar="SIZE", help="what a step may take, such as 20GiB")
    add("--rows", type=int, help="rows of a micro-batch; chosen by the memory where not given")
    add("--length", type=int, help="tokens of a row; --max_length, the data's longest row, or 1024")
    add(
        "--tokens-per-step",
        "--tokens_per_step",
        type=int,
        help=f"tokens of an optimizer step; without it {ROWS_OF_A_STEP} rows",
    )
    add("-v", "--verbose", action="store_true", help="print what memory and time are made of, too")
    add("--json", action="store_true", help="print JSON")
    add(
        "--html",
        type=Path,
        metavar="PATH",
        help="write a page with a picture of memory against tokens a second",
    )
    return arguments


def parse_request(argv: Sequence[str]) -> tuple[PlanRequest, Outputs]:
    """The request that arguments make, and where its answer goes.

    Raises:
        UsageError: arguments that are unknown or cannot be.
        DataError: a data set that cannot be trained on.
    """
    tokens = list(argv)
    flags = parser()
    if "-h" in tokens or "--help" in tokens:
        flags.print_help()
        raise SystemExit(0)
    model = tokens.pop(0) if tokens and not tokens[0].startswith("-") and tokens[0] not in METHODS else None
    known, rest = flags.parse_known_args(tokens)
    if model is None and rest and not rest[0].startswith("-") and rest[0] not in METHODS:
        model, *rest = rest
    problems = [
        *flags.problems,
        *count_problems(
            {name: getattr(known, name) for name in ("devices", "rows", "length", "tokens_per_step")}
        ),
    ]
    if model is None and not rest:
        fix = "isotype plan MODEL --device t4"
        problems.append(Problem("no model", "a model, or a training command with its arguments", fix))
    memory = None if known.max_memory is None else parse_size(known.max_memory)
    if known.max_memory is not None and memory is None:
        problems.append(
            Problem(f"--max-memory {known.max_memory}", "an amount of memory", "write it like 20GiB")
        )
    flags.refuse(problems)
    if known.method and not (rest and rest[0] in METHODS):
        rest = [known.method, *rest]
    if known.data:
        rest = [*rest, "--dataset_name", known.data]
    devices = tuple(name for each in known.device or ["auto"] for name in each.split(",") if name)
    devices = devices or ("",)  # which is refused as any other name that is none
    options = Options(
        model=model,
        batch=None,
        length=known.length,
        generate=False,
        fsdp=None,
        devices=known.devices,
        json=False,
        sarif=None,
        html=None,
        fix=False,
        fail_on="error",
    )
    step, command = plan_of(options, [*rest, "--device", devices[0]])
    command = tuple(command[:-2])
    numbers = _numbers(rest)
    rows = numbers.per_device_train_batch_size
    step_rows = (rows or ROWS_OF_A_STEP) * numbers.gradient_accumulation_steps * known.devices
    request = PlanRequest(
        step,
        command,
        devices,
        known.goal,
        known.devices,
        memory,
        known.rows,
        known.length or numbers.max_length,
        None if known.tokens_per_step else step_rows if rows else max(step_rows, known.rows or 1),
        known.tokens_per_step,
        numbers.num_train_epochs,
    )
    return request, Outputs(known.json, known.html, known.verbose)


def _numbers(rest: Sequence[str]) -> Any:
    """The numbers of a training command that a plan goes on from."""
    arguments = Parser(prog="isotype plan", add_help=False)
    arguments.add_argument("--per_device_train_batch_size", "--per-device-train-batch-size", type=int)
    arguments.add_argument(
        "--gradient_accumulation_steps", "--gradient-accumulation-steps", type=int, default=1
    )
    arguments.add_argument("--max_length", "--max-length", type=int)
    arguments.add_argument("--num_train_epochs", "--num-train-epochs", type=float, default=3.0)
    return arguments.parse_known_args(list(rest))[0]


def require_known_goal(goal: str) -> None:
    """Refuse what is no goal.

    Raises:
        UsageError: it is none.
    """
    if goal not in GOALS:
        problem = Problem(f"goal {goal!r}", f"one of {', '.join(GOALS)}", "give one of these")
        raise UsageError("unknown goal", [problem])
