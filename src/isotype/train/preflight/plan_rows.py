"""Facts about a step from the rows of a data set: their number, the longest, the tokens with loss."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from isotype.core.errors import Problem
from isotype.core.names import plural
from isotype.data.build import undecoded
from isotype.data.pictures import picture_columns, pictures_in, size_of
from isotype.ranges.pictures import NONE, Pictures, pictures_of
from isotype.train.models import parts_to_adapt, tokenizer_here
from isotype.train.rows.assistant import labelled_rows
from isotype.train.rows.contents import fitting, plain_contents
from isotype.train.rows.data import training_data_here
from isotype.train.rows.lengths import (
    COUNTED_ROWS,
    UNBOUNDED,
    Lengths,
    lengths_in,
    longest_possible,
    packed_rows,
)
from isotype.train.validate import check_tokenizer, plain_turns

if TYPE_CHECKING:
    from isotype.train.command.settings import Settings
    from isotype.train.preflight.plan import Options, StepPlan


def with_held_back(plan: StepPlan, settings: Settings, tokenizer: Any, data: Any) -> StepPlan:
    """Return the plan with the lengths of the evaluation rows, and the longest possible."""
    training, split = settings.training, settings.script.dataset_test_split
    if plan.evaluation is None or split not in data:
        return plan
    rows = data[split]
    lengths = lengths_in(settings, tokenizer, rows)
    packed = bool(getattr(training, "packing", False))
    limit, pictured = getattr(training, "max_length", None), bool(picture_columns(rows))
    longest, _ = longest_possible(
        lengths, limit, packed=packed, completion=plan.completion, pictured=pictured
    )
    return replace(plan, evaluation_lengths=lengths, evaluation_length=longest)


def bounded(plan: StepPlan, settings: Settings, rows: Any, lengths: Lengths | None) -> StepPlan:
    """Return the plan with the number of rows, and the longest possible."""
    training = settings.training
    if lengths is not None and len(lengths.tokens) == lengths.rows:
        learned = getattr(training, "completion_only_loss", None) is False
        plan = replace(plan, prompt=0 if learned else lengths.prompt)
    limit = getattr(training, "max_length", None)
    packed, pictured = bool(getattr(training, "packing", False)), bool(picture_columns(rows))
    longest, why = longest_possible(
        lengths, limit, packed=packed, completion=plan.completion, pictured=pictured
    )
    if packed and (filled := packed_rows(lengths, limit)) is not None:
        longest = max(map(sum, filled))
        return replace(plan, rows=min(plan.rows, len(filled)), length=longest, longest=longest)
    # A prompt of GRPO or RLOO is answered several times: there the rows of a batch are no rows of the data set.
    fewer = plan.rows if lengths is None or plan.completion else min(plan.rows, lengths.rows)
    unforeseen = why if plan.unforeseen == UNBOUNDED else plan.unforeseen or why
    return replace(plan, rows=fewer, longest=longest, unforeseen=unforeseen)


_TRIED = 8
"""Rows whose pictures go through the processor: those with the most pixels, and with the most pictures."""


def pictures_in_rows(processor: Any, rows: Any) -> Pictures | None:
    """Return the most expensive pictures of any sampled row; None if unknown."""
    if not hasattr(rows, "__len__") or not len(rows):
        return None
    if not picture_columns(rows):
        return NONE
    if not hasattr(processor, "image_processor"):
        return None
    stored, step = undecoded(rows), max(1, -(-len(rows) // COUNTED_ROWS))
    found = (tuple(map(size_of, pictures_in(stored[at]))) for at in range(0, len(rows), step))
    sizes = {each for each in found if each and not any(isinstance(size, Problem) for size in each)}
    by_pixels = sorted(sizes, key=lambda row: -sum(width * height for width, height in row))  # type: ignore[misc]
    tried = {*by_pixels[: _TRIED // 2], *sorted(sizes, key=len)[-_TRIED // 2 :]}
    pictures = [pictures_of(None, processor, each) for each in tried]  # type: ignore[arg-type]
    return max(filter(None, pictures), key=lambda picture: (picture.values, picture.tokens), default=NONE)


def with_data(plan: StepPlan, settings: Settings, options: Options) -> StepPlan:
    """Return the plan with the real lengths of a local data set's rows."""
    training, script = settings.training, settings.script
    notes: list[str] = []
    data = training_data_here(settings, notes.append)
    if data is None:
        return plan
    rows = data[script.dataset_train_split]
    adapt = parts_to_adapt(settings, next(iter(rows), {}))
    plan = replace(plan, data_rows=len(rows) if hasattr(rows, "__len__") else None, adapt=adapt)
    if not picture_columns(rows):
        plan = replace(plan, pictures=NONE)
    source, tokenizer = tokenizer_here(plan.source, plan.revision)
    if tokenizer is None:
        return replace(
            plan, notes=(*plan.notes, "the rows' lengths: there is no tokenizer here of this model")
        )
    check_tokenizer(settings, source, tokenizer, data)
    settings, data = fitting(settings, tokenizer, plain_contents(tokenizer, data, notes.append), notes.append)
    rows = data[script.dataset_train_split]
    labelled_rows(settings, tokenizer, data, COUNTED_ROWS, notes.append)
    notes += plain_turns(settings, tokenizer, data)
    lengths = lengths_in(settings, tokenizer, rows)
    plan = replace(plan, pictures=pictures_in_rows(tokenizer, rows))
    notes += filter(None, [None if lengths is None else lengths.begun_twice()])
    plan = with_held_back(plan, settings, tokenizer, data)
    plan = replace(plan, data="; ".join(notes), lengths=lengths)
    if options.length is not None:
        return plan
    with_rows = bounded(plan, settings, rows, lengths)
    plan = with_rows if options.batch is None else replace(with_rows, rows=plan.rows)
    if lengths is None or getattr(training, "packing", False):
        return plan
    limit = getattr(training, "max_length", None)
    longest = lengths.longest + plan.completion
    told = f"the longest of {plural(len(lengths.tokens), 'row')} has {plural(longest, 'token')}"
    told += f", with a completion of {plan.completion:,}" if plan.completion else ""
    words = getattr(tokenizer, "tokenizer", tokenizer)
    counted = f"counted by the tokenizer of {plan.source} (a vocabulary of {len(words):,})"
    cut = lengths.cut(limit)
    return replace(
        plan,
        length=plan.longest or longest,
        data="; ".join((cut or told, counted, *notes)),
    )
