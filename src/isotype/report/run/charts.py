"""The curves of a run as data: columns of the steps, and the charts they belong to.

`run.js` draws them with uPlot (`vendor/uplot`, MIT): a choice of horizontal axes, zoom, smoothing, a second run over
the first, CSV. It reads `run_report.json`, so another run's file fits the same charts.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import PurePath
from typing import Any, Literal

from isotype.core.units import format_bytes
from isotype.report.charts import format_number
from isotype.report.run.record import JSON_NAME, RunRecord, StepRecord, format_loss, summarize


@dataclass(frozen=True)
class Chart:
    """One chart.

    Attributes:
        id: of its element in the page.
        unit: title of the value axis.
        columns: of the steps, derived from them by `run.js` (`tokens_per_second`, `memory_gib`,
            `loss_scale_exponent`), or metrics that the trainer logged.
        labels: names of the columns in legend and readout.
        remark: shown while the pointer is elsewhere.
        zero: the value axis includes 0.
        smooth: draw a smoothed curve over the values.
        held: draw the held-back losses, too.
        stairs: a value holds until the next step.
        format: of the values; `"power"` treats them as exponents of 2.
        marks: steps to mark at the foot of the chart.
    """

    id: str
    title: str
    unit: str
    columns: tuple[str, ...]
    labels: tuple[str, ...]
    remark: str = ""
    zero: bool = False
    smooth: bool = False
    held: bool = False
    stairs: bool = False
    format: Literal["number", "power"] = "number"
    marks: tuple[int, ...] = ()


_METRICS = (
    Chart("margins", "Reward margin", "reward", ("rewards/margins",), ("margin",), smooth=True),
    Chart("accuracies", "Preferred answer ranked first", "share of pairs", ("rewards/accuracies",), ("accuracy",), zero=True, smooth=True),
    Chart("rewards", "Implicit rewards", "reward", ("rewards/chosen", "rewards/rejected"), ("chosen", "rejected")),
    Chart("accuracy", "Preferred answer ranked first", "share of pairs", ("accuracy",), ("accuracy",), zero=True, smooth=True),
    Chart("margin", "Reward margin", "reward", ("margin",), ("margin",), smooth=True),
    Chart("reward", "Reward", "reward", ("reward", "reward_std"), ("mean", "standard deviation"), smooth=True),
    Chart("equal", "Groups whose rewards are all equal", "share of groups", ("frac_reward_zero_std",), ("share",), zero=True),
    Chart("kl", "KL divergence from the reference", "nats", ("kl",), ("KL",), zero=True),
    Chart("length", "Length of completions", "tokens", ("completions/mean_length",), ("mean",), zero=True),
    Chart("token_accuracy", "Token accuracy", "share of tokens", ("mean_token_accuracy",), ("accuracy",), smooth=True),
)  # fmt: skip
"""Metrics that TRL's trainers log beside the loss, by name."""


def charts_of(record: RunRecord) -> tuple[Chart, ...]:
    """Return the charts of a run with at least one measured value."""
    steps, summary = record.steps, summarize(record)
    if not steps and not record.evals:
        return ()
    loss = Chart("loss", "Loss", "loss", ("loss",), ("training",), smooth=True, held=True)
    charts = [replace(loss, remark=f"step {steps[-1].step:,}" if steps else "")]
    logged = {name for step in steps for name, _ in step.metrics}
    charts += [chart for chart in _METRICS if logged.issuperset(chart.columns)]
    if steps:
        peak = max(step.learning_rate for step in steps)
        charts.append(
            Chart("learning-rate", "Learning rate", "learning rate", ("learning_rate",), ("learning rate",), f"peak {format_number(peak, 3)}", zero=True)
        )  # fmt: skip
    norms = [step.grad_norm for step in steps if step.grad_norm is not None]
    if norms:
        finite = [norm for norm in norms if math.isfinite(norm)]
        remark = f"median {format_number(statistics.median(finite), 3)}" if finite else "never finite"
        charts.append(
            Chart("gradient-norm", "Gradient norm before clipping", "L2 norm", ("grad_norm",), ("gradient norm",), remark, zero=True)
        )  # fmt: skip
    if summary.tokens_per_second is not None:
        remark = f"median {format_number(summary.tokens_per_second, 3)}"
        charts.append(
            Chart("speed", "Speed", "tokens/s", ("tokens_per_second",), ("tokens/s",), remark, zero=True)
        )
    if summary.peak_memory_bytes is not None:
        remark = f"peak {format_bytes(summary.peak_memory_bytes)}"
        charts.append(
            Chart("memory", "Peak memory of a step", "GiB", ("memory_gib",), ("memory",), remark, zero=True)
        )
    return (*charts, *_loss_scale(steps))


def _loss_scale(steps: Sequence[StepRecord]) -> list[Chart]:
    if all(step.loss_scale is None for step in steps):
        return []
    skipped = tuple(step.step for step in steps if step.skipped)
    remark = f"{len(skipped):,} {'step' if len(skipped) == 1 else 'steps'} skipped"
    columns, labels = ("loss_scale_exponent",), ("loss scale",)
    return [
        Chart("loss-scale", "Loss scale", "loss scale", columns, labels, remark, stairs=True, format="power", marks=skipped)
    ]  # fmt: skip


def in_words(chart: Chart, record: RunRecord) -> str:
    """Describe a chart for a screen reader."""
    if chart.id != "loss" or not record.steps:
        return (
            f"{chart.title}, {chart.unit}: {chart.remark}" if chart.remark else f"{chart.title}, {chart.unit}"
        )
    first, last = record.steps[0], record.steps[-1]
    return f"{chart.title}: {format_loss(first.loss)} at step {first.step:,}, {format_loss(last.loss)} at step {last.step:,}"


def page_data(record: RunRecord, charts: Sequence[Chart]) -> str:
    """Return the data of `run.js` as JSON that is safe inside `<script>`."""
    names = [field.name for field in fields(StepRecord) if field.name != "metrics"]
    metrics = list(dict.fromkeys(name for step in record.steps for name, _ in step.metrics))
    logged = [dict(step.metrics) for step in record.steps]
    content = {
        "label": PurePath(record.output_dir).name,
        "running": record.status == "running",
        "csv": JSON_NAME.replace(".json", ".csv"),
        "charts": [asdict(chart) for chart in charts],
        "steps": {name: [_number(getattr(step, name)) for step in record.steps] for name in names}
        | {name: [_number(values.get(name)) for values in logged] for name in metrics},
        "evals": {
            "step": [held.step for held in record.evals],
            "loss": [_number(held.loss) for held in record.evals],
        },
    }
    return json.dumps(content, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _number(value: Any) -> Any:
    """Replace NaN and infinities, which JSON lacks, by their names."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
