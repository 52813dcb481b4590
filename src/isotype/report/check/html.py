"""A check as one HTML file that needs nothing else: no network, no font, no second file.

Its content security policy forbids every load from outside and every script but the small one below, which only
adds to what the page already shows: what the pointer or the focus is on, and the places of a finding.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from itertools import pairwise
from pathlib import PurePath

import torch

from isotype.core.dtypes import dtype_name
from isotype.core.names import plural
from isotype.precision.devices.profile import DeviceProfile
from isotype.report.charts import (
    Area,
    Part,
    Span,
    escape,
    format_number,
    nice_ticks,
    stacked_areas,
    stacked_bar,
    tick_labels,
)
from isotype.report.check.map import dtype_map, layer_counts
from isotype.report.check.map_html import map_html
from isotype.report.check.record import Record
from isotype.report.check.text import (
    counts,
    fix_scope,
    fold_places,
    format_count,
    format_share,
    next_steps,
    price_clauses,
    short_source,
    trust,
    verdict,
)
from isotype.report.html import pair_list
from isotype.report.palette import dtype_class, palette_css
from isotype.report.text import format_bytes, format_duration
from isotype.rules.finding import Action, Finding, Fix
from isotype.trace.record import MEMORY_KINDS, Memory, MemoryKind, Operand

_SCRIPT = """
"use strict";
const tip = document.createElement("div");
tip.className = "tip";
tip.setAttribute("role", "status");
tip.hidden = true;
document.body.append(tip);
const cells = [...document.querySelectorAll(".cell")];
const texts = new Map(cells.map((cell) => [cell, cell.title]));
const show = (cell) => {
  tip.textContent = texts.get(cell);
  tip.hidden = false;
  const at = cell.getBoundingClientRect(), box = tip.getBoundingClientRect(), wide = document.documentElement.clientWidth;
  const left = Math.max(8, Math.min(at.left + at.width / 2 - box.width / 2, wide - box.width - 8));
  const above = at.top - box.height - 10;
  tip.style.left = `${left}px`;
  tip.style.top = `${above > 8 ? above : at.bottom + 10}px`;
};
const hide = () => { tip.hidden = true; };
for (const cell of cells) {
  cell.removeAttribute("title");
  cell.addEventListener("pointerenter", () => show(cell));
  cell.addEventListener("pointerleave", hide);
  cell.addEventListener("focus", () => show(cell));
  cell.addEventListener("blur", hide);
}
addEventListener("scroll", hide, { passive: true });
addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
for (const table of document.querySelectorAll(".stack")) {
  const rows = [...table.tBodies[0].rows].map((row) => [...row.cells].map((at) => at.querySelector(".cell")));
  const all = rows.flat().filter(Boolean);
  const rove = (cell) => all.forEach((other) => { other.tabIndex = other === cell ? 0 : -1; });
  rove(all[0]);
  table.addEventListener("focusin", (event) => { if (texts.has(event.target)) rove(event.target); });
  table.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    let y = rows.findIndex((row) => row.includes(event.target));
    if (!step || y < 0) return;
    let x = rows[y].indexOf(event.target);
    do { y += step[0]; x += step[1]; } while (rows[y] && x >= 0 && x < rows[y].length && !rows[y][x]);
    rows[y]?.[x]?.focus();
    event.preventDefault();
  });
}
const map = document.querySelector(".map");
const seek = (number) => {
  map.classList.toggle("seeking", number !== "");
  for (const cell of cells) cell.classList.toggle("lit", cell.dataset.findings.split(" ").includes(number));
};
for (const entry of document.querySelectorAll(".index a")) {
  const number = entry.dataset.finding;
  if (!cells.some((cell) => cell.dataset.findings.split(" ").includes(number))) continue;
  for (const name of ["pointerenter", "focus"]) entry.addEventListener(name, () => seek(number));
  for (const name of ["pointerleave", "blur"]) entry.addEventListener(name, () => seek(""));
}
"""

_STATUS = {
    "fails": ("failed", "✕ fails"),
    "does not fit": ("failed", "✕ does not fit"),
    "unknown": ("interrupted", "? not known"),
    "costs": ("interrupted", "◐ runs at a price"),
    "clean": ("finished", "✓ runs clean"),
}
_MARK = (
    '<svg class="logo" viewBox="0 0 16 16" aria-hidden="true"><rect x="1" y="2" width="3" height="12"/>'
    '<rect x="6.5" y="2" width="3" height="12"/><rect x="12" y="2" width="3" height="12"/></svg>'
)
_ACTIONS_SHOWN = 3
_ACTIONS = {
    "parameter": "parameter",
    "gradient": "gradient of",
    "buffer": "buffer",
    "output": "outputs of",
    "input": "inputs of",
    "state": "quantization state of",
    "compute": "compute dtype of",
    "boundary": "border of",
    "setting": "argument",
    "line": "line",
    "advice": "by hand:",
}


def to_html(report: Record) -> str:
    """The whole report as one HTML document."""
    folder = resources.files("isotype.report")
    sheets = [folder.joinpath(name).read_text(encoding="utf-8") for name in ("style.css", "check/check.css")]
    style = "".join(sheets) + palette_css()
    sections = [
        _header(report),
        _index(report.findings),
        _map(report),
        _memory(report),
        _flops(report),
        _findings(report),
        _setup(report),
        _policy(report),
        _trust(report),
    ]
    body = "\n".join(section for section in sections if section)
    title = f"{_model_name(report)}: {_STATUS[report.status][1][2:]}"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src '{_digest(style)}'; \
script-src '{_digest(_SCRIPT)}'; base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="isotype">
<title>{escape(title)}</title>
<style>{style}</style>
</head>
<body class="check">
<main>
{body}
</main>
<footer>made by <b>isotype</b> on fake tensors: no weight was read and nothing was computed</footer>
<script>{_SCRIPT}</script>
</body>
</html>
"""


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


# --- head -------------------------------------------------------------------------------------------------


def _model_name(report: Record) -> str:
    return PurePath(report.trace.model).name or report.trace.model or "model"


def _header(report: Record) -> str:
    setup = report.trace.setup
    css, word = _STATUS[report.status]
    batch = ", ".join(f"{name} {' × '.join(map(str, shape))}" for name, shape in setup.batch.items())
    about = " · ".join(part for part in (setup.profile.title, f"{setup.optimizer} step", batch) if part)
    figures = "".join(_figure(*figure) for figure in _figures(report))
    return f"""<header>
<p class="eyebrow">{_MARK}isotype check</p>
<h1>{escape(_model_name(report))} <span class="badge {css}">{word}</span></h1>
<p class="about">{escape(about)}</p>
<p class="verdict {css}">{escape(verdict(report))}</p>
<dl class="figures">{figures}</dl>
</header>"""


def _figures(report: Record) -> list[tuple[str, str, str]]:
    memory, profile = report.memory, report.trace.setup.profile
    total = sum(report.flops.values())
    most = max(report.flops, key=lambda dtype: report.flops[dtype], default=None)
    share = "" if most is None else f"{format_share(report.flops[most] / total)} {dtype_name(most)}"
    capacity = f"of {format_bytes(profile.memory_bytes)}" if profile.memory_bytes else "capacity not known"
    return [
        ("Findings", counts(report).split(",")[0] or "none", ", ".join(counts(report).split(", ")[1:])),
        ("Peak memory", format_bytes(memory.peak) if memory.peak else "not measured", capacity),
        ("Work", format_count(total), share),
        ("Operators", f"{sum(call.repeats for call in report.trace.calls):,}", "a step"),
        ("Checked in", _duration(report.seconds), "fake tensors"),
    ]


def _figure(name: str, value: str, remark: str) -> str:
    small = f" <small>{escape(remark)}</small>" if remark else ""
    return f"<div><dt>{escape(name)}</dt><dd>{escape(value)}{small}</dd></div>"


def _index(findings: Sequence[Finding]) -> str:
    items = "".join(
        f'<li><a href="#finding-{number}" data-finding="{number}"><b class="mark is-{finding.severity}">{number}</b>'
        f"<span>{escape(finding.message)}</span><code>{escape(finding.code)}</code></a></li>"
        for number, finding in enumerate(findings, 1)
    )
    return f'<ol class="index">{items}</ol>' if items else ""


def _section(title: str, body: str, remark: str = "") -> str:
    small = f" <small>{escape(remark)}</small>" if remark else ""
    return f"<section><h2>{escape(title)}{small}</h2>{body}</section>"


def _map(report: Record) -> str:
    blocks = dtype_map(report.trace, report.findings)
    if not blocks:
        return _section(
            "Dtypes of the model", '<p>No weight and no product was seen.</p><div class="map"></div>'
        )
    return _section("Dtypes of the model", map_html(blocks, report.findings), "in order of execution")


# --- memory and work --------------------------------------------------------------------------------------


def _memory(report: Record) -> str:
    memory, capacity = report.memory, report.trace.setup.profile.memory_bytes
    if not memory.peak:
        return ""
    # A capacity far above the peak would squeeze the bars; it is then said in words.
    shown = capacity if capacity is not None and capacity <= 2.5 * memory.peak else None
    scale = 1.04 * max(memory.peak, shown or 0)
    bars = "".join(
        _memory_row(phase, kinds, scale, shown, phase == memory.peak_phase)
        for phase, kinds in memory.phases.items()
    )
    peak = memory.phases[memory.peak_phase] if memory.peak_phase else {}
    keys = "".join(
        f'<li class="kind kind-{kind}">{kind}<small>{format_bytes(peak[kind])}</small></li>'
        for kind in MEMORY_KINDS
        if peak.get(kind)
    )
    if capacity is None:
        limit = "the size of this device's memory is not known"
    elif shown is None:
        limit = f"{format_share(memory.peak / capacity)} of {format_bytes(capacity)}"
    else:
        limit = f"the line is the device's {format_bytes(capacity)}"
    ticks = _memory_ticks(scale)
    return _section(
        "Memory at the worst moment of each phase",
        f'<div class="memory">{bars}{ticks}</div><ul class="kinds"><li>at the peak, {escape(str(memory.peak_phase))}:</li>{keys}</ul>'
        f"{_timeline(memory, shown)}",
        limit,
    )


def _memory_ticks(scale: float) -> str:
    """The axis under the bars, in the unit that suits the largest."""
    size, unit = next((size, unit) for size, unit in _UNITS if scale >= size)
    ticks = nice_ticks(0.0, scale / size, 5)
    marks = "".join(
        f'<text class="tick" x="{100 * tick * size / scale:.2f}%" y="11" text-anchor="middle">{label}</text>'
        for tick, label in zip(ticks, tick_labels(ticks), strict=True)
    )
    return f'<div class="ticks"><span></span><svg class="ticks" aria-hidden="true">{marks}</svg><b>{unit}</b></div>'


_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))


def _timeline(memory: Memory, capacity: int | None) -> str:
    """Memory by kind from the beginning of the step to its end."""
    points = memory.timeline
    if len(points) < 2:
        return ""
    size, unit = next((size, unit) for size, unit in _UNITS if memory.peak >= size)
    areas = [
        Area(kind, tuple(point.kinds.get(kind, 0) / size for point in points), f"kind-{kind}")
        for kind in MEMORY_KINDS
        if any(point.kinds.get(kind) for point in points)
    ]
    starts = [
        0,
        *(at for at, (before, after) in enumerate(pairwise(points), 1) if before.phase != after.phase),
    ]
    spans = [Span(points[at].phase, at) for at in starts]
    picture = stacked_areas("memory by kind along the step", areas, spans, unit, capacity and capacity / size)
    return f'<figure class="timeline"><figcaption>along the step, by kind</figcaption>{picture}</figure>'


def _memory_row(
    phase: str, kinds: Mapping[MemoryKind, int], scale: float, capacity: int | None, peak: bool
) -> str:
    total, left, rects = sum(kinds.values()), 0.0, []
    for kind in MEMORY_KINDS:
        amount = kinds.get(kind, 0)
        if amount:
            text = escape(f"{phase}: {kind} {format_bytes(amount)}")
            rects.append(
                f'<rect class="part kind-{kind}" x="{100 * left / scale:.2f}%" width="{100 * amount / scale:.2f}%" '
                f'height="100%"><title>{text}</title></rect>'
            )
            left += amount
    if capacity is not None:
        at = f"{100 * capacity / scale:.2f}%"
        rects.append(f'<line class="capacity" x1="{at}" x2="{at}" y1="-5" y2="27"/>')
    over = " over" if capacity is not None and total > capacity else ""
    words = "; ".join(f"{kind} {format_bytes(amount)}" for kind, amount in kinds.items())
    return (
        f'<div class="{"peak" if peak else ""}{over}"><span>{escape(phase)}</span>'
        f'<svg class="bar" role="img" aria-label="{escape(f"{phase}: {words}")}">{"".join(rects)}</svg>'
        f"<b>{format_bytes(total)}</b></div>"
    )


def _flops(report: Record) -> str:
    total, profile = sum(report.flops.values()), report.trace.setup.profile
    if not total:
        return ""
    ranked = sorted(report.flops.items(), key=lambda entry: -entry[1])
    parts = [Part(dtype_name(dtype), amount, dtype_class(dtype_name(dtype))) for dtype, amount in ranked]
    rows = "".join(
        f'<tr><th scope="row">{_chip(dtype_name(dtype))}</th><td class="number">{format_share(amount / total)}</td>'
        f'<td class="number">{format_count(amount)}</td><td class="number">{_at_best(amount, dtype, profile)}</td>'
        f'<td class="support {profile.supports(dtype)}">{escape(profile.reason(dtype))}</td></tr>'
        for dtype, amount in ranked
    )
    bar = stacked_bar("FLOPs of a step by dtype", parts, format_count)
    return _section(
        "Work by dtype",
        f'{bar}<table class="work"><tbody>{rows}</tbody></table>',
        f"{format_count(total)} a step",
    )


def _at_best(flops: int, dtype: torch.dtype, profile: DeviceProfile) -> str:
    """How long the products would take at the device's peak rate: a bound from below, to compare dtypes by."""
    rate = profile.peak_flops.get(dtype)
    return "" if rate is None else f"{_duration(flops / rate)} at best"


def _duration(seconds: float) -> str:
    return format_duration(seconds) if seconds >= 1 else f"{format_number(1000 * seconds, 3)} ms"


def _chip(dtype: str) -> str:
    return f'<span class="chip {dtype_class(dtype)}">{escape(dtype)}</span>'


# --- findings ---------------------------------------------------------------------------------------------


def _findings(report: Record) -> str:
    if not report.findings:
        return ""
    articles = "".join(_finding(number, finding, report) for number, finding in enumerate(report.findings, 1))
    return _section("Findings", f"{articles}{pair_list(next_steps(report), 'pairs next')}")


def _finding(number: int, finding: Finding, report: Record) -> str:
    title = report.trace.setup.profile.title
    place = [finding.op, finding.phase, short_source(finding.source)]
    about = "".join(f"<span>{escape(part)}</span>" for part in place if part)
    price = price_clauses(finding.price, title) if finding.price is not None else []
    rows = [
        ("cause", f"<p>{escape(finding.cause)}</p>" if finding.cause else ""),
        ("way", _list(finding.evidence, "way")),
        ("price", _list(price, "price")),
        ("note", _list(finding.notes, "plain")),
        ("where", _places(finding, report)),
        ("help", "".join(_fix(fix) for fix in finding.fixes)),
    ]
    body = "".join(f"<div><dt>{label}</dt><dd>{value}</dd></div>" for label, value in rows if value)
    return (
        f'<article class="finding is-{finding.severity}" id="finding-{number}"><h3><b class="mark is-{finding.severity}">{number}'
        f"</b><span>{escape(finding.message)}</span><code>{escape(finding.code)}</code></h3>"
        f'<p class="place"><code>{escape(finding.module or "the model")}</code>{about}</p>'
        f'{_operands(finding.operands)}<dl class="facts">{body}</dl></article>'
    )


def _operands(operands: Sequence[Operand]) -> str:
    rows = "".join(
        f'<tr><th scope="row"><code>{escape(operand.role)}</code></th><td>{_chip(dtype_name(operand.dtype))}</td>'
        f"<td><code>{escape(str(list(operand.shape)))}</code></td><td>{escape(_maker(operand))}</td></tr>"
        for operand in operands
    )
    columns = ("operand", "dtype", "shape", "where its dtype comes from")
    head = "".join(f'<th scope="col">{column}</th>' for column in columns)
    table = f'<table class="operands"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
    return f'<div class="scroll">{table}</div>' if rows else ""


def _maker(operand: Operand) -> str:
    origin = operand.origin
    at = short_source(origin.source)
    return " ".join(part for part in (origin.kind, origin.name, f"({at})" if at else "") if part)


def _list(texts: Iterable[str], css: str) -> str:
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f'<ul class="{css}">{items}</ul>' if items else ""


def _places(finding: Finding, report: Record) -> str:
    folded = fold_places(finding.places, layer_counts(report.trace))
    total = sum(count for _, _, count in folded)
    if total < 2:
        return ""
    items = "".join(
        f"<li><code>{escape('.'.join(filter(None, (within, part))))}</code>"
        f"{f'<small>×{count:,}</small>' if count > 1 else ''}</li>"
        for within, part, count in folded
    )
    return f'<details><summary>{plural(total, "place")}</summary><ul class="plain">{items}</ul></details>'


def _fix(fix: Fix) -> str:
    tags = [
        ("scope", fix_scope(fix)),
        (fix.safety, fix.safety),
        ("tried", "✓ verified") if fix.verified else ("untried", "not verified"),
    ]
    shown = "".join(f'<span class="tag {css}">{escape(text)}</span>' for css, text in tags if text)
    return (
        f'<div class="fix"><p>{escape(fix.description)} {shown}</p>'
        + (f'<p class="outcome">{escape(fix.outcome)}</p>' if fix.outcome else "")
        + _actions(fix.actions)
        + "</div>"
    )


def _actions(actions: Sequence[Action]) -> str:
    items = "".join(f"<li>{_action(action)}</li>" for action in actions)
    body = f'<ul class="plain actions">{items}</ul>' if items else ""
    if len(actions) <= _ACTIONS_SHOWN:
        return body
    return f"<details><summary>{len(actions):,} changes</summary>{body}</details>"


def _action(action: Action) -> str:
    target, value = f"<code>{escape(action.target)}</code>", f"<code>{escape(action.value)}</code>"
    return f"{_ACTIONS[action.kind]} {target} → {value}"


# --- tables -----------------------------------------------------------------------------------------------


def _setup(report: Record) -> str:
    setup, profile = report.trace.setup, report.trace.setup.profile
    rate = "" if setup.learning_rate is None else f", learning rate {setup.learning_rate:g}"
    here = "" if profile.present else "; not in this machine"
    pairs = [
        ("model", report.trace.model),
        ("device", f"{profile.title} (profile {profile.name}{here})"),
        ("autocast", dtype_name(setup.autocast) if setup.autocast else "off"),
        ("loss scaling", "GradScaler" if setup.scaler else "none"),
        ("optimizer", f"{setup.optimizer}{rate}"),
        ("compute dtype", dtype_name(setup.compute)),
        ("sharding", f"FSDP{setup.fsdp}" if setup.fsdp else "none"),
        ("phases", ", ".join(setup.phases)),
        *((name, " × ".join(map(str, shape)) or "a scalar") for name, shape in setup.batch.items()),
        ("device figures", profile.source),
    ]
    return _section("Set-up", pair_list((name, value) for name, value in pairs if value))


def _policy(report: Record) -> str:
    policy = report.trace.setup.policy
    if policy is None:
        return ""
    rows = "".join(
        f'<tr><th scope="row">{escape(role)}</th><td>{_chip(dtype)}</td><td>{escape(reason)}</td></tr>'
        for role, dtype, reason in policy.rows()
    )
    head = '<thead><tr><th scope="col">Role</th><th scope="col">Dtype</th><th scope="col">Reason</th></tr></thead>'
    table = f'<div class="scroll"><table class="policy">{head}<tbody>{rows}</tbody></table></div>'
    return _section("Precision policy", table + _list(policy.warnings, "warnings"))


def _trust(report: Record) -> str:
    rows = pair_list(trust(report))
    return _section("Taken on trust, or not seen", rows) if rows else ""
