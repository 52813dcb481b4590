"""A run report as one HTML file that needs nothing else: no network, no script, no font, no second file.

Its content security policy forbids every load from outside and every script but the small one below, which only
adds to what the page already shows: one cross-hair through all charts, and a button that copies the command.
"""

from __future__ import annotations

import base64
import hashlib
import math
import statistics
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import PurePath

from isotype.report.charts import (
    Chart,
    Column,
    Part,
    Series,
    columns,
    escape,
    format_number,
    line_chart,
    smooth,
    stacked_bar,
)
from isotype.report.palette import dtype_class, palette_css
from isotype.report.run import (
    JSON_NAME,
    PolicyRow,
    RunRecord,
    RunSummary,
    Sample,
    format_loss,
    loss_sentences,
    parse_time,
    summarize,
    tokens_per_second,
)

_SCRIPT = """
"use strict";
const plots = [...document.querySelectorAll(".chart")].map((chart) => ({
  hits: [...chart.querySelectorAll(".hit")].map((hit) => {
    const title = hit.querySelector("title");
    const text = title.textContent;
    title.remove();
    return { hit, text };
  }),
  readout: chart.querySelector(".readout"),
  rest: chart.querySelector(".readout").textContent,
}));
let current = -1;
const point = (index) => {
  if (index === current) return;
  for (const { hits, readout, rest } of plots) {
    hits[current]?.hit.classList.remove("on");
    hits[index]?.hit.classList.add("on");
    readout.textContent = hits[index]?.text ?? rest;
  }
  current = index;
};
for (const { hits } of plots) hits.forEach(({ hit }, index) => {
  hit.addEventListener("pointerenter", () => point(index));
  hit.addEventListener("pointerleave", () => point(-1));
});
if (navigator.clipboard) for (const block of document.querySelectorAll(".command")) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "copy";
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(block.querySelector("code").textContent);
    button.textContent = "copied";
    setTimeout(() => { button.textContent = "copy"; }, 1500);
  });
  block.append(button);
}
"""

_MEMORY = (
    "Peak memory is the most that was in use during a step. On a GPU it is what torch had allocated there; on a CPU "
    "it is the resident size of the process, sampled every 20 ms, so shorter peaks can be missed. Loading, "
    "evaluation and saving are not in it."
)

_STATUS = {"finished": "✓ finished", "interrupted": "◐ interrupted", "failed": "✕ failed"}


def to_html(record: RunRecord) -> str:
    """The whole report as one HTML document."""
    style = (
        resources.files("isotype.report").joinpath("style.css").read_text(encoding="utf-8") + palette_css()
    )
    summary = summarize(record)
    sections = [
        _header(record, summary),
        _sentences(record),
        _samples(record.samples),
        _charts(record, summary),
        _policy(record.policy),
        _warnings(record.warnings),
        _weights(record),
        '<div class="columns">',
        _pairs("Settings", [*_places(record), *record.settings]),
        _pairs("Versions", record.versions),
        "</div>",
        _section(
            "Command",
            f'<div class="command"><pre tabindex="0"><code>{escape(record.command)}</code></pre></div>',
        ),
        _notes([*record.notes, *([] if summary.peak_memory_bytes is None else [_MEMORY])]),
    ]
    body = "\n".join(section for section in sections if section)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src '{_digest(style)}'; \
script-src '{_digest(_SCRIPT)}'; base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="isotype">
<title>{escape(f"{record.method} {_model_name(record)}: {record.status}")}</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
<footer>made by <b>isotype</b> · the numbers behind this page are in <code>{JSON_NAME}</code></footer>
<script>{_SCRIPT}</script>
</body>
</html>
"""


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


# --- head -------------------------------------------------------------------------------------------------


def _header(record: RunRecord, summary: RunSummary) -> str:
    error = ""
    if record.error is not None:
        error = (
            f'<div class="error" role="alert"><h2>What stopped it</h2><pre>{escape(record.error)}</pre></div>'
        )
    started = parse_time(record.started)
    when = f'<time datetime="{escape(record.started)}">{started:%Y-%m-%d %H:%M %Z}</time>'
    resumed = "" if record.resumed_from is None else f" · resumed from step {record.resumed_from:,}"
    return f"""<header>
<p class="eyebrow">{_MARK}isotype run report</p>
<h1><span class="method">{escape(record.method.upper())}</span> {escape(_model_name(record))}
<span class="badge {record.status}">{_STATUS[record.status]}</span></h1>
<p class="about">{escape(PurePath(record.dataset).name or record.dataset)} · {escape(record.device)} · {when}{resumed}</p>
{error}<dl class="figures">{"".join(_figure(*figure) for figure in _figures(record, summary))}</dl>
</header>"""


_MARK = (
    '<svg class="logo" viewBox="0 0 16 16" aria-hidden="true"><rect x="1" y="2" width="3" height="12"/>'
    '<rect x="6.5" y="2" width="3" height="12"/><rect x="12" y="2" width="3" height="12"/></svg>'
)


def _model_name(record: RunRecord) -> str:
    return PurePath(record.model).name or record.model


def _figures(record: RunRecord, summary: RunSummary) -> list[tuple[str, str, str]]:
    """Name, value and a small remark of each number in the summary line."""
    skipped = f"{summary.skipped:,} skipped" if summary.skipped else ""
    final = "not measured" if summary.final_loss is None else format_loss(summary.final_loss)
    mean = f"mean of the last {summary.window}" if summary.window > 1 else ""
    rate, peak = summary.tokens_per_second, summary.peak_memory_bytes
    return [
        ("Steps", f"{summary.steps:,}", skipped),
        ("Time", format_duration(summary.seconds), "" if record.finished else "in steps"),
        ("Final loss", final, mean if summary.final_loss is not None else ""),
        (
            "Tokens/s",
            "not measured" if rate is None else format_number(rate, 3),
            "" if rate is None else "median",
        ),
        (
            "Peak memory",
            "not measured" if peak is None else format_bytes(peak),
            "" if peak is None else "in a step",
        ),
    ]


def _figure(name: str, value: str, remark: str) -> str:
    small = f" <small>{escape(remark)}</small>" if remark else ""
    return f"<div><dt>{escape(name)}</dt><dd>{escape(value)}{small}</dd></div>"


def _sentences(record: RunRecord) -> str:
    paragraphs = [
        "".join(f"<b>{escape(piece)}</b>" if i % 2 else escape(piece) for i, piece in enumerate(pieces))
        for pieces in loss_sentences(record)
    ]
    return f'<div class="sentences">{"".join(f"<p>{text}</p>" for text in paragraphs)}</div>'


def _samples(samples: Sequence[Sample]) -> str:
    if not samples:
        return ""
    first, *others = (_sample(sample) for sample in samples)
    more = f"<details><summary>{len(others)} more</summary>{''.join(others)}</details>" if others else ""
    compared = samples[0].before is not None and samples[0].after is not None
    return _section("A sample question, before and after" if compared else "A sample question", first + more)


def _sample(sample: Sample) -> str:
    answers = [("Before", "before", sample.before), ("After", "after", sample.after)]
    cells = [
        f'<div class="answer {kind}"><h3>{name}</h3><p dir="auto">{escape(text)}</p></div>'
        for name, kind, text in answers
        if text is not None
    ]
    reference = ""
    if sample.reference is not None:
        reference = f'<p class="reference" dir="auto"><b>Reference</b> {escape(sample.reference)}</p>'
    body = f'<div class="answers">{"".join(cells)}</div>' if cells else ""
    return f'<article class="sample"><p class="question" dir="auto">{escape(sample.question)}</p>{body}{reference}</article>'


# --- charts -----------------------------------------------------------------------------------------------


def _charts(record: RunRecord, summary: RunSummary) -> str:
    if not record.steps and not record.evals:
        return ""
    over = columns([step.step for step in record.steps] + [held.step for held in record.evals])
    others = [
        figure
        for figure in (
            _rate(record),
            _norm(record),
            _speed(record, summary),
            _memory(record, summary),
            _scale(record),
        )
        if figure
    ]
    drawn = "".join(_chart(chart, remark, over) for chart, remark in others)
    return _section("Curves", _loss_chart(record, over) + f'<div class="charts">{drawn}</div>')


def _loss_chart(record: RunRecord, over: Sequence[Column]) -> str:
    steps, losses = _over(record), tuple(step.loss for step in record.steps)
    window = max(3, min(101, len(losses) // 12)) | 1
    held = Series(
        "held-back",
        tuple(float(e.step) for e in record.evals),
        tuple(e.loss for e in record.evals),
        "diamonds",
        "accent",
    )
    series = [
        Series("training", steps, losses, "dots", "soft"),
        Series("smoothed", steps, smooth(losses, window)),
    ]
    chart = Chart("Loss", (*series, *([held] if record.evals else [])), number=format_loss, intervals=(8, 6))
    keys = [("dot soft", "training step"), ("rule main", f"smoothed over {window} steps")]
    keys += [("diamond accent", "held-back")] if record.evals else []
    keys += [("block broken", "not finite")] if not all(map(math.isfinite, losses)) else []
    legend = "".join(f'<span class="key {kind}">{text}</span>' for kind, text in keys)
    return _chart(chart, f"step {record.steps[-1].step:,}" if record.steps else "", over, legend, "wide")


def _chart(chart: Chart, remark: str, over: Sequence[Column], legend: str = "", size: str = "") -> str:
    return (
        f'<figure class="chart {size}"><figcaption><b>{escape(chart.title)}</b>{legend}'
        f'<span class="readout">{escape(remark)}</span></figcaption>{line_chart(chart, over)}</figure>'
    )


def _over(record: RunRecord) -> tuple[float, ...]:
    return tuple(float(step.step) for step in record.steps)


_Titled = tuple[Chart, str]


def _rate(record: RunRecord) -> _Titled | None:
    rates = tuple(step.learning_rate for step in record.steps)
    if not rates:
        return None
    series = Series("learning rate", _over(record), rates, "area")
    return Chart("Learning rate", (series,), zero=True), f"peak {format_number(max(rates), 3)}"


def _norm(record: RunRecord) -> _Titled | None:
    norms = tuple(step.grad_norm for step in record.steps)
    finite = [norm for norm in norms if norm is not None and math.isfinite(norm)]
    if all(norm is None for norm in norms):
        return None
    remark = f"median {format_number(statistics.median(finite), 3)}" if finite else "never finite"
    series = Series("gradient norm", _over(record), norms)
    return Chart("Gradient norm before clipping", (series,), zero=True), remark


def _speed(record: RunRecord, summary: RunSummary) -> _Titled | None:
    if summary.tokens_per_second is None:
        return None
    series = Series("tokens/s", _over(record), tuple(tokens_per_second(step) for step in record.steps))
    median = summary.tokens_per_second
    return Chart(
        "Tokens per second", (series,), zero=True, reference=median
    ), f"median {format_number(median, 3)}"


def _memory(record: RunRecord, summary: RunSummary) -> _Titled | None:
    if summary.peak_memory_bytes is None:
        return None
    gib = tuple(step.memory_bytes / 2**30 or None for step in record.steps)
    series = Series("memory", _over(record), gib, "area")
    chart = Chart(
        "Peak memory of a step, GiB",
        (series,),
        zero=True,
        number=lambda value: f"{format_number(value, 3)} GiB",
    )
    return chart, f"peak {format_bytes(summary.peak_memory_bytes)}"


def _scale(record: RunRecord) -> _Titled | None:
    scales = [step.loss_scale for step in record.steps]
    if all(scale is None for scale in scales):
        return None
    # A scale that is not positive has no exponent; it shows as a value that is not finite.
    exponents = tuple(None if s is None else math.log2(s) if s > 0 else math.nan for s in scales)
    skipped = tuple(float(step.step) for step in record.steps if step.skipped)
    series = Series("scale", _over(record), exponents, "stairs")
    chart = Chart(
        "Loss scale",
        (series,),
        powers_of_two=True,
        marked_steps=skipped,
        marked_label="step skipped",
        number=_power,
    )
    return chart, f"{len(skipped):,} {'step' if len(skipped) == 1 else 'steps'} skipped"


def _power(exponent: float) -> str:
    if not math.isfinite(exponent):
        return format_number(exponent)
    # log2 of the largest floats rounds up to 1024, which has no power in a float.
    scale = 2.0 ** min(exponent, 1023.0)
    return f"{scale:,.0f}" if 1 <= scale < 1e9 else format_number(scale)


# --- tables -----------------------------------------------------------------------------------------------


def _policy(policy: Sequence[PolicyRow]) -> str:
    rows = "".join(
        f'<tr><th scope="row">{escape(row.role)}</th><td>{_chip(row.dtype)}</td><td>{escape(row.reason)}</td></tr>'
        for row in policy
    )
    head = '<thead><tr><th scope="col">Role</th><th scope="col">Dtype</th><th scope="col">Reason</th></tr></thead>'
    table = f'<div class="scroll"><table class="policy">{head}<tbody>{rows}</tbody></table></div>'
    return _section("Precision policy", table) if policy else ""


def _chip(dtype: str) -> str:
    return f'<span class="chip {dtype_class(dtype)}">{escape(dtype)}</span>'


def _warnings(warnings: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(warning)}</li>" for warning in warnings)
    return _section(f"Warnings ({len(warnings)})", f'<ul class="warnings">{items}</ul>') if warnings else ""


def _weights(record: RunRecord) -> str:
    if not record.weight_bytes:
        return ""
    total = sum(amount for _, amount in record.weight_bytes)
    parts = [Part(name, amount, dtype_class(name)) for name, amount in record.weight_bytes]
    bar = stacked_bar("Weights by storage dtype", parts, lambda amount: format_bytes(int(amount)))
    rows = "".join(
        f'<tr><th scope="row">{_chip(name)}</th><td class="number">{format_bytes(amount)}</td>'
        f'<td class="number">{amount:,} B</td><td class="number">{_share(amount, total)}</td></tr>'
        for name, amount in record.weight_bytes
    )
    trained = (
        f"<p>{record.parameters_trainable:,} of {record.parameters_total:,} parameters were trained "
        f"({_share(record.parameters_trainable, record.parameters_total)}); "
        f"the weights take {format_bytes(total)}.</p>"
    )
    head = (
        '<thead class="unseen"><tr><th scope="col">Dtype</th><th scope="col">Size</th>'
        '<th scope="col">Bytes</th><th scope="col">Share</th></tr></thead>'
    )
    table = f'<div class="scroll"><table class="weights">{head}<tbody>{rows}</tbody></table></div>'
    return _section("Weights by storage dtype", trained + bar + table)


def _places(record: RunRecord) -> list[tuple[str, str]]:
    return [("model", record.model), ("dataset", record.dataset), ("output directory", record.output_dir)]


def _pairs(title: str, pairs: Iterable[tuple[str, str]]) -> str:
    rows = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in pairs)
    return _section(title, f'<dl class="pairs">{rows}</dl>') if rows else ""


def _notes(notes: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return _section("Notes", f'<ul class="notes">{items}</ul>') if notes else ""


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


# --- numbers as text --------------------------------------------------------------------------------------


def format_bytes(amount: int) -> str:
    """`512 B`, `1.50 KiB`, `34.5 MiB`, `1.84 GiB`."""
    value, unit = float(amount), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            break
        value /= 1024
    return (
        f"{amount:,} B"
        if unit == "B"
        else f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"
    )


def format_duration(seconds: float) -> str:
    """`0.84 s`, `12.3 s`, `4 min 05 s`, `2 h 07 min`, `3 d 04 h`."""
    if not math.isfinite(seconds) or seconds < 60:
        return f"{format_number(seconds, 3)} s"
    units = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    whole = round(seconds)
    i = next(i for i, (_, size) in enumerate(units) if whole >= size)
    (large, size), (small, part) = units[i], units[i + 1]
    return f"{whole // size:,} {large} {whole % size // part:02d} {small}"


def _share(part: int, whole: int) -> str:
    return f"{format_number(100 * part / whole, 3)} %" if whole else "no share"
