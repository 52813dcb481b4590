"""`isotype merge`: merge an adapter into its base model, and say what the rounding costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from isotype.cli.output import quiet_libraries
from isotype.compat.interrupt import interrupts_kept
from isotype.core.arguments import Parser
from isotype.core.dtypes import GGUF_TYPES
from isotype.core.files import unused
from isotype.core.formats import QUANTIZATIONS


def merge_parser() -> Parser:
    """The arguments of `isotype merge`."""
    parser = Parser(prog="isotype merge", description="Merge an adapter into its base model.")
    parser.add_argument("adapter", type=Path, help="directory of the adapter")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        required=True,
        help="directory for the merged model; or a GGUF file, NAME.gguf (16 bits without --gguf)",
    )
    parser.add_argument(
        "--base", default=None, help="merge into this 16-bit original instead of the dequantized base"
    )
    parser.add_argument(
        "--dtype", default="auto", help="dtype of the merged weights; auto: the one it was trained in"
    )
    stored = parser.add_mutually_exclusive_group()
    stored.add_argument(
        "--quantization",
        choices=QUANTIZATIONS,
        default=None,
        help="store the merged model in bitsandbytes' format",
    )
    stored.add_argument(
        "--gguf",
        choices=GGUF_TYPES,
        default=None,
        help="write a GGUF file of this type, for llama.cpp and what is built on it; q6_k and below take its llama-quantize",
    )
    parser.add_argument(
        "--model_revision",
        default=None,
        help="branch, tag or commit of a base on the hub; by default the adapter's",
    )
    return parser


def run(argv: Sequence[str], console: Console) -> int:
    """Run `isotype merge` and return its exit status."""
    options = merge_parser().parse_args(argv)
    quiet_libraries()
    from isotype.checkpoint.merge.merge import merge_adapter
    from isotype.report.merge import show_merge
    from isotype.train.rows.measured import rows_of_training

    with interrupts_kept(), console.status(f"merging {options.adapter} …"):
        rows, why_not = rows_of_training(options.adapter)
        report = merge_adapter(
            options.adapter,
            options.output,
            base=options.base,
            dtype=options.dtype,
            revision=options.model_revision,
            stored=options.gguf or options.quantization,
            rows=rows,
        )
    base = {"--base": options.base, "--model_revision": options.model_revision}
    asked = (word for name, value in base.items() if value is not None for word in (name, value))
    export = (
        "isotype",
        "merge",
        str(options.adapter),
        "-o",
        str(unused(Path(f"{options.output}.gguf"))),
        *asked,
    )
    show_merge(
        console, report if why_not is None else replace(report, notes=(*report.notes, why_not)), export
    )
    return 0
