"""Describes the first NaN or infinity of a step: the operator, module, source line, cause and fix."""

import math
from collections.abc import Mapping

import torch

from isotype.core.dtypes import dtype_name
from isotype.core.errors import Problem
from isotype.core.names import plural
from isotype.core.tables import table
from isotype.records.nonfinite import Cause, NonFinite, Value
from isotype.report.text import short_source

_ROWS_NAMED = 6
_CAUSES: Mapping[Cause, Mapping[str, str]] = table(__file__)
"""Maps a cause to the reason in the headline, the expected values, and the fix."""
_INFIX = {"div": "/", "mul": "*", "add": "+", "sub": "-", "pow": "**"}


def problem_of(event: NonFinite) -> Problem:
    lines = [_headline(event), f"      --> {_place(event)}"]
    shown = (*event.operands, event.result)
    width = max(len(value.role) for value in shown)
    lines += [f"       |   {value.role:<{width}}  {_value_words(value)}" for value in shown]
    return Problem("\n".join(lines), _expected(event), _fix(event))


def _headline(event: NonFinite) -> str:
    if event.culprit is not None and event.cause != "constant":
        culprit = event.culprit
        kind = {"weight": "the weight", "input": "the input"}.get(event.cause, "a tensor")
        name = f" {culprit.name}" if culprit.name else ", which no operator of the step computed,"
        return f"{kind}{name} holds {_counts(culprit)}"
    value = "infinity" if not event.result.nan else "NaN"
    exact, dtype = number(event.exact or 0.0), dtype_name(event.result.dtype)
    reason = _CAUSES[event.cause].get("reason", " of finite operands")
    return f"{_name(event)} gives {value}{reason.format(exact=exact, dtype=dtype, arithmetic=_arithmetic(event))}"


def _place(event: NonFinite) -> str:
    phase = {"unscale": "norm of the gradients"}.get(event.phase, event.phase)
    parts = (event.module or "the model or its loss", event.op, phase, short_source(event.source))
    return "   ".join(part for part in parts if part)


def _name(event: NonFinite) -> str:
    return event.op.split(".")[1] if event.op.count(".") else event.op


def _value_words(value: Value) -> str:
    parts = [f"{dtype_name(value.dtype)} {list(value.shape)}", f"largest {number(value.largest)}"]
    if not value.finite:
        parts[1] = _counts(value) + (f", others up to {number(value.largest)}" if value.largest else "")
    return "   ".join([*parts, *([value.name] if value.name else [])])


def _counts(value: Value) -> str:
    parts = [(value.nan, "NaN"), (value.infinite, "infinite")]
    counts = " and ".join(f"{count:,} {what}" for count, what in parts if count)
    return f"{counts} of {plural(value.elements, 'value')}"


def _arithmetic(event: NonFinite) -> str:
    entries, name = [number(entry) for entry in event.entries], _name(event).rstrip("_")
    sign = _INFIX.get(name)
    return f" {sign} ".join(entries) if sign and len(entries) == 2 else f"{name}({', '.join(entries)})"


def _expected(event: NonFinite) -> str:
    if event.cause == "range":
        dtype = event.result.dtype
        limit = f"at most {number(torch.finfo(dtype).max)}, the largest number of {dtype_name(dtype)}"
        if event.scale is None:
            return limit
        plain = number((event.exact or 0.0) / event.scale)
        return f"{limit}; without the loss scale of {number(event.scale)}, the value is {plain}"
    return _CAUSES[event.cause].get("expected", "finite numbers")


def _fix(event: NonFinite) -> str:
    rows, wide = _rows(event), event.result.dtype.itemsize > 2
    if event.cause == "range" or (event.cause == "inside" and wide):
        return _fix_of_range(event)
    if event.cause == "domain" and event.entries == (0.0, 0.0):
        return f"check {rows}: a mean over no labels (all labels are -100) is 0 / 0"
    return _CAUSES[event.cause]["fix"].format(rows=rows)


def _fix_of_range(event: NonFinite) -> str:
    dtype, exact = event.result.dtype, event.exact or 0.0
    if dtype != torch.float16:
        return f"the values have diverged: lower the learning rate, warm it up or clip the gradients; check {_rows(event)}"
    if event.scale is not None and exact / event.scale <= torch.finfo(dtype).max / 2:
        scale = 2.0 ** math.floor(math.log2(event.scale * torch.finfo(dtype).max / exact))
        return f"use a loss scale of {number(scale)} or less (GradScaler lowers its scale after an overflow)"
    if event.phase == "unscale":
        return "store the trained weights in float32, so that their gradients are float32"
    return "use bfloat16 if the device runs it, or float32"


def _rows(event: NonFinite) -> str:
    if not event.rows or event.batch == 1:
        return "the batch"
    if len(event.rows) == event.batch:
        return f"the batch, all {event.batch} rows"
    rows = [str(row) for row in event.rows]
    more = f" and {len(rows) - _ROWS_NAMED} more" if len(rows) > _ROWS_NAMED else ""
    return f"row{'s' if len(rows) > 1 else ''} {', '.join(rows[:_ROWS_NAMED])}{more} of the batch (of {event.batch}, counted from 0)"


def number(value: float) -> str:
    """Format a number, as in `71,680`, `0.0031` or `3.4e+38`."""
    if not math.isfinite(value):
        return str(value)
    if value == 0 or 1e-4 <= abs(value) < 1e7:
        return f"{value:,.0f}" if abs(value) >= 1000 or value == round(value) else f"{value:.4g}"
    return f"{value:.4g}"
