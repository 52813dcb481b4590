"""`isotype plan`: what fits on a device, how fast, and the command of the best settings."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from isotype.cli.output import quiet_libraries
from isotype.compat.interrupt import interrupts_kept
from isotype.core.errors import UsageError
from isotype.planning.from_request import plan_of_request
from isotype.planning.request import parse_request
from isotype.planning.shelf import names_a_model, plans
from isotype.planning.text import render, render_models


def run(argv: Sequence[str], console: Console) -> int:
    """Run `isotype plan` and return its exit status: 0, or 1 where nothing fits.

    Raises:
        UsageError: arguments that cannot be understood.
        PrecisionError: a device that nobody knows.
        CheckpointError: no model, or a damaged one.
        DataError: a data set that cannot be trained on.
    """
    quiet_libraries()
    if argv and not names_a_model(argv) and not {"-h", "--help"} & set(argv):
        return _run_without_model(argv, console)
    with interrupts_kept():
        request, outputs = parse_request(argv)
        plan = plan_of_request(request)
    if outputs.html is not None:
        plan.to_html(outputs.html)
    if outputs.json:
        print(plan.to_json(), end="")
    else:
        render(plan, console, outputs.whole)
    return 0 if plan.chosen is not None else 1


def _run_without_model(argv: Sequence[str], console: Console) -> int:
    """Which model: the largest of many sizes that fit."""
    if "--json" in argv or any(each.split("=")[0] == "--html" for each in argv):
        fix = "isotype plan MODEL --json"
        raise UsageError.of("no model", "--json or --html without a model", "a model", fix)
    with interrupts_kept():
        models = list(plans(argv))
    render_models(models, console, bool({"-v", "--verbose"} & set(argv)))
    return 0 if any(plan.chosen is not None for plan in models) else 1
