"""The rows that a training has held back, found again by what lies beside its adapter."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers.trainer_utils import IntervalStrategy

from isotype.checkpoint.tokenizer import tokenizer_of
from isotype.core.errors import DataError, IsotypeError, first_line
from isotype.data.methods import METHODS
from isotype.ranges.batches import Rows
from isotype.report.run.record import JSON_NAME, RunRecord, from_json
from isotype.train.options.settings import Settings, parse_settings
from isotype.train.rows.data import hold_back, training_data
from isotype.train.rows.lengths import ids_of_row
from isotype.train.rows.quality import spread

_MOST = 64
"""Rows that are taken at most."""


def rows_of_training(adapter: Path) -> tuple[Rows | None, str | None]:
    """(rows of a training's data, None), those that it held back if there are any; (None, why not) where they cannot be read again.

    (None, None) of an adapter without a run report.

    Args:
        adapter: the folder, or one of its checkpoints.
    """
    folder = next((each for each in (adapter, adapter.parent) if (each / JSON_NAME).is_file()), None)
    if folder is None:
        return None, None
    try:
        record = from_json((folder / JSON_NAME).read_text(encoding="utf-8"))
        settings = _settings(record, folder)
        split, rows = _rows(settings)
        tokenizer = tokenizer_of(adapter)
    except (IsotypeError, ValueError, OSError, SystemExit) as error:
        return None, f"the rows of the training were not read again: {first_line(error)}"
    if tokenizer is None or not len(rows):
        return None, None
    words = getattr(tokenizer, "tokenizer", tokenizer)
    texts = []
    for at in spread(len(rows)):
        try:
            ids, labels = _labelled(words, rows[at], getattr(settings.training, "dataset_text_field", "text"))
        except (TemplateError, KeyError, TypeError) as error:
            return None, f"the rows of the training were not tokenized again: {first_line(error)}"
        if len(ids) > 1:
            texts.append((ids, labels))
        if len(texts) == _MOST:
            break
    if not texts:
        return None, None
    then = record.data
    held = settings.extra.eval_split is not None and then is not None
    counted = then.held_back if held and split != settings.script.dataset_train_split else None  # type: ignore[union-attr]
    changed = f"; {counted:,} then" if counted not in (None, len(rows)) else ""
    kind = "rows that were trained on" if split == settings.script.dataset_train_split else "held-back rows"
    return Rows(
        tuple(texts), f"{kind} of {settings.script.dataset_name or 'its data'} ({len(rows):,}{changed})"
    ), None


def _settings(record: RunRecord, folder: Path) -> Settings:
    """The settings of the command that a report has, its data set found from the folder that it was typed in."""
    words = shlex.split(record.command)
    begin = words.index(record.method)
    settings = parse_settings(METHODS[record.method], words[begin + 1 :])
    name, output = settings.script.dataset_name, Path(record.output_dir)
    here = folder.resolve()
    if name and not output.is_absolute() and here.parts[-len(output.parts) :] == output.parts:
        there = Path(*here.parts[: -len(output.parts)]) / name
        if there.exists():
            settings.script.dataset_name = str(there)
    return settings


def _rows(settings: Settings) -> tuple[str, Any]:
    """(split, its rows): those held back, else a split for tests, else those that were trained on."""
    settings.training.eval_strategy = IntervalStrategy.STEPS
    try:
        data = training_data(settings, lambda line: None)
    except DataError:
        settings.training.eval_strategy = IntervalStrategy.NO
        data = training_data(settings, lambda line: None)
    data = hold_back(settings, data)
    test, train = settings.script.dataset_test_split, settings.script.dataset_train_split
    split = test if test in data else train
    return split, data[split] if hasattr(data[split], "__len__") else ()


def _labelled(tokenizer: Any, row: Mapping[str, Any], text_field: str) -> tuple[Sequence[int], Sequence[int]]:
    """The ids of a row and its labels: of a prompt with an answer, those of the answer."""
    answer = next((row[name] for name in ("completion", "chosen") if row.get(name) is not None), None)
    prompt = row.get("prompt")
    ids = ids_of_row(tokenizer, {**row, "completion": answer} if answer is not None else row, text_field)
    if not prompt or answer is None:
        return ids, ids
    given = len(ids_of_row(tokenizer, {"prompt": prompt, "messages": None}, text_field))
    return ids, [-100] * given + ids[given:]
