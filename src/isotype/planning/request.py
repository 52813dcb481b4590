"""Reads the request for a plan from the arguments of `isotype plan` or `isotype.plan`."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from isotype.core.arguments import Parser, add_arguments, wrong_size
from isotype.core.errors import Problem
from isotype.core.formats import REQUESTABLE
from isotype.core.names import parse_size
from isotype.data.methods import METHODS
from isotype.planning.record import GOALS, Row
from isotype.precision.damages import Damages
from isotype.precision.devices.profile import DeviceProfile
from isotype.train.command.arguments import count_problems
from isotype.train.command.command import Command, with_storage
from isotype.train.command.parse import first_words, method_of_config, parse_command
from isotype.train.preflight.plan import Options, StepPlan
from isotype.train.preflight.step_plan import plan_of, without_version

OWN = ("method", "devices", "max_memory", "rows", "length", "image", "images")
"""Arguments that only a plan has. `isotype.plan` accepts them as keywords."""

EXAMPLE_DATA = "embedded:precision_qa"
"""Data set in a printed `sft` command if the request names no data, because the command would not run without data."""


@dataclass(frozen=True)
class PlanRequest:
    """The model, devices, data and limits for which a plan is requested.

    Attributes:
        count: number of devices that train together.
        memory: bytes that a step may use; None for the device's limit.
        rows: rows of a micro-batch; None if the plan chooses the number.
        at_most: maximum rows of a micro-batch; None if only the rows of a step limit the number.
        length: tokens of a row; None for the data's longest row or a default.
        step_rows: rows of an optimizer step over all devices and micro-batches; None if `step_tokens` is set instead.
        quantize: True if the plan may choose the storage when no argument names a storage.
        longest: True to search for the longest row that fits.
        damages: measured damage of each storage in nats (see `Row.damage`).
        layers: measured damage of each layer in each format, from which mixed storage is chosen; None if not measured.
    """

    step: StepPlan
    command: Command
    devices: tuple[str, ...]
    goal: str = "balanced"
    count: int = 1
    memory: int | None = None
    rows: int | None = None
    at_most: int | None = None
    length: int | None = None
    step_rows: int | None = 8
    step_tokens: int | None = None
    quantize: bool = True
    longest: bool = True
    damages: Mapping[str, float] = field(default_factory=dict)
    layers: Damages | None = None


_add_own = partial(add_arguments, command="plan", method=METHODS, goal=GOALS)


def parser() -> Parser:
    arguments = Parser.described("plan")
    _add_own(arguments)
    return arguments


def parse_request(
    argv: Sequence[str], keywords: Mapping[str, Any] | None = None
) -> tuple[PlanRequest, argparse.Namespace]:
    """Return (request, arguments that only `isotype plan` has) for a command line or keywords."""
    if "-h" in argv or "--help" in argv:
        parser().print_help()
        raise SystemExit(0)
    method, model, tokens = first_words(argv)
    by_flag = parser().parse_known_args(tokens)[0].method
    command, own = parse_command(
        method or by_flag or method_of_config(tokens) or "sft",
        tokens,
        keywords,
        add_arguments=_add_own,
        model=model,
        problems_of=_problems,
        prog="isotype plan",
    )
    memory = None if own.max_memory is None else parse_size(own.max_memory)
    _, command = without_version(command, ("0", "2"))
    if own.data:
        command = command.but(dataset_name=own.data)
    devices = tuple(name for names in own.device or ["auto"] for name in names.split(",") if name)
    devices = devices or ("",)  # an empty name is refused like any unknown name
    sizes = {name: getattr(own, name) for name in ("rows", "length", "image", "images")}
    request = request_of(command, devices, count=own.devices, **sizes)
    return replace(request, goal=own.goal, memory=memory), own


def _problems(own: argparse.Namespace) -> list[Problem]:
    problems = count_problems({name: getattr(own, name) for name in ("devices", "rows", "length", "images")})
    if own.max_memory is not None and parse_size(own.max_memory) is None:
        problems.append(wrong_size("--max-memory", own.max_memory))
    return problems


def request_of(
    command: Command,
    devices: tuple[str, ...],
    *,
    count: int = 1,
    rows: int | None = None,
    length: int | None = None,
    image: tuple[int, int] | None = None,
    images: int = 1,
) -> PlanRequest:
    """Return a plan request for a training command. The plan chooses values for arguments that are `auto`."""
    auto = command.planned
    tokens = command["tokens_per_step"]
    command = command.but(tokens_per_step=None, **dict.fromkeys(auto))
    bare = "per_device_train_batch_size" not in command
    options = Options(bare=bare, length=length, devices=count, image=image, images=images)
    step = plan_of(options, command.but(device=devices[0]))
    of_step = command.rows * count
    if rows is not None and bare:
        of_step = max(of_step, rows * command["gradient_accumulation_steps"] * count)
    if length is None and ("max_length" in command or command["packing"]) and "max_length" not in auto:
        length = command["max_length"]
    return PlanRequest(
        step,
        command,
        devices,
        count=count,
        rows=rows,
        length=length,
        step_rows=None if tokens else of_step,
        step_tokens=tokens,
    )


def command_of(
    request: PlanRequest, row: Row, profile: DeviceProfile, checkpointing: Mapping[str, Any] | None
) -> Command:
    """Return the training command of a row. The command has `--device` only if the device is in this machine.

    `checkpointing`: arguments of the model's `gradient_checkpointing_enable`; None if no layer is recomputed.
    """
    command = request.command.but(device=None)
    path = Path(str(command["model_name_or_path"]))
    if path.name == "config.json" and path.is_file():
        command = command.but(model_name_or_path=str(path.parent))  # the folder of the weights
    if command.method == "sft" and not {"dataset_name", "datasets"} & set(command.values):
        command = command.but(dataset_name=EXAMPLE_DATA)
    requested = request.step.precision.quantization
    if row.base_memory is not None or (row.storage in REQUESTABLE and row.storage != requested):
        command = with_storage(command, row.storage, row.base_memory)
    command = command.but(gradient_checkpointing=row.checkpointing != "off", **_batch_arguments(request, row))
    if _needs_length(request, row):
        command = command.but(max_length=row.length)
    number = (checkpointing or {}).get("every_n_layers", 1)
    if number > 1:
        command = command.but(gradient_checkpointing_kwargs={"every_n_layers": number})
    if row.sharding == "FSDP2" and command["fsdp"] in (None, ""):
        command = command.but(fsdp="full_shard")
    if profile.present and request.devices != ("auto",):
        command = command.but(device=profile.name)
    return replace(command, processes=request.count)


def _batch_arguments(request: PlanRequest, row: Row) -> dict[str, int]:
    """Return the arguments that set at least the requested number of rows in a step."""
    rows, accumulation = row.rows, row.accumulation
    if request.step_rows is not None and rows * accumulation * request.count < request.step_rows:
        if accumulation == 1:
            return {}
        accumulation = -(-request.step_rows // (rows * request.count))
    return {"per_device_train_batch_size": rows, "gradient_accumulation_steps": accumulation}


def _needs_length(request: PlanRequest, row: Row) -> bool:
    """Return True if the training command needs `--max_length` to get rows as long as the plan's row."""
    limit, longest = request.command["max_length"], request.step.longest
    if "max_length" not in request.command.specs or row.length == limit:
        return False
    uncut = longest is not None and row.length >= longest and (limit is None or limit >= row.length)
    return not uncut or bool(request.command["packing"])
