"""Summarizes the training data before the training: lengths, padding, and an example with its loss mask."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy
from rich.console import Console
from rich.text import Text

from isotype.core.names import epochs_text
from isotype.report.run.record import DataSummary
from isotype.report.text import format_share, pair_table, say
from isotype.train.rows.lengths import Lengths, padding_share
from isotype.train.rows.pictured import Pictured

_LONGEST_TEXT = 600  # number of printed characters of one part of an example


def data_summary(trainer: Any, lengths: Lengths | None = None) -> DataSummary | None:
    rows, held = trainer.train_dataset, trainer.eval_dataset
    if not hasattr(rows, "__len__"):
        return None
    args, state = trainer.args, trainer.state
    batch = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    tokens = lengths.tokens if lengths is not None else ()
    limit = getattr(args, "max_length", None)
    packed = getattr(args, "packing", False) or getattr(args, "padding_free", False)
    beyond = [] if limit is None or packed else [length - limit for length in tokens if length > limit]
    packs = len(rows) if getattr(args, "packing", False) and lengths is not None else None
    return DataSummary(
        rows=len(rows) if packs is None or lengths is None else lengths.rows,
        held_back=0 if held is None else sum(map(len, held.values())) if isinstance(held, dict) else len(held),
        effective_batch=batch,
        epochs=float(state.epoch) if state.epoch else planned_epochs(args, len(rows), batch),
        lengths=percentiles(tokens) if tokens else None,
        cut_rows=round(len(beyond) * lengths.rows / len(tokens)) if lengths is not None and beyond else 0,
        cut_share=sum(beyond) / sum(tokens) if beyond else 0.0,
        padding_share=None if not tokens else 0.0 if packed else padding_share([min(n, limit or n) for n in tokens], args.per_device_train_batch_size),
        packs=packs,
    )  # fmt: skip


def planned_epochs(args: Any, rows: int, batch: int) -> float:
    """Return the planned number of epochs. As in transformers, an epoch's last batch and last step may be smaller."""
    if args.max_steps <= 0 or not rows:
        return float(args.num_train_epochs)
    accumulated: int = args.gradient_accumulation_steps
    at_once = batch // accumulated
    batches = max(1, rows // at_once if args.dataloader_drop_last else math.ceil(rows / at_once))
    steps: int = args.max_steps
    whole, rest = divmod(steps, math.ceil(batches / accumulated))
    return whole + rest * accumulated / batches


def percentiles(tokens: Sequence[int]) -> tuple[int, int, int]:
    half, most, longest = numpy.percentile(tokens, (50, 90, 99))
    return round(half), round(most), round(longest)


def example_of(trainer: Any) -> list[tuple[bool, str]] | None:
    """Split the first row into consecutive parts (has loss, text). Return None if the rows have no labels."""
    if not len(trainer.train_dataset):
        return None
    if isinstance(trainer.data_collator, Pictured):
        return trainer.data_collator.stretches(trainer.train_dataset[0])
    if "input_ids" not in trainer.train_dataset.column_names:
        return None
    batch = trainer.data_collator([trainer.train_dataset[0]])
    if "labels" not in batch:
        return None
    ids, labels = batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
    words = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    learned = [label != -100 for label in labels]
    stretches = groupby(zip(learned, ids, strict=True), key=lambda pair: pair[0])
    return [(mask, words.decode([token for _, token in pairs])) for mask, pairs in stretches]


def show_data(console: Console, summary: DataSummary | None, example: list[tuple[bool, str]] | None) -> None:
    if summary is not None:
        say(console, "\n".join(_sentences(summary)))
    if example:
        half, rows = _LONGEST_TEXT // 2, list[tuple[str, Text]]()
        for learned, text in example:
            short = text if len(text) <= _LONGEST_TEXT else f"{text[:half]} […] {text[-half:]}"
            shown = Text(short.replace("\n", "↵\n").rstrip("\n"), style="" if learned else "dim")
            rows.append(("learned" if learned else "given", shown))
        title = {"title": "first example", "title_justify": "left", "title_style": "bold"}
        console.print(pair_table(rows, "dim", **title), highlight=False)


def _sentences(data: DataSummary) -> list[str]:
    lines = [f"data: {data.rows_words}; {data.step_words} a step, {epochs_text(data.epochs)}"]
    if data.lengths is not None:
        middle, long, longest = data.lengths
        share = data.padding_share
        padding = "" if share is None else f"; {format_share(share)} of a batch is padding"
        lines.append(f"tokens per row: median {middle:,}, 90 % <= {long:,}, 99 % <= {longest:,}{padding}")
    return lines
