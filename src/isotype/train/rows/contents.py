"""Contents that a model's chat template and processor take: text or parts, pictures and where they end."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from jinja2 import TemplateError

from isotype.compat.templates import ERRORS, render_chat
from isotype.core.errors import Problem, one_line
from isotype.core.names import listed
from isotype.data.cells import CHATS
from isotype.data.locate import data_error
from isotype.data.pictures import PICTURE_COLUMNS, broken_rows
from isotype.train.command.settings import Settings

_TRIED = 64
"""Rows with pictures that go through the processor before the model is loaded."""


def plain_contents(tokenizer: Any, data: Any, say: Callable[[str], object]) -> Any:
    """The splits with content in text parts joined by line breaks, where the chat template writes text alone."""
    if hasattr(tokenizer, "tokenizer") or not getattr(tokenizer, "chat_template", None):
        return data
    chats = {}  # columns of chats whose content may be parts, by their types; for a stream without types, all
    for name, rows in data.items():
        if (features := getattr(rows, "features", None)) is None:
            chats[name] = sorted(CHATS & next(iter(rows), {}).keys())
        else:
            chats[name] = lists_in(features, CHATS, lambda turn: hasattr(turn.get("content"), "feature"))
    if not any(chats.values()) or _takes_parts(tokenizer):
        return data
    say("content in several text parts is joined by line breaks: the chat template writes text alone")
    return type(data)({name: _joined(rows, chats[name]) for name, rows in data.items()})


def lists_in(features: Mapping[str, Any], names: Collection[str], wanted: Callable[[Any], bool]) -> list[str]:
    """The columns among `names` that are lists of objects whose types are `wanted`, or are not known."""
    items = {name: getattr(features[name], "feature", None) for name in features if name in names}
    known = {name: item for name, item in items.items() if item is not None}
    return [name for name, item in known.items() if not isinstance(item, Mapping) or wanted(item)]


def _takes_parts(tokenizer: Any) -> bool:
    try:
        text = render_chat(tokenizer, [{"role": "user", "content": "a"}], tokenize=False)
    except TemplateError:
        return True  # nothing is known: the rows themselves will show it
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
    """Refuse pictures that cannot be opened, and where the model takes none or `max_length` cuts one, by up to 64 rows of each split.

    Raises:
        DataError: it does not.
    """
    problems = [each for name, rows in data.items() for each in _problems(settings, tokenizer, name, rows)]
    if problems:
        raise data_error(settings.script.dataset_name or "datasets", problems)


def _problems(settings: Settings, tokenizer: Any, split: str, rows: Any) -> Iterator[Problem]:
    columns = [name for name in ("image", "images") if name in next(iter(rows), {})]
    if not columns or not set(columns) & set(settings.method.optional):
        return
    if not hasattr(tokenizer, "tokenizer"):
        what = (
            f"{split}: pictures in the column {listed(map(repr, columns))}, and a model that takes text alone"
        )
        expected = "a model with a processor of pictures"
        yield Problem(what, expected, "give such a model, or leave the column out")
        return
    limit, token = getattr(settings.training, "max_length", None), getattr(tokenizer, "image_token_id", None)
    if not hasattr(rows, "__len__"):
        return
    for at in range(0, len(rows), max(1, -(-len(rows) // _TRIED))):
        place = f"{split}, row {at + 1}"
        try:
            count, last = _places(tokenizer, rows[at], token)
        except (TemplateError, OSError, *ERRORS) as error:
            expected = "turns and pictures that the model's processor takes"
            yield Problem(f"{place}: {one_line(error)}", expected, "correct the row")
            continue
        if limit is not None and last > limit:
            what = f"{place}: max_length {limit} cuts a picture, whose last token is number {last}"
            yield Problem(what, "a length that holds every picture whole", f"--max_length {count}, or None")


@contextmanager
def pictures_named(trainer: Any) -> Iterator[None]:
    """Name the row of a picture that a trainer meets and cannot decode.

    Raises:
        DataError: with the first such rows.
    """
    try:
        yield
    except (OSError, SyntaxError) as error:
        if getattr(error, "errno", None) is None:  # not the system's: pillow's own
            held = (
                trainer.eval_dataset
                if isinstance(trainer.eval_dataset, dict)
                else {"evaluation": trainer.eval_dataset}
            )
            splits = {"train": trainer.train_dataset, **held}
            for split, rows in splits.items():
                if hasattr(rows, "__len__") and {*PICTURE_COLUMNS} & {*rows.column_names}:
                    for at, problem in broken_rows(rows, whole=True):
                        what = replace(problem, given=f"{split}, row {at + 1}: {problem.given}")
                        raise data_error("datasets", [what]) from error
        raise


def _places(processor: Any, row: Mapping[str, Any], token: int | None) -> tuple[int, int]:
    """(tokens of a row, the number of the last one that is a picture's; 0 without any)."""
    from trl import prepare_multimodal_messages

    pictures = row["images"] if row.get("images") is not None else list(filter(None, [row.get("image")]))
    turns = row.get("messages") or row.get("prompt") or row.get("text")
    if isinstance(turns, list):
        turns = prepare_multimodal_messages([dict(turn) for turn in turns], images=pictures)
        if isinstance(row.get("completion"), list):
            turns += prepare_multimodal_messages([dict(turn) for turn in row["completion"]])
        made = render_chat(processor, turns, tokenize=True, return_dict=True)
    elif turns:
        made = processor(text=turns, images=pictures or None)
    else:
        return 0, 0
    ids = made["input_ids"][0]
    kinds = made.get("mm_token_type_ids", made.get("token_type_ids"))
    marks = [each == token for each in ids] if kinds is None else list(kinds[0])
    return len(ids), max((number for number, mark in enumerate(marks, 1) if mark), default=0)
