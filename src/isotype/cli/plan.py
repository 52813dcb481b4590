"""`isotype plan`: what fits on a device, how fast, and the command of the best settings."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from isotype.cli.output import quiet_libraries
from isotype.core.interrupt import interrupts_kept
from isotype.planning.plan import plan_of_request
from isotype.planning.request import parse_request
from isotype.planning.text import render


def run(argv: Sequence[str], console: Console) -> int:
    """Run `isotype plan` and return its exit status: 0, or 1 where nothing fits.

    Raises:
        UsageError: arguments that cannot be understood.
        PrecisionError: a device that nobody knows.
        CheckpointError: no model, or a damaged one.
        DataError: a data set that cannot be trained on.
    """
    quiet_libraries()
    with interrupts_kept():
        request, outputs = parse_request(argv)
        plan = plan_of_request(request)
    if outputs.html is not None:
        plan.to_html(outputs.html)
    if outputs.json:
        print(plan.to_json())
    else:
        render(plan, console)
    return 0 if plan.chosen is not None else 1
