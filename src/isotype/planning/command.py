"""The command that trains by a row."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isotype.core.formats import MIXED, QUANTIZATIONS
from isotype.data.methods import METHODS
from isotype.planning.record import Row
from isotype.planning.request import PlanRequest
from isotype.precision.devices.profile import DeviceProfile
from isotype.train.preflight.command import set_flag, value_of, without_flag

MODEL = "--model_name_or_path"
CHECKPOINTING, EVERY = "--gradient_checkpointing", "every_n_layers"
MEMORY = "--base_memory"
EXAMPLE_DATA = "embedded:precision_qa"
"""The data set of a command whose user has named none: it runs as it is printed."""


def command_of(
    request: PlanRequest, row: Row, profile: DeviceProfile, checkpointing: Mapping[str, Any] | None
) -> tuple[str, ...]:
    """The training command of a row; a device that is not in this machine is not named in it, for it means nothing there.

    Args:
        request: what was asked.
        row: the settings.
        profile: of the row's device.
        checkpointing: arguments of the model's `gradient_checkpointing_enable`; None for no layer.
    """
    tokens = without_flag(list(request.command), "--device")
    model = Path(value_of(tokens, MODEL) or "")
    if model.name == "config.json" and model.is_file():
        tokens = set_flag(tokens, MODEL, str(model.parent))  # where its weights are, or will be
    if value_of(tokens, "--dataset_name") is None and value_of(tokens, "--config") is None:
        tokens = [*tokens, "--dataset_name", EXAMPLE_DATA]
    if row.storage in QUANTIZATIONS:
        tokens = set_flag(tokens, "--quantization", row.storage)
    if row.base_memory is not None:
        tokens = set_flag(set_flag(tokens, "--quantization", MIXED), MEMORY, str(row.base_memory))
    for name, value in (
        ("--per_device_train_batch_size", row.rows),
        ("--gradient_accumulation_steps", row.accumulation),
        (_length_flag(request), row.length),
        (CHECKPOINTING, row.checkpointing_flag or "True"),
    ):
        tokens = set_flag(tokens, name, str(value))
    number = (checkpointing or {}).get(EVERY, 1)
    if number > 1:
        tokens = set_flag(tokens, f"{CHECKPOINTING}_kwargs", json.dumps({EVERY: number}))
    if row.sharding == "FSDP2" and value_of(tokens, "--fsdp") is None:
        tokens += ["--fsdp", "full_shard"]
    if profile.present and request.devices != ("auto",):
        tokens += ["--device", profile.name]
    if request.count > 1:
        launcher = ("torchrun", "--standalone", "--nproc_per_node", str(request.count), "-m")
        return (*launcher, *tokens)
    return tuple(tokens)


def _length_flag(request: PlanRequest) -> str:
    """The argument that says how long rows are: of methods whose prompts are answered, that of the answer."""
    return "--max_completion_length" if METHODS[request.step.method].loss == "policy" else "--max_length"
