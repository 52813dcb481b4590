"""A run report as one self-contained HTML file.

Its content security policy forbids every load from outside and every script but uPlot and `run.js`, which draws the
curves with it.
"""

from __future__ import annotations

from pathlib import PurePath

from isotype.core.names import plural
from isotype.core.units import format_bytes
from isotype.report.charts import Part, format_number, stacked_bar
from isotype.report.html import package_file, render
from isotype.report.palette import dtype_class, palette_css
from isotype.report.run.charts import charts_of, in_words, page_data
from isotype.report.run.headroom import bar, by_block
from isotype.report.run.headroom import in_words as headroom_in_words
from isotype.report.run.record import (
    JSON_NAME,
    DataSummary,
    RunRecord,
    RunSummary,
    format_loss,
    loss_sentences,
    parse_time,
    summarize,
)
from isotype.report.text import format_count, format_duration, format_share

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
    """Return the report as one HTML document."""
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
        status=_STATUS[record.status],
        started=f"{parse_time(record.started):%Y-%m-%d %H:%M %Z}",
        resumed_from=None if record.resumed_from is None else f"{record.resumed_from:,}",
        figures=_figures(record, summary),
        sentences=loss_sentences(record),
        charts=[(chart, in_words(chart, record)) for chart in charts],
        policy=[(row.role, row.dtype, row.reason) for row in record.policy],
        weights=_weights(record),
        headroom=_headroom(record),
        settings=[*_places(record), *_data(record.data), *record.settings],
        notes=[*record.notes, *([] if summary.peak_memory_bytes is None else [_MEMORY])],
    )


def _script(curves: bool) -> str:
    """Return the scripts that draw the curves, if there are any, and copy the command."""
    if not curves:
        return package_file("copy.js")
    # The first line of uPlot names a web address; its licence is beside it in the package.
    library = package_file("run/vendor/uplot/uPlot.iife.min.js").partition("*/")[2]
    licence = "/* uPlot 1.6.32, (c) Leon Sorokin, MIT licence */"
    return "\n".join([licence, library, package_file("run/run.js"), package_file("copy.js")])


def _figures(record: RunRecord, summary: RunSummary) -> list[tuple[str, str, str]]:
    """Return name, value and a remark of each number in the summary line."""
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


def _weights(record: RunRecord) -> dict[str, object] | None:
    """Return the weights by storage dtype: a sentence, a bar, and rows of dtype, size, bytes and share."""
    if not record.weight_bytes:
        return None
    total = sum(amount for _, amount in record.weight_bytes)
    parts = [Part(name, amount, dtype_class(name)) for name, amount in record.weight_bytes]
    trained, parameters = record.parameters_trainable, record.parameters_total
    return {
        "trained": f"{trained:,} of {parameters:,} parameters were trained ({_share(trained, parameters)}); "
        f"the weights take {format_bytes(total)}.",
        "bar": stacked_bar("Weights by storage dtype", parts, lambda amount: format_bytes(int(amount))),
        "rows": [
            (name, format_bytes(amount), f"{amount:,} B", _share(amount, total))
            for name, amount in record.weight_bytes
        ],
    }


def _headroom(record: RunRecord) -> dict[str, object] | None:
    """Return the used part of float16's range: a sentence, and rows of block, magnitudes, headroom, change and bar."""
    if record.headroom is None:
        return None
    return {
        "sentence": headroom_in_words(record.headroom),
        "rows": [
            (
                block.name,
                format_number(block.median, 4),
                format_number(block.high, 4),
                format_number(block.headroom, 3),
                "" if block.change is None else f"× {format_number(block.change, 3)}",
                bar(block),
            )
            for block in by_block(record.headroom)
        ],
    }


def _places(record: RunRecord) -> list[tuple[str, str]]:
    return [("model", record.model), ("dataset", record.dataset), ("output directory", record.output_dir)]


def _data(data: DataSummary | None) -> list[tuple[str, str]]:
    """Describe the training data as names and values."""
    if data is None:
        return []
    packs = "" if data.packs is None else f" in {plural(data.packs, 'pack')}"
    held_back = f", {data.held_back:,} held back" if data.held_back else ""
    rows = [("rows", f"{data.rows:,}{packs}{held_back}")]
    rows += [
        ("effective batch", f"{data.step_words} a step"),
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


def _share(part: int, whole: int) -> str:
    return format_share(part / whole) if whole else "no share"
