"""The model card of a run, filled in from its record."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from isotype.report.run.record import RunRecord, loss_sentences, summarize
from isotype.report.text import format_count, format_duration


def model_card(record: RunRecord) -> str:
    """Return Markdown with the hub's metadata block (huggingface.co/docs/hub/model-cards)."""
    adapter = record.parameters_trainable < record.parameters_total
    metadata = [
        f"base_model: {json.dumps(record.model)}",
        f"library_name: {'peft' if adapter else 'transformers'}",
        *([] if record.method == "reward" else ["pipeline_tag: text-generation"]),
        "tags:",
        *(f"- {tag}" for tag in (*(["lora"] if adapter else []), record.method, "isotype", "trl")),
        # The hub takes its own names only; a local file has none.
        *([] if Path(record.dataset).exists() or ":" in record.dataset else ["datasets:", f"- {json.dumps(record.dataset)}"]),
    ]  # fmt: skip
    summary = summarize(record)
    trained = (
        f"{record.method.upper()} of `{record.model}` on `{record.dataset}`: {summary.steps:,} steps, "
        f"{format_count(summary.tokens)} tokens, {format_duration(summary.seconds)} on {record.device}. "
        f"{record.parameters_trainable:,} of {record.parameters_total:,} parameters were trained."
    )
    losses = " ".join("".join(pieces) for pieces in loss_sentences(record))
    parts = [
        "---\n" + "\n".join(metadata) + "\n---",
        f"# {Path(record.output_dir).name}",
        trained,
        losses,
        *_samples(record),
        "## Precision",
        _table(("role", "dtype", "reason"), [(row.role, row.dtype, row.reason) for row in record.policy]),
        "## Settings",
        _table(("setting", "value"), record.settings),
        "## Made with",
        f"```console\n$ {record.command}\n```",
        _table(("library", "version"), record.versions),
    ]
    return "\n\n".join(parts) + "\n"


def _samples(record: RunRecord) -> list[str]:
    asked = [sample for sample in record.samples if sample.after is not None]
    if not asked:
        return []
    rows = [(sample.question, sample.before or "", sample.after or "") for sample in asked]
    return ["## A question, before and after", _table(("question", "before", "after"), rows)]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
