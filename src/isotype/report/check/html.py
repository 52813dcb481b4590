"""The report of a check as one self-contained HTML file.

The page's content security policy forbids external resources and all scripts except `check.js`. This script marks the
places of the finding that has the mouse pointer or the keyboard focus.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import PurePath

from isotype.contracts.contract import judged_by
from isotype.core.dtypes import dtype_name
from isotype.core.names import format_bytes, named, plural
from isotype.records.finding import Finding, Fix
from isotype.records.memory import MEMORY_KINDS, Memory
from isotype.records.reach import Reach
from isotype.records.trace import Operand
from isotype.report.check.cost import autocast_words, device_words, optimizer_words, sharding_words, time_rows
from isotype.report.check.map import Row, dtype_map, layer_counts
from isotype.report.check.record import Record
from isotype.report.check.text import (
    STATUS,
    cost_clauses,
    counts,
    elide,
    fix_scope,
    fold_places,
    next_steps,
    ranges_words,
    trust,
    verdict,
)
from isotype.report.html import axis, package_file, palette_css, render, stacked, stacked_areas
from isotype.report.text import format_duration, format_flops, format_share, short_source

Content = dict[str, object]

_ACTIONS_SHOWN = 3
_VALUE_SHOWN = 200
_ACTIONS = {
    "parameter": "parameter",
    "gradient": "gradient of",
    "buffer": "buffer",
    "output": "outputs of",
    "input": "inputs of",
    "state": "quantization state of",
    "compute": "compute dtype of",
    "boundary": "boundary of",
    "ranges": "boundaries by value ranges",
    "setting": "argument",
    "line": "line",
    "advice": "by hand:",
}


def to_html(report: Record) -> str:
    name = PurePath(report.trace.model).name or report.trace.model or "model"
    setup = report.trace.setup
    batch = ", ".join(f"{name} {' × '.join(map(str, shape))}" for name, shape in setup.batch.items())
    about = (device_words(setup), sharding_words(setup), f"{setup.optimizer} step", batch)
    css, word = ("failed", "✕ miswired") if report.miswired else STATUS[report.status]
    return render(
        "check.html.j2",
        style=package_file("style.css") + package_file("check/check.css") + palette_css(),
        script=package_file("check/check.js"),
        title=f"{name}: {word[2:]}",
        model_name=name,
        status={"css": css, "word": word},
        about=" · ".join(filter(None, about)),
        verdict=verdict(report),
        figures=_figures(report),
        findings=[_finding(number, finding, report) for number, finding in enumerate(report.findings, 1)],
        map=[_part(row, report.findings) for row in dtype_map(report.trace, report.findings)],
        reach=reach_picture(report.trace.reach),
        memory=_memory(report),
        work=_work(report),
        next_steps=next_steps(report),
        setup=_setup(report),
        policy=report.trace.setup.policy,
        trust=trust(report),
    )


def _figures(report: Record) -> list[tuple[str, str, str]]:
    memory = report.memory
    total = sum(report.flops.values())
    most = max(report.flops, key=lambda dtype: report.flops[dtype], default=None)
    share = "" if most is None else f"{format_share(report.flops[most] / total)} {dtype_name(most)}"
    setup = report.trace.setup
    capacity = "" if setup.limit.size is None else f"of {format_bytes(setup.limit.size)}"
    on_each = f"on each of {setup.devices}" if setup.devices > 1 else ""
    peak = format_bytes(memory.peak) if memory.peak else "not measured"
    severest, _, others = counts(report).partition(", ")
    return [
        ("Findings", severest or "none", others),
        ("Peak memory", peak, ", ".join(filter(None, (capacity, on_each)))),
        ("Work", format_flops(total), share),
        ("Operators", f"{report.operators:,}", "a step"),
        ("Checked in", format_duration(report.seconds), ""),
    ]


def _part(row: Row, findings: Sequence[Finding]) -> Content:
    number = [f"{row.count:,} in each layer"] if row.count > 1 else []
    number += [f"{row.layers:,} layers"] if row.layers > 1 else []
    about = (row.module_class, format_bytes(row.bytes) if row.bytes else "", *number)
    return {
        **vars(row),
        "name": named(row.name),
        "about": " · ".join(filter(None, about)),
        "standing": [word for word, true in (("trained", row.trainable), ("pinned", row.pinned)) if true],
        "findings": [(position + 1, findings[position]) for position in row.findings],
    }


def _unit(most: float) -> tuple[int, str]:
    """Return (size in bytes, name) of the unit of an axis that ends at `most` bytes."""
    units = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
    return next((unit for unit in units if most >= unit[0]), (1, "B"))


def _memory(report: Record) -> Content | None:
    """Return the template's data about memory: phases, an axis, kinds of tensors at the peak, and a timeline."""
    memory, capacity = report.memory, report.trace.setup.limit.size
    if not memory.peak:
        return None
    # A line for a limit far above the peak would squeeze the bars. Such a limit is only named.
    shown = capacity if capacity is not None and capacity <= 2.5 * memory.peak else None
    scale = 1.04 * max(memory.peak, shown or 0)
    peak = memory.phases[memory.peak_phase] if memory.peak_phase else {}
    size, unit = _unit(scale)
    rows = []
    for phase, kinds in memory.phases.items():
        total, parts = sum(kinds.values()), ((kind, kinds.get(kind, 0)) for kind in MEMORY_KINDS)
        over = shown is not None and total > shown
        rows.append((phase, stacked(parts, format_bytes, scale), over, format_bytes(total)))
    return {
        "limit": _limit_words(memory.peak, capacity, shown),
        "capacity": shown and shown / scale,
        "rows": rows,
        "ticks": axis(scale / size),
        "unit": unit,
        "peak_phase": memory.peak_phase,
        "kinds": [(kind, format_bytes(peak[kind])) for kind in MEMORY_KINDS if peak.get(kind)],
        "timeline": timeline(memory, shown),
    }


def _limit_words(peak: int, capacity: int | None, shown: int | None) -> str:
    if capacity is None:
        return "the size of this device's memory is unknown"
    if shown is None:
        return f"{format_share(peak / capacity)} of the {format_bytes(capacity)} that a step may use"
    return f"the dashed line marks the {format_bytes(capacity)} that a step may use"


def timeline(memory: Memory, capacity: int | None) -> Content | None:
    """Return the template's data for a chart of a step's memory, or None for fewer than two points."""
    points = memory.timeline
    if len(points) < 2:
        return None
    size, unit = _unit(memory.peak)
    high = 1.06 * max(capacity or 0, *(point.total for point in points)) / size
    kinds = (kind for kind in MEMORY_KINDS if any(point.kinds.get(kind) for point in points))
    areas = [(kind, [point.kinds.get(kind, 0) / size for point in points]) for kind in kinds]
    pairs, count = enumerate(pairwise(points), 1), len(points)
    starts = [0, *(at for at, (before, after) in pairs if before.phase != after.phase), count]
    return {
        "areas": stacked_areas(areas, high),
        "axis": axis(high, 4),
        "unit": unit,
        "limit": capacity and capacity / size / high,
        # A short range has no room for its name.
        "spans": [
            (start / count, points[start].phase if end - start >= count / 12 else "")
            for start, end in pairwise(starts)
        ],
    }


def _work(report: Record) -> Content | None:
    total, profile = sum(report.flops.values()), report.trace.setup.profile
    if not total:
        return None
    ranked, rates = sorted(report.flops.items(), key=lambda entry: -entry[1]), profile.rates
    rows = []
    for dtype, amount in ranked:
        shown = (dtype_name(dtype), format_share(amount / total), format_flops(amount))
        least = f"{format_duration(amount / rates[dtype])} at best" if dtype in rates else ""
        rows.append((*shown, least, profile.supports(dtype), profile.reason(dtype)))
    bar = stacked([(dtype_name(dtype), amount) for dtype, amount in ranked], format_flops, total)
    return {"total": f"{format_flops(total)} a step", "bar": bar, "rows": rows}


def _finding(number: int, finding: Finding, report: Record) -> Content:
    cost, title = finding.cost, report.trace.setup.profile.title
    return {
        **vars(finding),
        "number": number,
        "module": named(finding.module),
        "about": [part for part in (finding.op, finding.phase, short_source(finding.source)) if part],
        "operands": [(o.role, dtype_name(o.dtype), str(list(o.shape)), _origin(o)) for o in finding.operands],
        "cost": [] if cost is None else cost_clauses(cost, title),
        "places": _places(finding, report),
        "fixes": [_fix(fix) for fix in finding.fixes],
    }


def _origin(operand: Operand) -> str:
    origin = operand.origin
    at = short_source(origin.source)
    return " ".join(part for part in (origin.kind, origin.name, f"({at})" if at else "") if part)


def _places(finding: Finding, report: Record) -> Content | None:
    folded = fold_places(finding.places, layer_counts(report.trace))
    total = sum(count for _, _, count in folded)
    if total < 2:
        return None
    named = ((f"{within}.{part}".strip("."), count) for within, part, count in folded)
    rows = [(name, f"×{count:,}" if count > 1 else "") for name, count in named]
    return {"count": plural(total, "place"), "rows": rows}


def _fix(fix: Fix) -> Content:
    tags = [
        ("scope", fix_scope(fix)),
        (fix.safety, fix.safety),
        ("tried", "✓ verified") if fix.verified else ("untried", "not verified"),
    ]
    return {
        "description": fix.text,
        "outcome": fix.outcome,
        "tags": [(css, text) for css, text in tags if text],
        "actions": [(_ACTIONS[a.kind], a.target, elide(a.value, _VALUE_SHOWN)) for a in fix.actions],
        "folded": f"{len(fix.actions):,} changes" if len(fix.actions) > _ACTIONS_SHOWN else "",
    }


def _setup(report: Record) -> list[tuple[str, str]]:
    setup, profile = report.trace.setup, report.trace.setup.profile
    elsewhere = "" if profile.present else "; not in this machine"
    pairs = [
        ("model", report.trace.model),
        ("device", f"{profile.title} (profile {profile.name}{elsewhere})"),
        ("autocast", autocast_words(report.trace) or "off"),
        ("loss scaling", "GradScaler" if setup.scaler else "none"),
        ("optimizer", optimizer_words(setup)),
        ("compute dtype", dtype_name(setup.compute)),
        ("sharding", sharding_words(setup) or "none"),
        ("phases", ", ".join(setup.phases)),
        *((name, " × ".join(map(str, shape)) or "a scalar") for name, shape in setup.batch.items()),
        ("details", "; ".join(setup.details)),
        *time_rows(report),
        ("contracts", judged_by(profile)),
        ("value ranges", ranges_words(report)),
        ("device figures", profile.source),
    ]
    return [(name, value) for name, value in pairs if value]


SIDE = 14
"""Distance in pixels between neighboring squares in the picture of `reach_picture`."""


def reach_picture(reach: Reach | None) -> Content | None:
    """Return the template's data for a picture that shows which tokens affect each prediction; None without a matrix."""
    matrix = None if reach is None else reach.matrix
    if reach is None or matrix is None:
        return None
    causal = reach.labels is not None and reach.labels.shift == 1
    squares = []
    for line, (column, tokens) in enumerate(matrix.reached):
        for token in tokens:
            css = "seen" if not causal or matrix.allowed(column, token) else "wrong"
            words = f"token {token} affects the prediction after token {column}"
            squares.append((token * SIDE, line * SIDE, css, words))
    pairs = enumerate(pairwise(matrix.sequences), 1)
    borders = [token * SIDE for token, (before, after) in pairs if before != after]
    wrong = sum(css == "wrong" for _, _, css, _ in squares)
    return {
        "squares": squares,
        "borders": borders,
        "lines": [(line * SIDE, f"after {column}") for line, (column, _) in enumerate(matrix.reached)],
        "width": len(matrix.sequences) * SIDE,
        "height": len(matrix.reached) * SIDE,
        "about": f"row {matrix.row} of the batch, with a column for each of {len(matrix.sequences)} tokens and a line for each prediction",
        "words": f"{len(squares)} squares; in {wrong} of them, a token affects a prediction that it must not affect",
        "wrong": wrong,
    }
