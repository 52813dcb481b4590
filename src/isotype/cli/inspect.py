"""`isotype inspect`: dtypes, bytes and quantization of a checkpoint, from its headers alone."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.console import Console

from isotype.core.arguments import Parser


def inspect_parser() -> Parser:
    """The arguments of `isotype inspect`."""
    parser = Parser(
        prog="isotype inspect",
        description="The dtypes, bytes and quantization that a checkpoint holds, by groups of equal tensors of all "
        "layers. Reads headers only.",
    )
    parser.add_argument(
        "path", help="a directory, .safetensors, .safetensors.index.json or .gguf file, or a hub id"
    )
    parser.add_argument("--revision", default=None, help="branch, tag or commit of a hub id")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def run(argv: Sequence[str], console: Console) -> int:
    """Run `isotype inspect` and return its exit status.

    Raises:
        CheckpointError: no checkpoint there, or a damaged one.
    """
    options = inspect_parser().parse_args(list(argv))
    from isotype.checkpoint.inspect import inspect_checkpoint
    from isotype.report.inspect import inspection_json, render_inspection

    inspection = inspect_checkpoint(options.path, revision=options.revision)
    if options.json:
        print(json.dumps(inspection_json(inspection), indent=1))
    else:
        render_inspection(inspection, console)
    return 0
