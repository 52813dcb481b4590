"""`isotype doctor`: what this machine and these library versions can do."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.console import Console

from isotype.core.arguments import Parser


def doctor_parser() -> Parser:
    """The arguments of `isotype doctor`."""
    parser = Parser(
        prog="isotype doctor",
        description="What this machine and these library versions can do: dtypes, what each costs here (measured), "
        "and versions that do not fit each other.",
    )
    parser.add_argument(
        "--device", default="auto", help="a device that is here (cpu, cuda:1) or a profile (t4, h100)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def run(argv: Sequence[str], console: Console) -> int:
    """Run `isotype doctor` and return its exit status."""
    options = doctor_parser().parse_args(argv)
    from isotype.precision.devices.machine import gather_doctor_report
    from isotype.report.doctor import doctor_json, render_doctor

    report = gather_doctor_report(options.device)
    if options.json:
        print(json.dumps(doctor_json(report), indent=2))
    else:
        render_doctor(report, console)
    return 0 if report.ok else 1
