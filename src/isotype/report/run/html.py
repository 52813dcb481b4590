"""A run report as one self-contained HTML file.

The page's content security policy forbids external resources, and all scripts except uPlot and `run.js`. `run.js`
draws the curves with uPlot.
"""

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime
from pathlib import PurePath
from typing import Literal

from isotype.core.json_records import encoded
from isotype.core.names import format_bytes, plural
from isotype.core.tables import table
from isotype.report.html import format_number, package_file, palette_css, render, stacked
from isotype.report.run.headroom import by_block
from isotype.report.run.headroom import in_words as headroom_in_words
from isotype.report.run.record import (
    JSON_NAME,
    DataSummary,
    RunRecord,
    RunSummary,
    StepRecord,
    format_loss,
    loss_sentences,
    summarize,
)
from isotype.report.text import format_count, format_duration, format_share

_MEMORY = (
    "Peak memory is the largest memory in use during a step. On a GPU, memory in use is the memory that torch has allocated. "
    "On a CPU, memory in use is the resident size of the process, sampled every 20 ms, so short peaks can be missed. Peak "
    "memory does not include loading, evaluation and saving."
)

_MARKS = {"running": "▶", "finished": "✓", "interrupted": "◐", "failed": "✕"}


def to_html(record: RunRecord) -> str:
    summary, charts = summarize(record), charts_of(record)
    name = PurePath(record.model).name or record.model
    return render(
        "run.html.j2",
        style=package_file("run/vendor/uplot/uPlot.min.css") + package_file("style.css") + palette_css(),
        script=_script(bool(charts)),
        data=page_data(record, charts),
        json_name=JSON_NAME,
        run=record,
        title=f"{record.method} {name}: {record.status}",
        model_name=name,
        dataset_name=PurePath(record.dataset).name or record.dataset,
        status=f"{_MARKS[record.status]} {record.status}",
        started=f"{datetime.fromisoformat(record.started):%Y-%m-%d %H:%M %Z}",
        resumed_from=None if record.resumed_from is None else f"{record.resumed_from:,}",
        figures=_figures(record, summary),
        sentences=loss_sentences(record),
        charts=[(chart, in_words(chart, record)) for chart in charts],
        policy=[(row.role, row.dtype, row.reason) for row in record.policy],
        weights=_weights(record),
        headroom=_headroom(record),
        settings=[
            ("model", record.model),
            ("dataset", record.dataset),
            ("output directory", record.output_dir),
            *_data(record.data),
            *record.settings,
        ],
        notes=[*record.notes, *([] if summary.peak_memory_bytes is None else [_MEMORY])],
    )


def _script(curves: bool) -> str:
    if not curves:
        return package_file("copy.js")
    # The first line of uPlot, which names a web address, is left out; uPlot's licence is in the package beside it.
    library = package_file("run/vendor/uplot/uPlot.iife.min.js").partition("*/")[2]
    licence = "/* uPlot 1.6.32, (c) Leon Sorokin, MIT licence */"
    return "\n".join([licence, library, package_file("run/run.js"), package_file("copy.js")])


def _figures(record: RunRecord, summary: RunSummary) -> list[tuple[str, str, str]]:
    skipped = f"{summary.skipped:,} skipped" if summary.skipped else ""
    final = "not measured" if summary.final_loss is None else format_loss(summary.final_loss)
    mean = f"mean of the last {summary.window}" if summary.window > 1 else ""
    rate, peak, none = summary.tokens_per_second, summary.peak_memory_bytes, "not measured"
    epochs = "" if record.data is None else f"{format_number(record.data.epochs, 3)} epochs"
    steps = ", ".join(filter(None, (epochs, skipped)))
    return [
        ("Steps", f"{summary.steps:,}", steps),
        ("Tokens", format_count(summary.tokens) if summary.tokens else "not measured", ""),
        ("Time", format_duration(summary.seconds), "" if record.finished else "in steps"),
        ("Final loss", final, mean if summary.final_loss is not None else ""),
        ("Tokens/s", none, "") if rate is None else ("Tokens/s", format_number(rate, 3), "median"),
        ("Peak memory", none, "") if peak is None else ("Peak memory", format_bytes(peak), "in a step"),
    ]


def _weights(record: RunRecord) -> dict[str, object] | None:
    if not record.weight_bytes:
        return None
    total = sum(amount for _, amount in record.weight_bytes)
    trained, parameters = record.parameters_trainable, record.parameters_total
    shown = f"{trained:,} of {parameters:,} parameters"
    return {
        "trained": f"{shown} were trained ({_share(trained, parameters)}); the weights take {format_bytes(total)}.",
        "bar": stacked(record.weight_bytes, format_bytes, total),
        "rows": [
            (n, format_bytes(size), f"{size:,} B", _share(size, total)) for n, size in record.weight_bytes
        ],
    }


def _headroom(record: RunRecord) -> dict[str, object] | None:
    if record.headroom is None:
        return None
    rows = []
    for block in by_block(record.headroom):
        sizes = (format_number(block.median), format_number(block.high), format_number(block.headroom, 3))
        change = "" if block.change is None else f"× {format_number(block.change, 3)}"
        rows.append((block.name, *sizes, change, block.used))
    return {
        "sentence": headroom_in_words(record.headroom),
        "rows": rows,
    }


def _data(data: DataSummary | None) -> list[tuple[str, str]]:
    if data is None:
        return []
    rows = [
        ("data", data.rows_words),
        ("effective batch", f"{data.step_words} a step"),
        ("epochs", format_number(data.epochs, 3)),
    ]
    if data.lengths is not None:
        middle, long, longest = data.lengths
        rows.append(("tokens a row", f"{middle:,} in the median, {long:,} at 90 %, {longest:,} at 99 %"))
    if data.cut_rows:
        cut = f"{data.cut_rows:,} rows, {format_share(data.cut_share)} of all tokens"
        rows.append(("cut to the length limit", cut))
    if data.padding_share is not None:
        rows.append(("padding", f"{format_share(data.padding_share)} of the tokens in a batch"))
    return rows


def _share(part: int, whole: int) -> str:
    return format_share(part / whole) if whole else "no share"


@dataclass(frozen=True)
class Chart:
    """A chart of a run report. `run.js` draws the chart.

    Attributes:
        columns: names of the values of the curves. A name is a field of `StepRecord`, a metric that the trainer logged, or a
            value that `run.js` computes (`tokens_per_second`, `memory_gib`, `loss_scale_exponent`).
        remark: text that is shown while the mouse pointer is not over the chart.
        zero: True if the value axis includes 0.
        held: True if the chart also shows the losses on held-out data.
        stairs: True if each value is drawn as a horizontal line until the next step.
        format: format of the values. For `"power"`, a value is written as an exponent of 2.
        marks: steps that are marked at the bottom of the chart.
    """

    id: str
    title: str
    unit: str
    columns: Sequence[str]
    labels: Sequence[str]
    remark: str = ""
    zero: bool = False
    smooth: bool = False
    held: bool = False
    stairs: bool = False
    format: Literal["number", "power"] = "number"
    marks: Sequence[int] = ()


CHARTS = tuple(Chart(**chart) for chart in table(__file__, "charts.json"))


def charts_of(record: RunRecord) -> tuple[Chart, ...]:
    """Return the charts whose values were measured in the run."""
    steps, summary = record.steps, summarize(record)
    if not steps and not record.evals:
        return ()
    logged = {name for step in steps for name, _ in step.metrics}
    remarks = {chart.id: "" for chart in CHARTS if logged.issuperset(chart.columns)} | {"loss": ""}
    if steps:
        remarks["loss"] = f"step {steps[-1].step:,}"
        remarks["learning-rate"] = f"peak {format_number(max(step.learning_rate for step in steps), 3)}"
    if norms := [step.grad_norm for step in steps if step.grad_norm is not None]:
        finite = [norm for norm in norms if math.isfinite(norm)]
        median = format_number(statistics.median(finite), 3) if finite else ""
        remarks["gradient-norm"] = f"median {median}" if finite else "never finite"
    if summary.tokens_per_second is not None:
        remarks["speed"] = f"median {format_number(summary.tokens_per_second, 3)}"
    if summary.peak_memory_bytes is not None:
        remarks["memory"] = f"peak {format_bytes(summary.peak_memory_bytes)}"
    skipped = [step.step for step in steps if step.skipped]
    if any(step.loss_scale is not None for step in steps):
        remarks["loss-scale"] = f"{plural(len(skipped), 'step')} skipped"
    measured = [replace(chart, remark=remarks[chart.id]) for chart in CHARTS if chart.id in remarks]
    return tuple(replace(c, marks=skipped) if c.id == "loss-scale" else c for c in measured)


def in_words(chart: Chart, record: RunRecord) -> str:
    if chart.id != "loss" or not record.steps:
        return f"{chart.title}, {chart.unit}{f': {chart.remark}' if chart.remark else ''}"
    first, last = record.steps[0], record.steps[-1]
    return f"{chart.title}: {format_loss(first.loss)} at step {first.step:,}, {format_loss(last.loss)} at step {last.step:,}"


def page_data(record: RunRecord, charts: Sequence[Chart]) -> str:
    """Return the data for `run.js` as JSON, escaped for a `<script>` element."""
    names = [field.name for field in fields(StepRecord) if field.name != "metrics"]
    metrics = list(dict.fromkeys(name for step in record.steps for name, _ in step.metrics))
    logged = [dict(step.metrics) for step in record.steps]
    steps = {name: [getattr(step, name) for step in record.steps] for name in names}
    content = {
        "label": PurePath(record.output_dir).name,
        "running": record.status == "running",
        "csv": JSON_NAME.replace(".json", ".csv"),
        "charts": charts,
        "steps": steps | {name: [values.get(name) for values in logged] for name in metrics},
        "evals": {"step": [held.step for held in record.evals], "loss": [held.loss for held in record.evals]},
    }
    text = json.dumps(encoded(content, {}), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")
