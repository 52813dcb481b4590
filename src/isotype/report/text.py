"""Formats amounts and source lines, and wraps text for a console, in all reports."""

import math
import os
import re
import shlex
import textwrap
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from isotype.core.names import format_bytes
from isotype.core.terminal import printed_command
from isotype.report.html import format_number


def format_duration(seconds: float) -> str:
    """Format seconds, as in `12.0 µs`, `8.40 ms`, `0.840 s`, `12.3 s`, `4 min 05 s`, `2 h 07 min` or `3 d 04 h`."""
    if 0 < seconds < 0.001:
        return f"{format_number(1e6 * seconds, 3)} µs"
    if 0 < seconds < 0.1:
        return f"{format_number(1000 * seconds, 3)} ms"
    if not math.isfinite(seconds) or seconds < 60:
        return f"{format_number(seconds, 3)} s"
    units = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    whole = round(seconds)
    i = next(i for i, (_, size) in enumerate(units) if whole >= size)
    (large, size), (small, part) = units[i], units[i + 1]
    return f"{whole // size:,} {large} {whole % size // part:02d} {small}"


def format_share(share: float) -> str:
    """Format a share, as in `62 %`, `3.5 %` (with a decimal below 10 %) or `under 0.1 %`."""
    percent = 100 * share
    if 0 < percent < 0.05:
        return "under 0.1 %"
    return f"{percent:.1f} %" if 0 < percent < 9.95 else f"{percent:.0f} %"


def format_count(count: int) -> str:
    """Format a count, as in `950`, `12.3 k`, `1.84 M` or `2.1 B`."""
    for size, letter in ((1_000_000_000, "B"), (1_000_000, "M"), (10_000, "k")):
        if count >= size:
            return f"{format_number(count / (1000 if letter == 'k' else size), 3)} {letter}"
    return f"{count:,}"


def format_flops(flops: float) -> str:
    for name, unit in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if flops >= unit:
            return f"{format_number(flops / unit, 3)} {name}FLOP"
    return f"{flops:,.0f} FLOP"


def format_kinds(kinds: Mapping[Any, int], least: float) -> str:
    """Format the kinds that have at least `least` bytes, the largest first: `activations 725 MiB, weights 111 MiB`."""
    ranked = sorted(kinds.items(), key=lambda item: -item[1])
    return ", ".join(f"{kind} {format_bytes(size)}" for kind, size in ranked if size >= least)


def short_source(source: str) -> str:
    """Shorten `/lib/transformers/models/llama/modeling_llama.py:64` to `llama/modeling_llama.py:64`."""
    return "/".join(source.replace("\\", "/").split("/")[-2:])


NARROW = 60
"""On a console with fewer columns, each cell of a table gets its own line."""

_LABEL = re.compile(r" *(?:(?:[-=|]|-->) +)?(?:\S+(?: \S+)? {2,})?")
"""The start of a line: spaces, a bullet, and a label of one or two words. All further lines are indented by the width of this start."""

_COMMAND = re.compile(r" {4}(?=(?:env|isotype|torchrun) )")


def table_of(*heads: str, numbers: Container[str] = (), folded: Container[str] = ()) -> Table:
    """Return a table with these columns. Columns in `numbers` are right-aligned. Cells of `folded` columns may be wrapped."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for head in heads:
        table.add_column(
            head,
            justify="right" if head in numbers else "left",
            no_wrap=head not in folded,
            overflow="fold" if head in folded else "ellipsis",
        )
    return table


def pair_table(rows: Iterable[Sequence[str | Text]], style: str = "bold", **options: Any) -> Table:
    """Return a table without column heads. A row has a label in the given style, and a text that may be wrapped."""
    table = Table(box=None, show_header=False, pad_edge=False, **options)
    table.add_column(style=style, no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row))
    return table


def fitting(table: Table, console: Console, indent: int = 0, dropped: Sequence[str] = ()) -> RenderableType:
    """Return the indented table. On a console narrower than `NARROW`, return a list with a line for each cell.

    If a table with `dropped` columns is too wide, its gaps are reduced first, and then these columns are omitted one by
    one. A table that is still too wide becomes a list.
    """
    if console.width >= NARROW and not dropped:
        return Padding(table, (0, 0, 0, indent), expand=False)
    for omitted in range(len(dropped) + 1) if console.width >= NARROW else ():
        less = _without(table, dropped[:omitted])
        if _least_width(less, console) > console.width - indent:
            less.padding = (0, 1, 0, 0)
        if _least_width(less, console) <= console.width - indent:
            return Padding(less, (0, 0, 0, indent), expand=False)
    heads = [Text(str(column.header), style="dim") for column in table.columns]
    lines = Table.grid()
    lines.add_column(overflow="fold")
    if table.title:
        lines.add_row(Text(str(table.title), style=table.title_style or ""))
    for first, *others in zip(*(column.cells for column in table.columns), strict=True):
        name = first if isinstance(first, Text) else Text(str(first))
        shown = Text(_at_dots(name.plain, console.width - indent), style=name.style)
        lines.add_row(Padding(shown, (0, 0, 0, indent)))
        inner = pair_table(zip(heads[1:], others, strict=True), "")
        lines.add_row(Padding(inner, (0, 0, 0, indent + 2), expand=False))
    return lines


def _without(table: Table, dropped: Sequence[str]) -> Table:
    columns = [column for column in table.columns if column.header not in dropped]
    less = Table(box=None, pad_edge=False, padding=table.padding, header_style=table.header_style)
    for column in columns:
        less.add_column(column.header, justify=column.justify, no_wrap=column.no_wrap)
    for *cells, row in zip(*(column.cells for column in columns), table.rows, strict=True):
        less.add_row(*cells, style=row.style)
    return less


def _least_width(table: Table, console: Console) -> int:
    """Return the smallest width at which no word in the table and no cell of a `no_wrap` column is broken."""
    _, right, _, left = table.padding
    widths = []
    for column in table.columns:
        measured = [console.measure(cell) for cell in (column.header, *column.cells)]
        widths.append(max(size.maximum if column.no_wrap else size.minimum for size in measured))
    return sum(widths) + (left + right) * (len(widths) - 1)


def width_of(console: Console) -> int | None:
    """Return the maximum width of a line in columns, or None for a log file or a pipe."""
    return console.width if console.is_terminal or "COLUMNS" in os.environ else None


def wrapped(text: str, console: Console) -> str:
    """Break lines that are too long for the console. Further lines begin below the first word after the label.

    Lines are broken only at spaces. A command (indented by four spaces) stays valid in a shell. Text for a log file or
    a pipe is unchanged.
    """
    width = width_of(console)
    if width is None:
        return text
    return "\n".join(part for line in text.split("\n") for part in _wrapped(line, width))


def say(console: Console, text: str, style: str | None = None) -> None:
    console.print(wrapped(text, console), style=style, highlight=False, markup=False, soft_wrap=True)


def say_labelled(console: Console, label: str, style: str, texts: Iterable[str]) -> None:
    for text in texts:
        console.print(Text.assemble((f"{label}: ", style), text), highlight=False)


def show_commands(console: Console, commands: Mapping[str, Sequence[str]]) -> None:
    """Print the next commands for the user, each below its description. The user can paste these commands into a shell."""
    for description, tokens in commands.items():
        say(console, f"\n{description}:\n{printed_command(tokens, indent=4)}")


def chat_commands(model: Path, *, pictures: bool) -> dict[str, tuple[str, ...]]:
    """Return the command that chats with a model as `{description: words}`, for `show_commands`."""
    description = "try it, with the path of an image for FILE" if pictures else "try it"
    return {description: chat_command(model, pictures=pictures)}


def chat_command(model: Path, *, pictures: bool) -> tuple[str, ...]:
    """Return the words of the command that chats with a model. If `pictures` is True, the words end with `--image FILE`."""
    return ("isotype", "chat", str(model), *(("--image", "FILE") if pictures else ()))


def _wrapped(line: str, width: int) -> list[str]:
    if len(line) <= width:
        return [line]
    if _COMMAND.match(line):
        return printed_command(shlex.split(line), width, 4).split("\n")
    match = _LABEL.match(line)
    label = match.group() if match else ""
    indent, lines = len(label), []
    if indent > width // 2:  # a long label gets its own line
        indent, lines = len(label) - len(label.lstrip()) + 4, [label.rstrip()]
    rest = line[len(label) :]
    parts = textwrap.wrap(rest, width - indent, break_long_words=False, break_on_hyphens=False) or [""]
    first = label if not lines else " " * indent
    return [*lines, first + parts[0], *(" " * indent + part for part in parts[1:])]


def _at_dots(name: str, width: int) -> str:
    """Break a module's name after dots, into lines of at most `width` columns."""
    if len(name) <= width or " " in name:
        return name
    lines = [""]
    for part in name.split("."):
        if lines[-1] and len(lines[-1]) + len(part) >= width:
            lines.append("")
        lines[-1] += f"{part}."
    return "\n".join(lines)[:-1]
