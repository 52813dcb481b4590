"""isotype: LoRA and QLoRA fine-tuning under one precision policy.

Names are imported when they are first used: `import isotype` loads neither transformers nor bitsandbytes and
patches nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from isotype.core import VERSION
from isotype.core.random_states import random_states_kept

if TYPE_CHECKING:
    from isotype.checkpoint.damage import measure_quality
    from isotype.checkpoint.load_named import StateDictAdapter, load, load_module
    from isotype.checkpoint.measure_ranges import measure_ranges
    from isotype.checkpoint.resolve import resolve_precision
    from isotype.core.errors import (
        CheckpointError,
        DataError,
        IsotypeError,
        PrecisionError,
        SaveError,
        UsageError,
    )
    from isotype.lora.fuse import FusionReport, fuse, unfuse
    from isotype.model.adapters import add_lora
    from isotype.planning.from_request import Plan, plan
    from isotype.precision.damages import Damages
    from isotype.precision.policy import PrecisionPolicy
    from isotype.precision.ranges import Ranges
    from isotype.preflight.check import check
    from isotype.preflight.repair import Repairs, repair
    from isotype.records.finding import Finding, Fix
    from isotype.records.request import StepRequest
    from isotype.report.check.report import Report
    from isotype.train.callback import PrecisionCallback
    from isotype.train.policy import enforce

__version__ = VERSION

_HOME = {
    "resolve_precision": "isotype.checkpoint.resolve",
    "PrecisionPolicy": "isotype.precision.policy",
    "load": "isotype.checkpoint.load_named",
    "load_module": "isotype.checkpoint.load_named",
    "StateDictAdapter": "isotype.checkpoint.load_named",
    "add_lora": "isotype.model.adapters",
    "fuse": "isotype.lora.fuse",
    "unfuse": "isotype.lora.fuse",
    "enforce": "isotype.train.policy",
    "check": "isotype.preflight.check",
    "plan": "isotype.planning.from_request",
    "repair": "isotype.preflight.repair",
    "measure_ranges": "isotype.checkpoint.measure_ranges",
    "measure_quality": "isotype.checkpoint.damage",
    "PrecisionCallback": "isotype.train.callback",
    "Damages": "isotype.precision.damages",
    "Finding": "isotype.records.finding",
    "Fix": "isotype.records.finding",
    "FusionReport": "isotype.lora.fuse",
    "Plan": "isotype.planning.from_request",
    "Ranges": "isotype.precision.ranges",
    "Repairs": "isotype.preflight.repair",
    "Report": "isotype.report.check.report",
    "StepRequest": "isotype.records.request",
    "IsotypeError": "isotype.core.errors",
    "PrecisionError": "isotype.core.errors",
    "CheckpointError": "isotype.core.errors",
    "DataError": "isotype.core.errors",
    "UsageError": "isotype.core.errors",
    "SaveError": "isotype.core.errors",
}

__all__ = [
    "CheckpointError",
    "Damages",
    "DataError",
    "Finding",
    "Fix",
    "FusionReport",
    "IsotypeError",
    "Plan",
    "PrecisionCallback",
    "PrecisionError",
    "PrecisionPolicy",
    "Ranges",
    "Repairs",
    "Report",
    "SaveError",
    "StateDictAdapter",
    "StepRequest",
    "UsageError",
    "add_lora",
    "check",
    "enforce",
    "fuse",
    "load",
    "load_module",
    "measure_quality",
    "measure_ranges",
    "plan",
    "repair",
    "resolve_precision",
    "unfuse",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'isotype' has no attribute {name!r}")
    with random_states_kept():  # some libraries draw numbers when they are imported
        value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
