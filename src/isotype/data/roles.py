"""Who speaks in a chat: roles that no chat template knows, and chats in which nobody answers."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence

from isotype.core.errors import Problem

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "observation")
"""The roles that chat templates write."""

ANSWERS = frozenset({"messages", "conversations", "completion", "chosen", "rejected"})
"""Columns that hold what is learned, if they hold a chat."""

CHATS = ANSWERS | {"prompt"}

_MEANT = {
    "human": "user",
    "gpt": "assistant",
    "ai": "assistant",
    "bot": "assistant",
    "chatbot": "assistant",
    "model": "assistant",
}


def chat_problems(column: str, value: object) -> Iterator[Problem]:
    """What is wrong with the roles of one chat, whose messages are sound otherwise; nothing for plain text."""
    if not isinstance(value, list):
        return
    roles = [str(message["role"]) for message in value]
    for role in dict.fromkeys(roles):
        meant = _meant(role)
        if meant is not None:
            what = f"column '{column}' holds a message of the role '{role}'"
            yield Problem(what, f"one of {', '.join(ROLES)}", f"did you mean '{meant}'?")
    # Of a role of the template's own nobody knows whether it answers.
    if column in ANSWERS and "assistant" not in roles and set(ROLES).issuperset(roles):
        yield Problem(
            f"column '{column}' holds no message of the assistant",
            "at least one, which is what is learned",
            "add the answer, or remove the example",
        )


def _meant(role: str) -> str | None:
    """The role that was most likely meant by one that is none; None for a role, and for names like no role's.

    What is like none may be a role of the model's own template.
    """
    if role in ROLES:
        return None
    near = difflib.get_close_matches(role.lower(), ROLES, n=1, cutoff=0.75)
    return near[0] if near else _MEANT.get(role.lower())


def mixed_turns(row: Mapping[str, object], names: Sequence[str]) -> Problem | None:
    """The problem of a row whose turns are text in one column and messages in another."""
    plain = [name for name in names if isinstance(row[name], str)]
    if not plain or len(plain) == len(names):
        return None
    spoken = next(name for name in names if name not in plain)
    return Problem(
        f"'{plain[0]}' is text but '{spoken}' is a list of messages",
        f"one kind of value in {', '.join(map(repr, names))}",
        "write all of them as text, or all as messages",
    )
