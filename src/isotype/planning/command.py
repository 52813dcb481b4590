"""The training command of a row."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isotype.core.formats import ASKED, MIXED
from isotype.planning.record import Row
from isotype.planning.request import PlanRequest
from isotype.precision.devices.profile import DeviceProfile
from isotype.train.command.command import Command, with_storage

EVERY = "every_n_layers"
EXAMPLE_DATA = "embedded:precision_qa"
"""Data set of an `sft` command that names none, so that the printed command runs."""


def command_of(
    request: PlanRequest, row: Row, profile: DeviceProfile, checkpointing: Mapping[str, Any] | None
) -> Command:
    """Return the training command of a row; it names the device only if that is in this machine.

    `checkpointing`: arguments of the model's `gradient_checkpointing_enable`; None if no layer is recomputed.
    """
    command = request.command.but(device=None)
    path = Path(str(command["model_name_or_path"]))
    if path.name == "config.json" and path.is_file():
        command = command.but(model_name_or_path=str(path.parent))  # where its weights are, or will be
    if command.method == "sft" and not {"dataset_name", "datasets"} & set(command.values):
        command = command.but(dataset_name=EXAMPLE_DATA)
    if row.base_memory is not None:
        command = with_storage(command, MIXED, row.base_memory)
    elif row.storage in ASKED and request.step.precision.quantization != row.storage:
        command = with_storage(command, row.storage)
    command = command.but(
        gradient_checkpointing={"off": False}.get(row.checkpointing, True), **_batch(request, row)
    )
    if _needs_length(request, row):
        command = command.but(max_length=row.length)
    number = (checkpointing or {}).get(EVERY, 1)
    if number > 1:
        command = command.but(gradient_checkpointing_kwargs={EVERY: number})
    if row.sharding == "FSDP2" and command["fsdp"] in (None, ""):
        command = command.but(fsdp="full_shard")
    if profile.present and request.devices != ("auto",):
        command = command.but(device=profile.name)
    return command.with_processes(request.count)


def _batch(request: PlanRequest, row: Row) -> dict[str, int]:
    """Return rows and micro-batches of a step, as many rows as requested even if the data has fewer."""
    rows, accumulation = row.rows, row.accumulation
    if request.step_rows is not None and rows * accumulation * request.count < request.step_rows:
        if accumulation == 1:
            return {}
        accumulation = -(-request.step_rows // (rows * request.count))
    return {"per_device_train_batch_size": rows, "gradient_accumulation_steps": accumulation}


def _needs_length(request: PlanRequest, row: Row) -> bool:
    """Return True if the training would cut or pack rows at another length than the row's."""
    limit, longest = request.command["max_length"], request.step.longest
    if "max_length" not in request.command.specs or row.length == limit:
        return False
    uncut = longest is not None and row.length >= longest and (limit is None or limit >= row.length)
    return not uncut or bool(request.command["packing"])
