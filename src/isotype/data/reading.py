"""How the rows of a data set become a trainer's: under its names, with the roles of chat templates, in one form."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from isotype.core.errors import Problem
from isotype.data.cells import TURN_COLUMNS, Row
from isotype.data.mapping import ColumnMap
from isotype.data.methods import CHAT_COLUMNS
from isotype.data.roles import CHATS
from isotype.data.sharegpt import standard_chats


@dataclass(frozen=True)
class Reading:
    """What is done to every row of a data set, whichever way it is stored.

    Attributes:
        method: a key of `METHODS`.
        columns: the trainer's names for the data set's columns.
        chat: prompts and answers that are text become messages of user and assistant.
        joined: prompt and completion become one conversation, `messages`; only what belongs to it stays.
    """

    method: str
    columns: ColumnMap | None = None
    chat: bool = False
    joined: bool = False

    @property
    def reads(self) -> frozenset[str]:
        """The columns that may be changed."""
        sources = self.columns.sources if self.columns is not None else frozenset()
        return CHATS | sources | {"system"}

    def apply(self, row: Row, names: Counter[str] | None = None) -> Row | Problem:
        """The row as the trainer takes it, or what is wrong with it.

        Args:
            row: as it is stored.
            names: counts the speakers of {from, value} messages, see `standard_chats`.
        """
        mapped = row if self.columns is None else self.columns.apply(row)
        if isinstance(mapped, Problem):
            return mapped
        standard = standard_chats(mapped, names, conversations=self.method == "sft")
        if isinstance(standard, Problem):
            return standard
        if self.chat or self.joined:
            standard = _spoken(standard)
        return _joined(standard) if self.joined else standard


def _spoken(row: Row) -> Row:
    """The row with every turn of text as a list of one message."""
    roles = {name: "user" if name == "prompt" else "assistant" for name in TURN_COLUMNS}
    return {
        name: [{"role": roles[name], "content": value}] if name in roles and isinstance(value, str) else value
        for name, value in row.items()
    }


def _joined(row: Row) -> Row:
    chat: Any = row.get("messages")
    if chat is None:
        chat = [*row["prompt"], *row["completion"]]
    return {"messages": chat, **{name: row[name] for name in CHAT_COLUMNS if name in row}}
