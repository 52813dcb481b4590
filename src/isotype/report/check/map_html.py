"""The dtype map as HTML: one small block a part, its bands coloured and labelled by dtype, its findings on its corner."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from isotype.report.charts import escape
from isotype.report.check.map import Block, Cell, Dtypes, Row, Stack
from isotype.report.palette import dtype_class
from isotype.report.text import format_bytes
from isotype.rules.finding import Finding

_SHORT = {
    "float64": "f64", "float32": "f32", "bfloat16": "bf16", "float16": "f16", "mxfp4": "mx4", "int8": "i8",
    "uint8": "u8", "int64": "i64", "int32": "i32", "bool": "bool",
}  # fmt: skip
_LONGEST_HEAD = 40


def map_html(blocks: Sequence[Block], findings: Sequence[Finding]) -> str:
    """All blocks from the model's input to its output, with a legend of the bands and of the dtypes."""
    parts: list[str] = []
    singles: list[str] = []
    for block in blocks:
        if isinstance(block, Cell):
            singles.append(_single(block, findings))
            continue
        parts += _flow(singles)
        singles = []
        parts.append(_stack(block, findings))
    parts += _flow(singles)
    return f'{_legend(blocks)}<div class="map">{"".join(parts)}</div>'


def _cells(blocks: Iterable[Block]) -> Iterable[Cell]:
    for block in blocks:
        if isinstance(block, Cell):
            yield block
        else:
            for row in block.rows:
                yield from row.cells.values()


def _legend(blocks: Sequence[Block]) -> str:
    cells = list(_cells(blocks))
    names = dict.fromkeys(
        name
        for cell in cells
        for name in (*cell.stored, *cell.buffers, *cell.runs, *cell.adapters, *cell.adapter_runs)
    )
    chips = "".join(
        f'<li class="chip {dtype_class(name)}">{escape(name)}<small>{short(name)}</small></li>'
        for name in names
    )
    bands = ["stored as", "runs in", *(["adapter"] if any(cell.adapters for cell in cells) else [])]
    sample = "".join(f"<span>{band}</span>" for band in bands)
    return f'<div class="legend"><div class="bands" aria-hidden="true">{sample}</div><ul class="dtypes">{chips}</ul></div>'


def short(name: str) -> str:
    """A dtype's name in at most four letters."""
    return "f8" if name.startswith("float8") else _SHORT.get(name, name[:4])


def _flow(singles: Sequence[str]) -> list[str]:
    return [f'<div class="singles">{"".join(singles)}</div>'] if singles else []


def _single(cell: Cell, findings: Sequence[Finding]) -> str:
    parent, _, leaf = cell.name.rpartition(".")
    before = f"<small>{escape(parent)}.</small>" if parent else ""
    label = f'<span class="name">{before}{escape(leaf or "the model")}</span>'
    return f'<div class="single">{_block(cell, findings, 1, cell.name)}{label}</div>'


def _stack(stack: Stack, findings: Sequence[Finding]) -> str:
    layers = f"{stack.layers:,} {'layer' if stack.layers == 1 else 'layers'}"
    heads = "".join(_head(column, stack.columns) for column in stack.columns)
    rows = "".join(_row(row, stack, findings) for row in stack.rows)
    name = escape(stack.name or "the model")
    return (
        f'<div class="scroll"><table class="stack"><caption><b>{name}</b> {layers}</caption>'
        f'<thead><tr><th scope="col"><span class="unseen">layers</span></th>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _head(column: str, columns: Sequence[str]) -> str:
    leaf = column.rpartition(".")[2]
    if leaf == "*" or sum(other.rpartition(".")[2] == leaf for other in columns) > 1:
        leaf = column  # the last name alone would not tell two columns apart
    shown = leaf if len(leaf) <= _LONGEST_HEAD else f"…{leaf[1 - _LONGEST_HEAD :]}"
    return f'<th scope="col" title="{escape(column)}"><span>{_breakable(shown)}</span></th>'


def _breakable(name: str) -> str:
    """A name that may go on in the next line behind each of its words."""
    return "<wbr>".join(escape(word) for word in re.split(r"(?<=[_.])(?=.)", name))


def layers_label(row: Row) -> str:
    """`"0–29"`, `"3"`; the numbers are those of the real model."""
    return f"{row.first}" if row.first == row.last else f"{row.first}–{row.last}"


def _row(row: Row, stack: Stack, findings: Sequence[Finding]) -> str:
    times = f" <small>×{row.layers:,}</small>" if row.layers > 1 else ""
    marks = "".join(_mark(position, findings) for position in row.findings)
    cells = []
    for column in stack.columns:
        cell = row.cells.get(column)
        if cell is None:
            cells.append("<td></td>")
            continue
        where = ".".join(filter(None, (stack.name, layers_label(row), column)))
        cells.append(f"<td>{_block(cell, findings, row.layers, where)}</td>")
    return f'<tr><th scope="row">{layers_label(row)}{times}{marks}</th>{"".join(cells)}</tr>'


def _mark(position: int, findings: Sequence[Finding]) -> str:
    finding = findings[position]
    return (
        f' <a class="mark is-{finding.severity}" href="#finding-{position + 1}" '
        f'title="{escape(f"{finding.code} {finding.message}")}">{position + 1}</a>'
    )


def _block(cell: Cell, findings: Sequence[Finding], layers: int, where: str) -> str:
    """A link to the worst finding where there is one, else a plain block that can be pointed at all the same."""
    stored = cell.stored or cell.buffers
    bands = _band(stored, "stored buffer" if cell.buffers and not cell.stored else "stored")
    bands += _band(cell.runs, "runs")
    bands += _band(cell.adapters, "adapter") if cell.adapters else ""
    words = escape(describe(cell, findings, layers, where))
    marked = " ".join(str(position + 1) for position in cell.findings)
    common = f'title="{words}" aria-label="{words}" data-findings="{marked}"'
    if not cell.findings:
        return f'<span class="cell" role="img" tabindex="0" {common}>{bands}</span>'
    first = cell.findings[0]
    more = f"+{len(cell.findings) - 1}" if len(cell.findings) > 1 else ""
    badge = f'<b class="badge-number">{first + 1}{more}</b>'
    severity = findings[first].severity
    return f'<a class="cell flagged is-{severity}" href="#finding-{first + 1}" {common}>{bands}{badge}</a>'


def _band(dtypes: Dtypes, kind: str) -> str:
    pieces = "".join(f'<i class="{dtype_class(name)}">{escape(short(name))}</i>' for name in dtypes[:2])
    return f'<span class="band {kind}">{pieces or "<i></i>"}</span>'


def describe(cell: Cell, findings: Sequence[Finding], layers: int, where: str) -> str:
    """What a person wants to know about a part, a line each."""
    lines = [where + (f" ({cell.module_class})" if cell.module_class else "")]
    if cell.stored:
        standing = [word for word, true in (("trained", cell.trainable), ("pinned", cell.pinned)) if true]
        lines.append(", ".join([f"stored as {' and '.join(cell.stored)}", *standing]))
    if cell.buffers:
        lines.append(f"buffers in {' and '.join(cell.buffers)}")
    lines.append(f"runs in {' and '.join(cell.runs)}" if cell.runs else "not seen running in the forward")
    if cell.adapters:
        runs = f", running in {' and '.join(cell.adapter_runs)}" if cell.adapter_runs else ""
        lines.append(f"adapter in {' and '.join(cell.adapters)}{runs}")
    number = [f"{cell.count:,} in each layer"] if cell.count > 1 else []
    number += [f"{layers:,} layers"] if layers > 1 else []
    size = [format_bytes(cell.bytes)] if cell.bytes else []
    lines += [" · ".join([*size, *number])] if size or number else []
    for position in cell.findings:
        finding = findings[position]
        lines.append(f"{position + 1}. {finding.severity} {finding.code}: {finding.message}")
    return "\n".join(lines)
