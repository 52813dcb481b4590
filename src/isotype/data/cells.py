"""What a cell of each column may hold, and what is wrong with one that does not."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]

REFILL = "fill it in, or remove the example"


def describe(value: object) -> str:
    """What kind of value this is, in a user's words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, (int, float)):
        return "a number"
    if isinstance(value, str):
        return "text" if value else "empty text"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    return "an object" if isinstance(value, dict) else f"a {type(value).__name__}"


def _text_fault(value: object) -> str | None:
    return None if isinstance(value, str) and value else f"is {describe(value)}"


def _content_fault(message: Row) -> str | None:
    content = message.get("content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return None
    if content is None:
        return "holds a message without 'content'"
    if not isinstance(content, list):
        return f"holds a message whose 'content' is {describe(content)}"
    if all(isinstance(part, dict) and isinstance(part.get("type"), str) for part in content):
        return None
    return "holds a message whose 'content' has a part without 'type'"


def messages_fault(value: object) -> str | None:
    """What is wrong with a list of {role, content} messages."""
    if not isinstance(value, list) or not value:
        return f"is {describe(value)}"
    for message in value:
        if not isinstance(message, dict):
            return f"holds {describe(message)} where a message belongs"
        role = message.get("role")
        if role is None:
            return "holds a message without 'role'"
        if not isinstance(role, str) or not role:
            return f"holds a message whose 'role' is {describe(role)}"
        if fault := _content_fault(message):
            return fault
    return None


def conversation_fault(value: object) -> str | None:
    """What is wrong with a list of {from, value} messages."""
    if not isinstance(value, list) or not value:
        return f"is {describe(value)}"
    for message in value:
        if not isinstance(message, dict):
            return f"holds {describe(message)} where a message belongs"
        for key in ("from", "value"):
            if not isinstance(message.get(key), str):
                return f"holds a message without '{key}'"
    return None


def _text_or_messages_fault(value: object) -> str | None:
    return messages_fault(value) if isinstance(value, list) else _text_fault(value)


def _ids_fault(value: object) -> str | None:
    if not isinstance(value, list) or not value:
        return f"is {describe(value)}"
    wrong = set(map(type, value)) - {int}
    if not wrong:
        return f"holds {min(value)}" if min(value) < 0 else None
    return f"holds {describe(next(item for item in value if type(item) in wrong))} where a token id belongs"


def _label_fault(value: object) -> str | None:
    return None if isinstance(value, bool) else f"is {describe(value)}"


def _number_fault(value: object) -> str | None:
    return (
        None if isinstance(value, (int, float)) and not isinstance(value, bool) else f"is {describe(value)}"
    )


def _tools_fault(value: object) -> str | None:
    if value is None or (isinstance(value, list) and all(isinstance(tool, dict) for tool in value)):
        return None
    if not isinstance(value, str):
        return f"is {describe(value)}"
    try:
        return _tools_fault(json.loads(value))
    except (json.JSONDecodeError, RecursionError):
        return "is text that is not JSON"


def _object_fault(value: object) -> str | None:
    return None if isinstance(value, dict) else f"is {describe(value)}"


@dataclass(frozen=True)
class Column:
    """What a column must hold: the words for it, the test, and what to do when it does not."""

    expected: str
    fault: Callable[[object], str | None]
    fix: str


_MESSAGES_FIX = 'write [{"role": "user", "content": "…"}, …]; a CSV cell cannot hold a list, a JSON line can'


_TURNS = Column(
    "text, or a list of {role, content} messages",
    _text_or_messages_fault,
    'write "…", or [{"role": "user", "content": "…"}, …]',
)


TEXT = Column("text", _text_fault, 'write it as text: "…"')


_IDS = Column("a list of token ids", _ids_fault, "write whole numbers from 0 on, as a tokenizer returns them")


_NUMBER = Column("a number", _number_fault, "write a number without quotes")


COLUMNS: Mapping[str, Column] = {
    "text": TEXT,
    "prompt": _TURNS,
    "completion": _TURNS,
    "chosen": _TURNS,
    "rejected": _TURNS,
    "messages": Column("a list of {role, content} messages", messages_fault, _MESSAGES_FIX),
    "conversations": Column(
        "a list of {from, value} messages",
        conversation_fault,
        "write {role, content} messages in a column 'messages'",
    ),
    "label": Column(
        "true or false", _label_fault, "write true for a good completion and false for a bad one"
    ),
    "margin": _NUMBER,
    "ref_chosen_logps": _NUMBER,
    "ref_rejected_logps": _NUMBER,
    "tools": Column(
        "null, or a list of tool schemas", _tools_fault, "write JSON schemas, or JSON text of them"
    ),
    "chat_template_kwargs": Column("an object", _object_fault, "write {} where a row sets nothing"),
    **dict.fromkeys(("input_ids", "chosen_ids", "rejected_ids"), _IDS),
}


# A CSV cell of any other column may be read as a number or as true/false.
TEXT_COLUMNS = frozenset(COLUMNS) - {"label", "margin", "ref_chosen_logps", "ref_rejected_logps"}


TURN_COLUMNS = ("prompt", "completion", "chosen", "rejected")
