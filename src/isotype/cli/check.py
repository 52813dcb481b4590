"""`isotype check`: traces one training step on fake tensors, checks it, and prints the report."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from isotype.cli.output import quiet_libraries
from isotype.compat.compiler import defer_compiler, import_uncompiled
from isotype.compat.interrupt import interrupts_kept
from isotype.data.methods import METHODS
from isotype.preflight.check import function_arguments
from isotype.report.text import say, show_commands
from isotype.train.command.command import Command, without_absent_device
from isotype.train.preflight.plan import Options, Repaired, repaired_command, with_commands
from isotype.train.preflight.step_plan import function_options, parse_options, plan_of

if TYPE_CHECKING:
    from isotype.records.finding import Finding
    from isotype.report.check.report import Report


@interrupts_kept()
def run(argv: Sequence[str], console: Console) -> int:
    quiet_libraries()
    if names_function(argv):
        options, function, device = function_options(argv)
        command = None
        report, repaired = _check_function(options, function, device)
    else:
        options, command = parse_options(argv)
        if command.planned:
            from isotype.planning.from_request import resolve_auto, words_of

            command, row = resolve_auto(command)
            if _prints_text(options):
                say(console, words_of(row))
        report, repaired = _check_plan(options, command)
    _show(report, options, console, repaired)
    status = exit_status(report, options.fail_on)
    if _prints_text(options):
        if repaired is not None:
            say(console, repaired.text)
        elif status == 0:
            show_commands(console, _next(options, command, report))
    return status


def names_function(argv: Sequence[str]) -> bool:
    """Return True if the arguments begin with a function (`package.module:function`)."""
    named = argv and re.fullmatch(r"\w+(\.\w+)*:\w+", argv[0])
    return bool(named) and not argv[0].startswith("embedded:")


def _prints_text(options: Options) -> bool:
    return not options.json and options.sarif != "-"


def _next(options: Options, command: Command | None, report: Report) -> dict[str, tuple[str, ...]]:
    """Return {description: command} for the next command after this check: a plan or the training. Return {} if neither can run."""
    if command is None or (options.bare and report.trace.setup.profile.memory_bytes is None):
        return {}  # a plan for a device of unknown memory needs `--max-memory`
    if options.bare:
        arguments = command.but(per_device_train_batch_size=None).arguments()
        devices = () if (options.devices or 1) == 1 else ("--devices", str(options.devices))
        tokens = (*command.environment(), "isotype", "plan", command.method, *arguments, *devices)
        return {"show how fast the model trains, and print the training command": tokens}
    # A training has no argument for FSDP1. It needs a data set and, for grpo and rloo, a reward.
    rewards = {"reward_funcs", "reward_model_name_or_path"}
    unrewarded = METHODS[command.method].loss == "policy" and rewards.isdisjoint(command.values)
    if options.fsdp == 1 or "dataset_name" not in command or unrewarded:
        return {}
    trained = without_absent_device(command, report.trace.setup.profile.present)
    return {"train it": replace(trained, processes=options.devices or 1).tokens()}


def exit_status(report: Report, fail_on: str) -> int:
    """Return 1 if a finding has at least the severity `fail_on`, the step does not fit, or the trace is incomplete; else 0."""
    failing = report.errors or not report.complete or report.fits is False
    return 1 if failing or (fail_on == "warning" and report.warnings) else 0


def _check_plan(options: Options, command: Command) -> tuple[Report, Repaired | None]:
    defer_compiler()
    import_uncompiled("bitsandbytes")
    from isotype.preflight.repair import plan as planned
    from isotype.preflight.repair import unresolved
    from isotype.train.preflight.step import check_plan

    plan = plan_of(options, command)
    report = check_plan(plan, _phases(options))
    if report.fits is False:
        from isotype.planning.nearest import with_nearest

        report = replace(report, findings=with_nearest(report.findings, plan, command))
    present = report.trace.setup.profile.present
    if options.fsdp != 1:  # no argument of isotype's trainings selects FSDP1
        findings = with_commands(report.findings, command, bare=options.bare, present=present)
        report = replace(report, findings=findings)
    if not options.fix:
        return report, None

    def remaining(changed: Command) -> Sequence[tuple[Finding, str]]:
        return unresolved(check_plan(plan_of(options, changed), _phases(options)))

    fixes, left = planned(report, command=True)
    return report, repaired_command(command, fixes, left, present=present, remaining=remaining)


def _phases(options: Options) -> tuple[str, ...]:
    return ("forward", "backward", "unscale", "optimizer", *(("generate",) if options.generate else ()))


def _check_function(options: Options, function: str, device: str | None) -> tuple[Report, Repaired | None]:
    from isotype.compat.torch_device import written_for
    from isotype.precision.devices.profile import device_profile
    from isotype.preflight.check import check

    profile = device_profile(device if device is not None else "cpu")
    with written_for(profile):
        arguments = function_arguments(function)
    phases = _phases(options) if options.generate else None
    flags = {"device": device, "fsdp": options.fsdp, "devices": options.devices, "phases": phases}
    arguments |= {name: value for name, value in flags.items() if value is not None}
    model, inputs = arguments.pop("model"), arguments.pop("inputs")
    report = check(model, inputs, **arguments)
    if not options.fix:
        return report, None
    from isotype.preflight.repair import repair

    repairs = repair(model, report)
    return report, Repaired(str(repairs), repairs.fixes, repairs.left)


def _show(report: Report, options: Options, console: Console, repaired: Repaired | None) -> None:
    if options.html is not None:
        report.to_html(options.html)
    if options.sarif not in (None, "-"):
        from isotype.report.html import write_report

        write_report(Path(str(options.sarif)), report.to_sarif())
    if options.json:
        content = json.loads(report.to_json())
        if repaired is not None:
            content["repair"] = repaired.content()
        print(json.dumps(content, indent=1, allow_nan=False))
    elif options.sarif == "-":
        print(report.to_sarif())
    else:
        from isotype.report.check.text import render

        render(report, console, whole=options.verbose)
