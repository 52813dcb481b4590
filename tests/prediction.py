"""Where a report says that a step ends, to be held against `tests.reality.Outcome`."""

from __future__ import annotations

import re

from isotype.preflight.check import check
from isotype.report.check.report import Report
from tests.faults import Setup

PHASES = ("forward", "backward", "unscale", "optimizer")
# What wrappers put before or between the names of the model's own modules.
_WRAPPER_PARTS = re.compile(r"^base_model\.model\.|_checkpoint_wrapped_module\.|_orig_mod\.")


def check_of(setup: Setup, device: str = "cpu") -> Report:
    """What the check says of a step on a device of this machine, fixes untried; it leaves the model as it is."""
    return check(
        setup.model,
        setup.batch,
        device=device,
        autocast=setup.autocast or False,
        scaler=setup.scaler,
        optimizer=setup.optimizer,
        wiring=False,
        verify=False,
    )


def predicted_end(report: Report) -> tuple[str, str, str]:
    """The verdict `runs`, `corrupts`, `crashes` or `lost`, with the phase and the module of the first error.

    `corrupts`: the step runs, and its update turns trained weights into NaN. `lost`: no error was found, and the step was
    not traced to its end.
    """
    failure = report.trace.failure
    breach = next(report.trace.breaches(), None)
    if report.errors and breach is not None:
        return "crashes", breach.phase, breach.module
    # A value beyond a dtype's range (IST8xx) raises nothing: the step runs, and its numbers are wrong.
    errors = [finding for finding in report.errors if not finding.code.startswith("IST8")]
    if not errors:
        return ("runs", "", "") if failure is None else ("lost", failure.phase, failure.module)
    if failure is None and all(finding.code == "IST303" for finding in errors):
        return "corrupts", errors[0].phase, errors[0].module
    first = min(errors, key=lambda finding: PHASES.index(finding.phase) if finding.phase in PHASES else -1)
    return "crashes", first.phase, first.module


def own_name(module: str) -> str:
    """The name of a module without what PEFT, checkpointing and compilation add to it."""
    return _WRAPPER_PARTS.sub("", module)
