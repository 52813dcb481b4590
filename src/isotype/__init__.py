"""isotype: LoRA and QLoRA fine-tuning under one precision policy.

Names are imported when they are first used. `import isotype` loads neither transformers nor bitsandbytes, and patches
nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from isotype.core import VERSION
from isotype.core.random_states import random_states_kept

if TYPE_CHECKING:
    from isotype.checkpoint.adapter import load
    from isotype.checkpoint.damage import measure_quality
    from isotype.checkpoint.load import StateDictAdapter, load_module
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

_NAMES = {
    "checkpoint.damage": "measure_quality",
    "checkpoint.load": "load_module StateDictAdapter",
    "checkpoint.adapter": "load",
    "checkpoint.measure_ranges": "measure_ranges",
    "checkpoint.resolve": "resolve_precision",
    "core.errors": "IsotypeError PrecisionError CheckpointError DataError UsageError SaveError",
    "lora.fuse": "fuse unfuse FusionReport",
    "model.adapters": "add_lora",
    "planning.from_request": "plan Plan",
    "precision.damages": "Damages",
    "precision.policy": "PrecisionPolicy",
    "precision.ranges": "Ranges",
    "preflight.check": "check",
    "preflight.repair": "repair Repairs",
    "records.finding": "Finding Fix",
    "records.request": "StepRequest",
    "report.check.report": "Report",
    "train.callback": "PrecisionCallback",
    "train.policy": "enforce",
}
_HOME = {name: f"isotype.{module}" for module, names in _NAMES.items() for name in names.split()}

__all__ = [
    "CheckpointError", "Damages", "DataError", "Finding", "Fix", "FusionReport", "IsotypeError", "Plan",
    "PrecisionCallback", "PrecisionError", "PrecisionPolicy", "Ranges", "Repairs", "Report", "SaveError",
    "StateDictAdapter", "StepRequest", "UsageError", "add_lora", "check", "enforce", "fuse", "load",
    "load_module", "measure_quality", "measure_ranges", "plan", "repair", "resolve_precision", "unfuse",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'isotype' has no attribute {name!r}")
    with random_states_kept():  # some libraries draw numbers when they are imported
        value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
