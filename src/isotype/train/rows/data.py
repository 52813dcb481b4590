"""Reads, splits and checks the rows of a training command."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from jinja2 import TemplateError

from isotype.compat.templates import ERRORS, render_chat
from isotype.compat.trl import inputs_of_policy
from isotype.core.console import with_bar
from isotype.core.errors import DataError, Problem, UsageError, one_line
from isotype.core.names import listed, plural
from isotype.data.build import undecoded
from isotype.data.cells import CHATS
from isotype.data.load import load_training_data
from isotype.data.locate import data_error, find_local
from isotype.data.methods import Method
from isotype.data.pictures import picture_columns, picture_problem, pictures_in
from isotype.data.reading import Reading, parse_columns
from isotype.train.command.settings import Settings
from isotype.train.rows.assistant import lists_in
from isotype.train.rows.collators import Pictured, answers_in
from isotype.train.rows.lengths import Lengths

if TYPE_CHECKING:
    from datasets import DatasetDict, IterableDatasetDict

_TRIED = 64
"""Number of rows with images that the processor must accept before the model is loaded."""


def training_data(
    settings: Settings, say: Callable[[str], object], *, evaluates: bool | None = None
) -> DatasetDict | IterableDatasetDict:
    """Read the data. Return the rows of the training. With `--eval_split`, a part of the training rows becomes the
    test split.

    If `evaluates` is True, a test split is required. The default of `evaluates` is True if evaluation is on.
    """
    evaluates = settings.eval_strategy != "no" if evaluates is None else evaluates
    data = load_training_data(
        settings.script,
        settings.dataset,
        Reading(
            settings.method.name,
            parse_columns(settings.columns),
            settings.apply_chat_template,
            prompts=settings.completion_only_loss is False,
            lines=settings.text_lines,
            text_field=settings.dataset_text_field or "text",
        ),
        need_test=evaluates and settings.eval_split is None,
        say=say,
    )
    return data if settings.eval_split is None else _held_back(settings, data)


def training_data_here(
    settings: Settings, say: Callable[[str], object]
) -> DatasetDict | IterableDatasetDict | None:
    """Return `training_data` if the data is on this machine; None if the data is on the hub or no data is named."""
    if settings.datasets:
        local = all(not e.data_files and not e.data_dir and find_local(e.path) for e in settings.datasets)
    else:
        name = settings.dataset_name
        local = bool(name and find_local(name, test_split=settings.dataset_test_split))
    return training_data(settings, say) if local else None


def _held_back(settings: Settings, data: Any) -> Any:
    share, rows = settings.eval_split, data[settings.dataset_train_split]
    countable = hasattr(rows, "train_test_split")
    count = int(share) if share >= 1 else math.ceil(share * len(rows)) if countable else 0
    if not countable or not 0 < count < len(rows):
        expected = "no --dataset_streaming"
        if countable:
            expected = f"at least 1 row, but not all {len(rows):,} rows; this value holds back {count:,}"
        fix = "--eval_split 0.05 holds back a twentieth"
        raise UsageError.of("no rows can be held back", f"--eval_split {share:g}", expected, fix)
    parts = rows.train_test_split(test_size=count, seed=settings.seed)
    train, test = settings.dataset_train_split, settings.dataset_test_split
    return type(data)({train: parts["train"], test: parts["test"]})


def plain_contents(tokenizer: Any, data: Any, say: Callable[[str], object]) -> Any:
    """If the chat template accepts only text, join the text parts of each message. Otherwise, return `data` unchanged."""
    if hasattr(tokenizer, "tokenizer") or not getattr(tokenizer, "chat_template", None):
        return data
    chats = {}  # split -> columns whose type allows contents in parts; all columns of chats if the types are unknown
    for name, rows in data.items():
        if (features := getattr(rows, "features", None)) is None:
            chats[name] = sorted(CHATS & next(iter(rows), {}).keys())
        else:
            chats[name] = lists_in(features, CHATS, lambda turn: hasattr(turn.get("content"), "feature"))
    if not any(chats.values()) or _takes_parts(tokenizer):
        return data
    say("content in several text parts is joined by line breaks, because the chat template accepts only text")
    return type(data)({name: _joined(rows, chats[name]) for name, rows in data.items()})


def _takes_parts(tokenizer: Any) -> bool:
    try:
        text = render_chat(tokenizer, [{"role": "user", "content": "a"}], tokenize=False)
    except TemplateError:
        return True  # unknown: the rows are rendered later
    try:
        parts = [{"type": "text", "text": "a"}]
        return bool(text == render_chat(tokenizer, [{"role": "user", "content": parts}], tokenize=False))
    except TemplateError:
        return False


def _joined(rows: Any, chats: list[str]) -> Any:
    from datasets import Features, Json, List

    if not chats:
        return rows
    features = rows.features and Features({**rows.features, **{name: List(Json()) for name in chats}})
    return rows.map(_joined_row, fn_kwargs={"chats": chats}, features=features)


def _joined_row(row: dict[str, Any], chats: list[str]) -> dict[str, Any]:
    return row | {
        name: [{**message, "content": _text(message.get("content"))} for message in row[name]]
        for name in chats
        if isinstance(row[name], list)
    }


def _text(content: Any) -> Any:
    parts = content if isinstance(content, list) else []
    plain = parts and all(part["type"] == "text" for part in parts)
    return "\n".join(part["text"] for part in parts) if plain else content


def check_pictures(settings: Settings, tokenizer: Any, data: Any) -> None:
    """Raise DataError if the rows have images, but the model accepts none, or if the processor refuses a sampled row."""
    problems = [p for name, rows in data.items() for p in _problems(settings, tokenizer, name, rows)]
    if problems:
        raise data_error(settings.data_name, problems)


def _problems(settings: Settings, tokenizer: Any, split: str, rows: Any) -> Iterator[Problem]:
    columns = picture_columns(rows)
    if not columns or not settings.method.takes_pictures:
        return
    if not hasattr(tokenizer, "tokenizer"):
        what = (
            f"{split}: images in the column {listed(map(repr, columns))}, and a model that accepts only text"
        )
        expected = "a model with an image processor"
        yield Problem(what, expected, "use such a model, or omit the column")
        return
    if not hasattr(rows, "__len__"):
        return
    collator = Pictured(tokenizer)
    for at in range(0, len(rows), max(1, -(-len(rows) // _TRIED))):
        try:
            batch, _ = collator.encoded([collator.written(rows[at], name) for name in answers_in(rows[at])])
        except (TemplateError, OSError, *ERRORS) as error:
            expected = "turns and images that the processor of the model accepts"
            yield Problem(f"{split}, row {at + 1}: {one_line(error)}", expected, "correct the row")
            continue
        if settings.method.loss == "policy" and (returned := _not_passed_on(settings.method, batch)):
            what = f"{split}, row {at + 1}: {type(tokenizer).__name__} returns {listed(returned)} for images"
            expected = f"outputs that {settings.method.trainer_class().__name__} of TRL passes to the model"
            yield Problem(what, expected, "train this model by sft, or on rows without images")
            return


def _not_passed_on(method: Method, batch: Mapping[str, Any]) -> list[str]:
    """Return the processor's outputs that the trainer of grpo or rloo cannot pass to the model."""
    surplus = sorted(batch.keys() - inputs_of_policy(method.trainer_class()))
    # TRL (1.16) converts the processor's lists by NumPy, which has no bfloat16.
    low = (name for name, value in batch.items() if getattr(value, "dtype", None) == torch.bfloat16)
    return surplus or [f"{name} in bfloat16" for name in low]


def fitting(
    settings: Settings, tokenizer: Any, data: Any, say: Callable[[str], object]
) -> tuple[Settings, Any]:
    """Apply `plain_contents`. If rows have images, drop rows of more than `max_length` tokens.

    Return (settings, data). The settings then have no `max_length`, because rows with images are not cut.

    Raises:
        DataError: rows with images are longer than `max_length`, and `--excess_length_strategy` is not `drop`.
        UsageError: the arguments request packing of rows with images.
    """
    data = plain_contents(tokenizer, data, say)
    columns = [name for rows in data.values() for name in picture_columns(rows)]
    if not columns or not settings.method.takes_pictures:
        return settings, data
    for name in ("packing", "padding_free"):
        if settings.value(name):
            what = f"--{name} True, and images in the column {columns[0]!r}"
            expected, fix = "a separate row of the batch for each example", f"omit --{name}"
            raise UsageError.of("rows with images are not joined", what, expected, fix)
    if settings.value("train_sampling_strategy") == "group_by_length":
        what = f"--train_sampling_strategy group_by_length, and images in the column {columns[0]!r}"
        expected = "rows of text, because the trainer counts the tokens of a row before the images of the row are read"
        raise UsageError.of("rows with images cannot be grouped by length", what, expected, "omit it")
    limit = settings.command.given("max_length")
    fitting_rows = {}
    problems: list[Problem] = []
    for split, rows in data.items():
        fitting_rows[split] = rows
        if not isinstance(limit, int) or not hasattr(rows, "__len__"):
            continue
        lengths = dict(_longer(Pictured(tokenizer), rows, limit))
        if lengths and settings.excess_length_strategy == "drop":
            longer = f"{len(lengths):,} of {plural(len(rows), 'row')} in '{split}' are longer than max_length {limit}"
            say(f"{longer} and dropped, because images are not cut")
            fitting_rows[split] = rows.select(at for at in range(len(rows)) if at not in lengths)
            lengths = {} if len(fitting_rows[split]) else lengths
        expected = f"at most max_length {limit} tokens, because images are not cut"
        fix = f"--max_length {max(lengths.values(), default=0)}, --max_length none, or --excess_length_strategy drop"
        words = ((at + 1, plural(n, "token")) for at, n in lengths.items())
        problems += [Problem(f"{split}, row {row}: {tokens}", expected, fix) for row, tokens in words]
    if problems:
        raise data_error(settings.data_name, problems)
    return settings.but(max_length=None), type(data)(fitting_rows)


def _longer(collator: Pictured, rows: Any, limit: int) -> Iterator[tuple[int, int]]:
    shown_rows = with_bar(undecoded(rows), "counting the tokens of rows with images", len(rows))
    for at, row in enumerate(shown_rows):
        tokens, _ = collator.count(row)
        if tokens > limit:
            yield at, tokens


@contextmanager
def pictures_named(trainer: Any) -> Iterator[None]:
    """If a trainer cannot decode an image, raise DataError with the number of the row that contains the image."""
    try:
        yield
    except (OSError, SyntaxError) as error:
        if getattr(error, "errno", None) is None:  # an error of Pillow, not of the operating system
            evaluation = trainer.eval_dataset
            evaluation = evaluation if isinstance(evaluation, dict) else {"evaluation": evaluation}
            for split, rows in {"train": trainer.train_dataset, **evaluation}.items():
                if hasattr(rows, "__len__") and picture_columns(rows):
                    read = partial(picture_problem, whole=True)
                    for at, row in enumerate(undecoded(rows), 1):
                        if problem := next(filter(None, map(read, pictures_in(row))), None):
                            what = replace(problem, given=f"{split}, row {at}: {problem.given}")
                            raise data_error("datasets", [what]) from error
        raise


def dropped_examples(settings: Settings, rows: Sequence[Any] | Any, prepared: Any) -> str | None:
    """Describe the rows that the trainer dropped because of `max_length`; None if the trainer dropped no row.

    Raises:
        DataError: all rows were dropped.
    """
    countable = hasattr(rows, "__len__") and hasattr(prepared, "__len__")
    if not settings.method.dropped or not countable or settings.packing:
        return None
    dropped = len(rows) - len(prepared)
    if dropped <= 0:
        return None
    why = _why_dropped(settings, "input_ids" in getattr(rows, "column_names", ()))
    if len(prepared) == 0:
        raise _none_left(f"all {len(rows)} examples were dropped: {why}")
    return f"{dropped} of {len(rows)} examples were dropped: {why}"


def require_rows_left(settings: Settings, lengths: Lengths | None) -> None:
    """Raise DataError if the trainer will drop all rows, because of `max_length`."""
    limit, method = settings.max_length, settings.method
    if lengths is None or len(lengths.tokens) < lengths.rows or limit is None:
        return  # unknown, or not cut
    if not method.dropped or settings.packing or settings.truncation_mode == "keep_end":
        return
    prompts_count = method.loss == "labels" and settings.completion_only_loss is False
    whole = min(lengths.tokens) > limit if method.loss == "reward" else lengths.prompt >= limit
    if whole and not prompts_count:
        raise _none_left(f"all {plural(lengths.rows, 'example')} would be dropped: {_why_dropped(settings)}")


def _why_dropped(settings: Settings, labelled: bool = False) -> str:
    if labelled or settings.assistant_only_loss:
        return f"none of their first {settings.max_length} tokens has loss"
    return f"{settings.method.dropped} max_length {settings.max_length}"


def _none_left(what: str) -> DataError:
    return DataError.of("no example is left to train on", what, "shorter examples", "--max_length N")
