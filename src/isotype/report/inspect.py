"""What a checkpoint holds, for the terminal and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from isotype.checkpoint.inspect import Group, Inspection
from isotype.checkpoint.inspect_plan import PlanGroup
from isotype.core.grouping import grouped
from isotype.core.names import listed, plural
from isotype.core.units import format_bytes
from isotype.report.narrow import fitting, wrapped

_NAMES_SHOWN = 4


def render_inspection(inspection: Inspection, console: Console) -> None:
    """Print the groups, the totals by dtype, and what is stored otherwise than the rest."""
    head = f"{inspection.path}  ({inspection.format}, {inspection.kind})"
    console.print(Text(head, style="bold"), soft_wrap=True)
    console.print(fitting(_group_table(inspection), console))
    console.print()
    console.print(fitting(_total_table(inspection), console))
    console.print()
    facts = [
        ("quantization", inspection.quantization or "none"),
        ("config.json", inspection.config_dtype or ""),
    ]
    for name, text in facts:
        if text:
            console.print(Text.assemble((f"{name:<14}", "dim"), text), soft_wrap=True)
    for line in mismatch_lines(inspection):
        console.print(Text(wrapped(line, console), style="yellow"), soft_wrap=True)


def mismatch_lines(inspection: Inspection) -> list[str]:
    """One line for each group with tensors stored otherwise, and for each note."""
    lines = [
        f"mismatched: {listed([mismatched.name for mismatched in some], _NAMES_SHOWN)} {'is' if len(some) == 1 else 'are'} {dtype}, "
        f"the other {group.count - len(group.mismatched)} {group.dtype}"
        for group in inspection.groups
        for dtype, some in grouped(group.mismatched, lambda each: each.dtype).items()
    ]
    for group in inspection.groups:
        if group.unlike is not None:
            lines.append(f"mismatched: {group.name} is {group.dtype} in a {group.unlike} checkpoint")
    return [*lines, *(f"note: {note}" for note in inspection.notes)]


def inspection_json(inspection: Inspection) -> dict[str, Any]:
    """The inspection as plain dicts, lists, strings and numbers; bytes unrounded."""
    return {
        **asdict(inspection),
        "bytes": inspection.bytes,
        "tensors": inspection.tensors,
        "values": inspection.values,
    }


def _group_table(inspection: Inspection) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("tensors", overflow="fold")
    table.add_column("count", justify="right")
    table.add_column("dtype")
    table.add_column("shape", no_wrap=True)
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    for group in inspection.groups:
        marked = bool(group.mismatched) or group.unlike is not None
        table.add_row(
            Text(group.name),
            str(group.count),
            Text(group.dtype + (" !" if marked else ""), style="yellow" if marked else ""),
            shapes_of(group),
            format_bytes(group.bytes),
            _share(group.bytes, inspection.bytes),
        )
    return table


def _total_table(inspection: Inspection) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", title_justify="left")
    table.add_column("dtype")
    for name in ("tensors", "weights", "bytes", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    for total in inspection.totals:
        table.add_row(
            Text(total.dtype),
            f"{total.tensors:,}",
            f"{total.values:,}",
            format_bytes(total.bytes),
            _share(total.bytes, inspection.bytes),
        )
    if len(inspection.totals) > 1:
        table.add_row(
            Text("all", style="bold"),
            f"{inspection.tensors:,}",
            f"{inspection.values:,}",
            format_bytes(inspection.bytes),
            "100 %",
        )
    return table


def shapes_of(group: Group | PlanGroup) -> str:
    """The first shape of a group of tensors, and how many others it has."""
    first = " × ".join(map(str, group.shapes[0])) or "scalar"
    others = len(group.shapes) - 1
    return f"{first} (+{plural(others, 'other')})" if others else first


def _share(part: int, whole: int) -> str:
    share = 100 * part / whole if whole else 0.0
    return "< 0.1 %" if 0 < share < 0.05 else f"{share:.1f} %"
