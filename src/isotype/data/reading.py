"""Converts rows of a data set to the format of a trainer: names of columns, roles of messages, images, labels."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isotype.core.errors import DataError, Problem
from isotype.data.cells import CHATS, Row, as_messages
from isotype.data.methods import CHAT_COLUMNS, METHODS
from isotype.data.pictures import PICTURE_COLUMNS, pictures_in
from isotype.data.placed import CAPTIONS, with_places
from isotype.data.sharegpt import standard_chats
from isotype.data.tokens import TOKEN_COLUMNS, with_labels

PRESETS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    # Rows of tatsu-lab/stanford_alpaca have an instruction, sometimes an input, and an output.
    "alpaca": {"prompt": ("instruction", "input"), "completion": ("output",)},
}
OPTIONAL_SOURCES = frozenset({"input"})  # Alpaca's rows may lack this column


@dataclass(frozen=True)
class ColumnMap:
    """Maps the columns of the data set to the columns that a trainer accepts.

    Attributes:
        targets: pairs (column of the trainer, columns of the data set). If there are several columns, their non-empty texts are
            joined by blank lines.
        origin: argument or file in which the user named the columns.
    """

    targets: tuple[tuple[str, tuple[str, ...]], ...]
    origin: str = "--columns"

    @property
    def sources(self) -> frozenset[str]:
        return frozenset(name for _, names in self.targets for name in names)

    def apply(self, row: Mapping[str, Any]) -> dict[str, Any] | Problem:
        """Return the row with the trainer's column names. Columns without a new name are kept.

        Return a problem if a column is missing, or if a kept column already has the new name of another column.
        """
        missing = sorted(self.sources - OPTIONAL_SOURCES - set(row))
        if missing:
            what = f"no column {', '.join(map(repr, missing))}, which {self.origin} names"
            expected = f"one of the existing columns: {', '.join(map(repr, row))}"
            return Problem(what, expected, f"correct {self.origin}")
        mapped = {name: value for name, value in row.items() if name not in self.sources}
        for target, names in self.targets:
            if target in mapped:
                sources = " and ".join(map(repr, names))
                return Problem(
                    f"{self.origin} renames {sources} to '{target}', but the data has another column '{target}'",
                    "different names for the columns",
                    f"to keep both, also rename the column of the data: add other={target}; to train on the data's '{target}', remove {target}={names[0]}",
                )
            texts = (str(row[name]) for name in names if row.get(name) not in (None, ""))
            mapped[target] = row[names[0]] if len(names) == 1 else "\n\n".join(texts)
        return mapped


def parse_columns(value: object, origin: str = "--columns") -> ColumnMap | None:
    """Parse a map from the columns of the trainer to the columns of the data set; return None for None.

    `value` is the name of a preset, a text such as `prompt=question,completion=answer`, or a dict. Raise DataError if
    `value` has another form.
    """
    if value is None:
        return None
    if isinstance(value, str) and value in PRESETS:
        return ColumnMap(tuple(PRESETS[value].items()), origin)
    pairs: list[tuple[Any, Any]] = [*value.items()] if isinstance(value, dict) else []
    if isinstance(value, str):
        named = (part.partition("=") for part in value.split(","))
        pairs = [(target.strip(), source.strip()) for target, _, source in named]
    targets = tuple(
        (target, tuple(names) if isinstance(names, list) else (names,)) for target, names in pairs
    )
    parsed = (name for target, names in targets for name in (target, *names))
    if not targets or not all(isinstance(name, str) and name for name in parsed):
        expected = f"{', '.join(PRESETS)}, pairs TRAINER=DATASET, or such a mapping in a configuration file"
        fix = (
            "--columns prompt=question,completion=answer, or columns: {prompt: question, completion: answer}"
        )
        raise DataError.of("the columns cannot be parsed", f"{origin}: {value}", expected, fix)
    if len(dict(targets)) < len(targets):
        expected, fix = "each column of the trainer once", "remove one of the pairs"
        raise DataError.of("two columns would become one", f"{origin}: {value}", expected, fix)
    return ColumnMap(targets, origin)


@dataclass(frozen=True)
class Reading:
    """The conversion of all rows of a data set for a training method.

    Attributes:
        only: the columns of the data set that are read; None for all columns.
        text_field: name of SFT's plain text column.
        columns: map from the columns of the data set to the columns of the trainer; None if no column is renamed.
        chat: True if plain text becomes messages (see `as_messages`).
        joined: True if prompt and completion become the column `messages`. Columns in `CHAT_COLUMNS` are also kept.
        prompts: True if the loss includes prompt tokens (`--completion_only_loss False`).
        lines: True if each line of a .txt file is an example, False if the whole file is one example.
        pictured: True if rows without images get the format of rows with images.
    """

    method: str
    columns: ColumnMap | None = None
    chat: bool = False
    joined: bool = False
    prompts: bool = False
    lines: bool = False
    pictured: bool = False
    text_field: str = "text"
    only: tuple[str, ...] | None = None

    @property
    def takes_pictures(self) -> bool:
        return METHODS[self.method].takes_pictures

    @property
    def reads(self) -> frozenset[str]:
        sources = self.columns.sources if self.columns is not None else frozenset()
        pictures = {*PICTURE_COLUMNS, *CAPTIONS} if self.takes_pictures else set()
        return CHATS | sources | {"system", *TOKEN_COLUMNS} | pictures

    def apply(self, row: Row, names: Counter[str] | None = None, folder: Path | None = None) -> Row | Problem:
        """Return the row in the format that the trainer accepts, or the problem with the row.

        Args:
            names: counter for the speakers of {from, value} messages (see `standard_chats`), or None.
            folder: folder of the row's file, to which image paths are relative, or None for a data set of `datasets`.
        """
        if self.only is not None:
            row = {name: row[name] for name in self.only if name in row}
        mapped = row if self.columns is None else self.columns.apply(row)
        if isinstance(mapped, Problem):
            return mapped
        if self.method == "sft" and "input_ids" in mapped:
            return with_labels(mapped, self.prompts)
        standard = standard_chats(mapped, names, conversations=self.method == "sft")
        if isinstance(standard, Problem):
            return standard
        chat: Any = standard.get("messages")
        unpaired = METHODS[self.method].loss == "unpaired"
        if unpaired and "completion" not in standard and isinstance(chat, list) and len(chat) > 1:
            del standard["messages"]  # in LLaMA-Factory's rows the label belongs to the last message
            standard = {**standard, "prompt": chat[:-1], "completion": chat[-1:]}
        if self.takes_pictures:
            standard = with_places(standard, folder, pictured=self.pictured)
            if isinstance(standard, Problem):
                return standard
            if unpaired and pictures_in(standard) and "chosen" in standard:
                expected = "one completion and its label in each row with images"
                fix = "write a pair as two rows with 'prompt', 'completion' and 'label'"
                return Problem("a pair of answers with images", expected, fix)
        if self.chat or self.joined:
            standard = as_messages(standard)
        return _joined(standard) if self.joined else standard


def _joined(row: Row) -> Row:
    chat: Any = row.get("messages")
    if chat is None:
        chat = [*row["prompt"], *row["completion"]]
    return {"messages": chat, **{name: row[name] for name in CHAT_COLUMNS if name in row}}
