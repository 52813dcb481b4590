"""The result of a merge, for the terminal."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from isotype.checkpoint.merge.report import ENOUGH, share
from isotype.core.dtypes import dtype_name
from isotype.core.formats import ASKED
from isotype.core.names import format_bytes
from isotype.report.text import fitting, show_commands

if TYPE_CHECKING:
    from isotype.checkpoint.merge.report import LogitsDifference, MergeReport


def show_merge(console: Console, report: MergeReport, export: Sequence[str] = ()) -> None:
    """Print the merge, its rounding error, the model's path and uses; `export`: the command for llama.cpp."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in _rows(report):
        table.add_row(name, text)
    console.print(fitting(table, console), highlight=False, markup=False)
    for note in report.notes:
        console.print(Text.assemble(("note: ", "dim"), note), highlight=False)
    for warning in report.warnings:
        console.print(Text.assemble(("warning: ", "yellow"), warning), highlight=False)
    if report.answers:
        show_commands(console, {"try it": ("isotype", "chat", str(report.model or report.output))})
    if report.exportable and export:
        form = shlex.split("" if report.cheapest is None else report.cheapest.arguments)
        # A dtype: 8 bits were tried, and keep too little.
        wide = form[1].replace("float", "f") if form[:1] == ["--dtype"] else "q8_0"
        chosen = form if "--gguf" in form else ("--gguf", wide)
        show_commands(console, {"write it for llama.cpp, and what is built on it": (*export, *chosen)})


def _share(error: float) -> str:
    return f"{error:.2%} of" if error < 1 else f"{error:,.1f} ×"


def _rows(report: MergeReport) -> list[tuple[str, str]]:
    dequantized = f" (dequantized from {report.storage})" if report.storage in ASKED else ""
    rows = [
        ("adapter", str(report.adapter)),
        ("base", f"{report.base}{dequantized}"),
        ("dtype", f"{dtype_name(report.dtype)} ({report.dtype_reason})"),
        *([] if report.stored is None else [("stored as", report.stored)]),
        ("merged", f"{len(report.weights)} weights, {report.entries:,} entries changed"),
    ]
    if report.worst is not None:
        rows += [
            (
                "lost to rounding",
                f"{_share(report.median_error)} a weight's update in the median, "
                f"{_share(report.worst.relative_error).removesuffix(' of')} in {report.worst.name}",
            ),
        ]
    if report.weights and report.vanished is not None:
        what = "have the base's codes" if report.coded else "have the base's values"
        rows.append(
            ("as before", f"{report.vanished:,} of these entries {what} ({report.vanished_share:.2%})")
        )
    if report.logits is not None:
        rows += _kept(report.logits)
    if report.cheapest is not None:
        rows.append(("smallest", f"of what keeps {share(ENOUGH)}: {report.cheapest}"))
    return [*rows, ("output", f"{report.output} ({format_bytes(report.bytes)})")]


def _kept(logits: LogitsDifference) -> Iterator[tuple[str, str]]:
    texts = f"{logits.source or 'texts of isotype'} ({logits.tokens:,} tokens)"
    if logits.kept is not None:
        yield (
            "kept",
            f"{share(logits.kept)} of what was learned: 1 - KL(trained || merged) / KL(trained || base), on {texts}",
        )
    yield (
        "logits",
        f"differ by at most {logits.max_abs:.3g}, KL {logits.mean_kl:.3g} nats, from the trained model's in float32; those of the base "
        f"KL {logits.base_kl:.3g}",
    )
    if logits.losses is not None:
        base, trained, merged = logits.losses
        fall = "" if logits.fall is None else f" ({share(logits.fall)} of the fall)"
        yield "loss", f"{base:.4f} of the base, {trained:.4f} trained, {merged:.4f} merged{fall}"
