"""The dtype map as its template shows it: each part with its bands, its words, and the findings on its corner."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from isotype.core.units import format_bytes
from isotype.records.finding import Finding
from isotype.report.check.map import Block, Cell, Dtypes, Row, Stack
from isotype.report.palette import dtype_class

Content = dict[str, object]

_SHORT = {
    "float64": "f64", "float32": "f32", "bfloat16": "bf16", "float16": "f16", "mxfp4": "mx4", "int8": "i8",
    "uint8": "u8", "int64": "i64", "int32": "i32", "bool": "bool",
}  # fmt: skip
_LONGEST_HEAD = 40


def map_content(blocks: Sequence[Block], findings: Sequence[Finding]) -> Content:
    """All blocks from the model's input to its output, with a legend of the bands and of the dtypes."""
    cells = list(_cells(blocks))
    names = dict.fromkeys(
        name
        for cell in cells
        for name in (*cell.stored, *cell.buffers, *cell.runs, *cell.adapters, *cell.adapter_runs)
    )
    return {
        "bands": ["stored as", "runs in", *(["adapter"] if any(cell.adapters for cell in cells) else [])],
        "dtypes": [(name, dtype_class(name), short(name)) for name in names],
        "parts": _parts(blocks, findings),
    }


def _parts(blocks: Sequence[Block], findings: Sequence[Finding]) -> list[tuple[str, object]]:
    """`("stack", …)` and, of what stands between two of them, `("singles", […])`."""
    parts: list[tuple[str, object]] = []
    singles: list[Content] = []
    for block in blocks:
        if isinstance(block, Stack):
            parts.append(("stack", _stack(block, findings)))
            singles = []
            continue
        if not singles:
            parts.append(("singles", singles))
        singles.append(_single(block, findings))
    return parts


def _cells(blocks: Iterable[Block]) -> Iterable[Cell]:
    for block in blocks:
        if isinstance(block, Cell):
            yield block
        else:
            for row in block.rows:
                yield from row.cells.values()


def short(name: str) -> str:
    """A dtype's name in at most four letters."""
    return "f8" if name.startswith("float8") else _SHORT.get(name, name[:4])


def _single(cell: Cell, findings: Sequence[Finding]) -> Content:
    parent, _, leaf = cell.name.rpartition(".")
    return {"parent": parent, "leaf": leaf or "the model", **_block(cell, findings, 1, cell.name)}


def _stack(stack: Stack, findings: Sequence[Finding]) -> Content:
    return {
        "name": stack.name or "the model",
        "layers": f"{stack.layers:,} {'layer' if stack.layers == 1 else 'layers'}",
        "heads": [(column, _head(column, stack.columns)) for column in stack.columns],
        "rows": [_row(row, stack, findings) for row in stack.rows],
    }


def _head(column: str, columns: Sequence[str]) -> list[str]:
    """A column's name as its head shows it, in words behind each of which a line may break."""
    leaf = column.rpartition(".")[2]
    if leaf == "*" or sum(other.rpartition(".")[2] == leaf for other in columns) > 1:
        leaf = column  # the last name alone would not tell two columns apart
    shown = leaf if len(leaf) <= _LONGEST_HEAD else f"…{leaf[1 - _LONGEST_HEAD :]}"
    return re.split(r"(?<=[_.])(?=.)", shown)


def layers_label(row: Row) -> str:
    """`"0–29"`, `"3"`; the numbers are those of the real model."""
    return f"{row.first}" if row.first == row.last else f"{row.first}–{row.last}"


def _row(row: Row, stack: Stack, findings: Sequence[Finding]) -> Content:
    cells: list[Content | None] = []
    for column in stack.columns:
        cell = row.cells.get(column)
        where = ".".join(filter(None, (stack.name, layers_label(row), column)))
        cells.append(None if cell is None else _block(cell, findings, row.layers, where))
    return {
        "label": layers_label(row),
        "times": f"×{row.layers:,}" if row.layers > 1 else "",
        "marks": [_mark(position, findings[position]) for position in row.findings],
        "cells": cells,
    }


def _mark(position: int, finding: Finding) -> Content:
    title = f"{finding.code} {finding.message}"
    return {"number": position + 1, "severity": finding.severity, "title": title}


def _block(cell: Cell, findings: Sequence[Finding], layers: int, where: str) -> Content:
    """A part's bands and words; a badge with the number of its worst finding where there is one."""
    stored = _band(
        cell.stored or cell.buffers, "stored buffer" if cell.buffers and not cell.stored else "stored"
    )
    bands = [stored, _band(cell.runs, "runs"), *([_band(cell.adapters, "adapter")] if cell.adapters else [])]
    content: Content = {"bands": bands, "words": describe(cell, findings, layers, where), "badge": ""}
    if not cell.findings:
        return content
    first = cell.findings[0]
    more = f"+{len(cell.findings) - 1}" if len(cell.findings) > 1 else ""
    return {
        **content,
        "badge": f"{first + 1}{more}",
        "first": first + 1,
        "severity": findings[first].severity,
        "marked": " ".join(str(position + 1) for position in cell.findings),
    }


def _band(dtypes: Dtypes, kind: str) -> Content:
    return {"kind": kind, "pieces": [(dtype_class(name), short(name)) for name in dtypes[:2]]}


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
