"""A run report as one HTML file that needs nothing else: no network, no font, no second file.

Its content security policy forbids every load from outside and every script but the two it carries: uPlot, and
`run.js`, which draws the curves with it.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import PurePath

from isotype.report.charts import Part, escape, format_number, stacked_bar
from isotype.report.html import pair_list
from isotype.report.palette import dtype_class, palette_css
from isotype.report.run.charts import Chart, charts_of, in_words, page_data
from isotype.report.run.record import (
    JSON_NAME,
    DataSummary,
    PolicyRow,
    RunRecord,
    RunSummary,
    Sample,
    format_loss,
    loss_sentences,
    parse_time,
    summarize,
)
from isotype.report.text import format_bytes, format_count, format_duration, format_share

_MEMORY = (
    "Peak memory is the most that was in use during a step. On a GPU it is what torch had allocated there; on a CPU "
    "it is the resident size of the process, sampled every 20 ms, so shorter peaks can be missed. Loading, "
    "evaluation and saving are not in it."
)

_STATUS = {
    "running": "▶ running",
    "finished": "✓ finished",
    "interrupted": "◐ interrupted",
    "failed": "✕ failed",
}


def to_html(record: RunRecord) -> str:
    """The whole report as one HTML document."""
    style = _file("run/vendor/uplot/uPlot.min.css") + _file("style.css") + palette_css()
    summary, charts = summarize(record), charts_of(record)
    data, script = _curves(record, charts) if charts else ("", _file("copy.js"))
    sections = [
        _header(record, summary),
        _sentences(record),
        _samples(record.samples),
        _charts(record, charts),
        _policy(record.policy),
        _warnings(record.warnings),
        _weights(record),
        '<div class="columns">',
        _section("Settings", pair_list([*_places(record), *_data(record.data), *record.settings])),
        _section("Versions", pair_list(record.versions)) if record.versions else "",
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
script-src '{_digest(script)}'; base-uri 'none'; form-action 'none'">
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
{data}<script>{script}</script>
</body>
</html>
"""


def _curves(record: RunRecord, charts: Sequence[Chart]) -> tuple[str, str]:
    """The data of the curves as an element, and the script that draws them."""
    # The first line of uPlot names a web address; its licence lies beside it in the package.
    library = _file("run/vendor/uplot/uPlot.iife.min.js").partition("*/")[2]
    parts = [
        "/* uPlot 1.6.32, (c) Leon Sorokin, MIT licence */",
        library,
        _file("run/run.js"),
        _file("copy.js"),
    ]
    data = page_data(record, charts)
    return f'<script type="application/json" id="run-data">{data}</script>\n', "\n".join(parts)


@cache
def _file(name: str) -> str:
    return resources.files("isotype.report").joinpath(name).read_text(encoding="utf-8")


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
    epochs = "" if record.data is None else f"{format_number(record.data.epochs, 3)} epochs"
    steps = ", ".join(filter(None, (epochs, skipped)))
    return [
        ("Steps", f"{summary.steps:,}", steps),
        ("Tokens", format_count(summary.tokens) if summary.tokens else "not measured", ""),
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

_CONTROLS = """<div class="controls">
<label>over <select id="axis"><option value="step">steps</option><option value="tokens">tokens</option>\
<option value="minutes">time</option></select></label>
<label>smoothing <input id="smoothing" type="range" min="0" max="50" value="0" \
title="leftmost: fitted to the run's length"></label>
<label title="a single spike does not stretch an axis unless this is ticked">\
<input id="all-values" type="checkbox"> stretch axes to every value</label>
<button type="button" id="csv">CSV</button>
<label class="file">lay another run over it <input id="compare" type="file" accept=".json" \
title="the run_report.json of the other run"></label><span id="compared"></span>
<button type="button" id="reset-zoom" hidden>reset zoom</button>
<small>drag over a chart to zoom, double-click to reset</small>
</div>"""


def _charts(record: RunRecord, charts: Sequence[Chart]) -> str:
    if not charts:
        return ""
    first, *others = (_chart(chart, record, "wide" if chart.id == "loss" else "") for chart in charts)
    drawn = f'<div class="charts">{"".join(others)}</div>'
    silent = "<noscript><p>The curves need JavaScript; every number is in <code>run_report.json</code>.</p></noscript>"
    return _section("Curves", f"{_CONTROLS}{silent}{first}{drawn}")


def _chart(chart: Chart, record: RunRecord, size: str) -> str:
    return (
        f'<figure class="chart {size}" id="chart-{chart.id}"><figcaption><b>{escape(chart.title)}</b>'
        f'<span class="readout">{escape(chart.remark)}</span><span class="keys"></span></figcaption>'
        f'<div class="plot" role="img" aria-label="{escape(in_words(chart, record))}"></div></figure>'
    )


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


def _data(data: DataSummary | None) -> list[tuple[str, str]]:
    """What was trained on, as name and value."""
    if data is None:
        return []
    rows = [("rows", f"{data.rows:,}" + (f", {data.held_back:,} held back" if data.held_back else ""))]
    rows += [
        ("effective batch", f"{data.effective_batch:,} rows a step"),
        ("epochs", format_number(data.epochs, 3)),
    ]
    if data.lengths is not None:
        middle, long, longest = data.lengths
        rows.append(("tokens a row", f"{middle:,} in the middle, {long:,} at 90 %, {longest:,} at 99 %"))
    if data.cut_rows:
        rows.append(
            (
                "cut to the length limit",
                f"{data.cut_rows:,} rows, {format_share(data.cut_share)} of all tokens",
            )
        )
    if data.padding_share is not None:
        rows.append(("padding", f"{format_share(data.padding_share)} of the tokens in a batch"))
    return rows


def _notes(notes: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return _section("Notes", f'<ul class="notes">{items}</ul>') if notes else ""


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def _share(part: int, whole: int) -> str:
    return format_share(part / whole) if whole else "no share"
