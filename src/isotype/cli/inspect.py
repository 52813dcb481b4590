"""`isotype inspect`: dtypes, bytes and quantization of a checkpoint, from its headers alone."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from rich.console import Console

from isotype.cli.output import quiet_libraries
from isotype.core.arguments import Parser
from isotype.core.errors import UsageError
from isotype.core.formats import ASKED, MIXED
from isotype.core.units import parse_size

# What the plan is made by, with the defaults.
_OF_THE_PLAN = {"dtype": "auto", "quantization": None, "base_memory": None, "device": "auto"}


def inspect_parser() -> Parser:
    """The arguments of `isotype inspect`."""
    parser = Parser(
        prog="isotype inspect",
        description="The dtypes, bytes and quantization that a checkpoint holds, by groups of equal tensors of all "
        "layers. Reads headers only.",
    )
    add = parser.add_argument
    add("path", help="a directory, .safetensors, .safetensors.index.json or .gguf file, or a hub id")
    add("--revision", default=None, help="branch, tag or commit of a hub id")
    add("--plan", action="store_true", help="show what loading it would do to each tensor, and why")
    add(
        "--dtype",
        default="auto",
        help="of the plan: compute dtype; auto: the checkpoint's, where the device runs it",
    )
    add(
        "--quantization",
        choices=(*ASKED, MIXED),
        default=None,
        help="of the plan: storage of the frozen weights; mixed: by the damages that isotype quality has measured",
    )
    add("--base_memory", default=None, help="of the plan: what mixed weights take at most, such as 6GiB")
    add("--device", default="auto", help="of the plan: a device or a device profile; auto: the best one here")
    add("--json", action="store_true", help="print JSON")
    return parser


def run(argv: Sequence[str], console: Console) -> int:
    """Run `isotype inspect` and return its exit status.

    Raises:
        CheckpointError: no checkpoint there, a damaged one, or one whose weights are not its model's or cannot be read;
            what its headers say is printed before.
        PrecisionError: with `--plan`, a policy that cannot be.
        UsageError: arguments of a plan without `--plan`.
    """
    options = inspect_parser().parse_args(list(argv))
    if options.plan:
        return _plan(options, console)
    flags = [f"--{name}" for name, default in _OF_THE_PLAN.items() if getattr(options, name) != default]
    if flags:
        raise UsageError.of(
            "arguments of a plan without --plan",
            " ".join(flags),
            "--plan with it: headers alone have no policy",
            "add --plan",
        )
    from isotype.checkpoint.inspect import inspect_checkpoint
    from isotype.report.inspect import inspection_json, render_inspection

    inspection = inspect_checkpoint(options.path, revision=options.revision)
    if options.json:
        print(json.dumps(inspection_json(inspection), indent=1))
    else:
        render_inspection(inspection, console)
    quiet_libraries()
    from isotype.checkpoint.opened import require_loadable

    require_loadable(options.path, options.revision)
    return 0


def _plan(options: argparse.Namespace, console: Console) -> int:
    quiet_libraries()
    from isotype.checkpoint.inspect_plan import inspect_plan
    from isotype.report.inspect import plan_json, render_plan

    inspection = inspect_plan(
        options.path,
        dtype=options.dtype,
        quantization=options.quantization,
        device=options.device,
        base_memory=_amount(options.base_memory),
        revision=options.revision,
    )
    if options.json:
        print(json.dumps(plan_json(inspection), indent=1))
    else:
        render_plan(inspection, console)
    return 0


def _amount(text: str | None) -> int | None:
    """Bytes that `--base_memory` says."""
    amount = None if text is None else parse_size(text)
    if text is not None and amount is None:
        raise UsageError.of(
            "arguments that cannot work",
            f"--base_memory {text}",
            "an amount of memory",
            "write it like 6GiB",
        )
    return amount
