"""Reads rows for measurements from a data set (`isotype quality`), or from the training of an adapter (`isotype merge`)."""

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from torch.nn.utils.rnn import pad_sequence

from isotype.checkpoint.checkpoint import open_model
from isotype.checkpoint.stored_weights import blank_model
from isotype.checkpoint.tokenizer import tokenizer_of
from isotype.compat.templates import day_held
from isotype.core.errors import CheckpointError, DataError, IsotypeError, first_line
from isotype.data.load import load_training_data
from isotype.data.reading import Reading
from isotype.ranges.measure import Rows, positions
from isotype.report.run.record import JSON_NAME, RunRecord, from_json
from isotype.train.command.parse import parse_command
from isotype.train.command.settings import Settings, settings_of
from isotype.train.models import tokenizer_here
from isotype.train.output.checkpoints import all_checkpoints
from isotype.train.output.resume import template_date
from isotype.train.rows.data import training_data
from isotype.train.rows.lengths import RowTokens, refused_row

_LENGTH = 128
"""Maximum number of tokens in a row. Many short rows represent a data set better than a few long rows."""


def batch_of_data(model: str, name: str, tokens: int, revision: str | None = None) -> dict[str, torch.Tensor]:
    """Return about `tokens` tokens from rows spread over a data set, as an int64 batch `[rows, length]` padded on the right.

    The model's tokenizer and chat template are used. A row is cut to 128 tokens, or to fewer tokens if the model has fewer
    positions.
    """
    from trl import ScriptArguments

    _, tokenizer = tokenizer_here(model, revision)
    if tokenizer is None:
        what, expected = f"{model} without a tokenizer on this machine", "the tokenizer of the model"
        fix = "download the model first, or omit --data"
        raise CheckpointError.of("no tokenizer for the data", what, expected, fix)
    reader = RowTokens("sft", tokenizer)
    length = min(_LENGTH, positions(blank_model(open_model(model, revision).model_config)) or _LENGTH)
    script, reading = ScriptArguments(dataset_name=name), Reading("sft", lines=True)
    rows = load_training_data(script, None, reading, need_test=False, say=lambda line: None)["train"]
    texts: list[list[int]] = []
    for at in spread(len(rows)):
        if sum(map(len, texts)) >= tokens:
            break
        try:
            texts.append([*reader.ids(rows[at])[0]][:length])
        except TemplateError as error:
            raise refused_row(name, at, error) from error
    ids = [torch.tensor(text) for text in texts]
    masks = [torch.ones_like(row) for row in ids]
    return {"input_ids": pad_sequence(ids, True), "attention_mask": pad_sequence(masks, True)}


def spread(count: int) -> Iterator[int]:
    """Yield each number below `count` once. Even the first few numbers are spread over the whole range."""
    strides = range(max(1, round(count * 0.618)), count + 2)
    stride = next(number for number in strides if math.gcd(number, count) == 1)
    return (turn * stride % count for turn in range(count))


_MOST = 64


def rows_of_training(adapter: Path) -> tuple[Rows | None, str | None]:
    """Return the held-out or training rows of an adapter's run as (rows, None), or (None, reason) if they cannot be
    read.

    `adapter` is the adapter's folder, or a checkpoint in this folder. Without a run report, return (None, None). If a
    checkpoint records the date of the run, chat templates use this date.
    """
    folder = next((path for path in (adapter, adapter.parent) if (path / JSON_NAME).is_file()), None)
    if folder is None:
        return None, None
    try:
        record = from_json((folder / JSON_NAME).read_text(encoding="utf-8"))
        settings = _settings(record, folder)
        split, rows = _test_or_training_rows(settings)
        tokenizer = tokenizer_of(adapter)
    except (IsotypeError, ValueError, OSError, SystemExit) as error:
        return None, f"the rows of the training were not read again: {first_line(error)}"
    if tokenizer is None or not len(rows):
        return None, None
    days = map(template_date, (adapter, *reversed(all_checkpoints(folder))))
    day = next(filter(None, days), None)
    try:
        with nullcontext() if day is None else day_held(day):
            texts = _texts(RowTokens("sft", tokenizer, settings.dataset_text_field or "text"), rows)
    except (TemplateError, KeyError, TypeError) as error:
        return None, f"the rows of the training were not tokenized again: {first_line(error)}"
    if not texts:
        return None, None
    trained = split == settings.dataset_train_split
    data = record.data if settings.eval_split is not None and not trained else None
    changed = f"; {data.held_back:,} in training" if data is not None and data.held_back != len(rows) else ""
    kind = "training rows" if trained else "held-back rows"
    source = f"{kind} of {settings.dataset_name or 'its data'} ({len(rows):,}{changed})"
    return Rows(tuple(texts), source), None


def _texts(reader: RowTokens, rows: Any) -> list[tuple[Sequence[int], Sequence[int]]]:
    """Return (ids, labels) of up to `_MOST` rows that are spread over the data."""
    texts = []
    for at in spread(len(rows)):
        ids, labels = _labelled(reader, rows[at])
        if len(ids) > 1:
            texts.append((ids, labels))
        if len(texts) == _MOST:
            break
    return texts


def _settings(record: RunRecord, folder: Path) -> Settings:
    """Return the settings of a run's command. A relative data path is looked up in the run's working directory."""
    words = shlex.split(record.command)
    begin = words.index(record.method)
    command, _ = parse_command(record.method, words[begin + 1 :])
    name, output = command["dataset_name"], Path(record.output_dir)
    parts = folder.resolve().parts
    if name and not output.is_absolute() and parts[-len(output.parts) :] == output.parts:
        path = Path(*parts[: -len(output.parts)]) / name
        if path.exists():
            command = command.but(dataset_name=str(path))
    return settings_of(command)


def _test_or_training_rows(settings: Settings) -> tuple[str, Any]:
    """Return (name, rows) of the test split, or of the training split if there is no test split."""
    try:
        data = training_data(settings, lambda line: None, evaluates=True)
    except DataError:
        data = training_data(settings, lambda line: None, evaluates=False)
    test, train = settings.dataset_test_split, settings.dataset_train_split
    split = test if test in data else train
    return split, data[split] if hasattr(data[split], "__len__") else ()


def _labelled(reader: RowTokens, row: Mapping[str, Any]) -> tuple[Sequence[int], Sequence[int]]:
    answer = next((row[name] for name in ("completion", "chosen") if row.get(name) is not None), None)
    prompt = row.get("prompt")
    ids = [*reader.ids({**row, "completion": answer} if answer is not None else row)[0]]
    if not prompt or answer is None:
        return ids, ids
    length = len(reader.ids({"prompt": prompt, "messages": None})[0])
    return ids, [-100] * length + ids[length:]
