"""Rows of a plan, built by hand."""

from __future__ import annotations

from typing import Any

import torch

from isotype.planning.record import Row, Time
from isotype.precision.policy import PrecisionPolicy
from isotype.train.command.command import Command


def row(**values: Any) -> Row:
    """Return a row that fits, with `values` in place of the defaults."""
    defaults: dict[str, Any] = {
        "device": "t4",
        "devices": 1,
        "storage": "nf4",
        "compute": "float16",
        "checkpointing": "off",
        "sharding": "",
        "rows": 2,
        "length": 64,
        "accumulation": 4,
        "peak": 3 * 2**30,
        "room": 4 * 2**30,
        "phase": "backward",
        "kinds": {"weights": 2**30, "activations": 2**31},
        "time": Time(2.0, 1.0, "products", 1000),
        "policy": PrecisionPolicy(torch.float16, "nf4"),
        "command": Command("sft", {}),
    }
    return Row(**{**defaults, **values})
