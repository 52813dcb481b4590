"""A plan as a page: a table per device, and a chart of memory against tokens per second."""

from __future__ import annotations

from collections.abc import Sequence

from isotype.core import VERSION
from isotype.core.names import format_bytes
from isotype.planning.record import Device, Record, Row, front
from isotype.planning.text import cells_of, heads_of, lines_of, speed_of, title_of
from isotype.report.html import escape, nice_ticks, package_file, percent, render, tick_labels, value_axis

_GIB = 2**30
_MARGIN = 1.08

_STYLE = """
.scatter svg { width: 100%; height: 320px; overflow: visible; padding: 18px 20px 34px 64px; }
.scatter .point { fill: var(--soft); }
.scatter .point.best { fill: var(--main); }
.scatter .point.chosen { fill: var(--accent); }
.scatter .front { fill: none; stroke: var(--main); stroke-width: 1.5; vector-effect: non-scaling-stroke; }
.scatter text { fill: var(--muted); font-size: 11px; }
.scatter .grid { stroke: var(--grid); }
.scatter .capacity { stroke: var(--broken); stroke-dasharray: 4 3; }
table.rows { border-collapse: collapse; font-size: 12.5px; }
table.rows th, table.rows td { padding: 3px 12px 3px 0; text-align: left; white-space: nowrap; }
table.rows .short { color: var(--muted); }
table.rows .chosen { font-weight: 650; color: var(--accent); }
pre.command { margin-top: 12px; padding: 12px 16px; white-space: pre-wrap; overflow-wrap: anywhere; background: var(--panel); }
"""


def to_html(plan: Record) -> str:
    """Return one page that needs no other file."""
    return render(
        "plan.html.j2",
        title=f"isotype plan: {plan.model}",
        style=package_file("style.css") + _STYLE,
        script="",
        model=plan.model,
        method=plan.method,
        settings=plan.settings,
        devices=[_device(plan, device) for device in plan.devices],
        notes=[*plan.refused, *plan.notes],
        version=VERSION,
    )


def _device(plan: Record, device: Device) -> dict[str, object]:
    rows, chosen = device.rows, device.chosen
    heads = heads_of(rows)
    return {
        "title": title_of(plan, device),
        "room": f"a step may take {device.room}",
        "picture": picture(rows, chosen),
        "heads": heads,
        "rows": [
            {
                "css": "chosen" if row == chosen else "" if row.fits else "short",
                "cells": [cells_of(row, row == chosen)[head] for head in heads],
            }
            for row in rows
        ],
        "lines": list(lines_of(plan, device)),
        "command": "" if chosen is None else chosen.command_line,
    }


def picture(rows: Sequence[Row], chosen: Row | None) -> str:
    """Return an SVG of memory (x) against tokens per second (y); "" if no fitting row has an estimated time."""
    shown = [row for row in rows if row.fits and row.tokens_per_second]
    if not shown:
        return ""
    room = max((row.room or 0 for row in shown), default=0)
    wide = _MARGIN * max(room, *(row.peak for row in shown)) / _GIB
    high = _MARGIN * max(row.speed for row in shown)
    best = front(shown)
    line = "L".join(
        f"{1000 * row.peak / _GIB / wide:.1f} {1000 * (1 - row.speed / high):.1f}" for row in best
    )
    return (
        '<svg role="img" aria-label="memory against tokens a second">'
        f"{_axes(wide, high)}"
        f'<line class="capacity" x1="{percent(room / _GIB / wide)}" x2="{percent(room / _GIB / wide)}" y1="0" y2="100%"/>'
        '<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" width="100%" height="100%">'
        f'<path class="front" d="M{line}"/></svg>'
        f"{''.join(_point(row, wide, high, row in best, row == chosen) for row in shown)}</svg>"
    )


def _axes(wide: float, high: float) -> str:
    across = nice_ticks(0.0, wide, 6)
    return value_axis(high, 5, "/s") + "".join(
        f'<text x="{percent(tick / wide)}" y="100%" dy="1.4em" text-anchor="middle">{label} GiB</text>'
        for tick, label in zip(across, tick_labels(across), strict=True)
    )


def _point(row: Row, wide: float, high: float, best: bool, chosen: bool) -> str:
    css = "point" + " best" * best + " chosen" * chosen
    words = f"{row.storage}, checkpointing {row.checkpointing}, {row.rows} of {row.length:,}"
    words += f": {format_bytes(row.peak)}, {speed_of(row)} tokens/s"
    x, y = percent(row.peak / _GIB / wide), percent(1 - row.speed / high)
    name = f"{row.storage}{'' if row.checkpointing == 'off' else ' ✓'}"
    return (
        f'<circle class="{css}" cx="{x}" cy="{y}" r="5"><title>{escape(words)}</title></circle>'
        f'<text x="{x}" y="{y}" dx="8" dy="0.32em">{escape(name)}</text>'
    )
