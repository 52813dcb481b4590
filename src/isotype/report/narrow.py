"""Tables on a terminal too narrow for them: one row under another."""

from __future__ import annotations

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

NARROW = 60
"""Columns below which a table's rows are printed one under another."""


def fitting(table: Table, console: Console, indent: int = 0) -> RenderableType:
    """The table; where the console has less than `NARROW` columns, each row's cells under its first, with the headers."""
    if console.width >= NARROW:
        return Padding(table, (0, 0, 0, indent))
    heads = [Text(str(column.header), style="dim") for column in table.columns]
    lines = Table.grid()
    lines.add_column(overflow="fold")
    for first, *others in zip(*(column.cells for column in table.columns), strict=True):
        lines.add_row(Padding(first, (0, 0, 0, indent)))
        inner = Table.grid(padding=(0, 2))
        inner.add_column(no_wrap=True)
        inner.add_column(overflow="fold")
        for head, cell in zip(heads[1:], others, strict=True):
            inner.add_row(head, cell)
        lines.add_row(Padding(inner, (0, 0, 0, indent + 2)))
    return lines
