"""Convert conversations in ShareGPT's format ({from, value} messages) to messages with the roles of chat templates.

The names of speakers come from FastChat, axolotl, LLaMA-Factory, unsloth and the Hermes data sets. TRL renames only the
keys of messages. If speakers were not renamed, templates would write `<|im_start|>gpt`, a role that models do not know.
"""

import json
from collections import Counter
from itertools import chain
from typing import Any

from isotype.core.errors import Problem
from isotype.core.names import listed
from isotype.data.cells import (
    CHATS,
    OTHER_NAMES,
    TURN_COLUMNS,
    Row,
    chat_problems,
    conversation_fault,
    messages_fault,
)

CALL = "assistant, with a tool call"
SPEAKERS = {name: role for role, names in OTHER_NAMES["speakers"].items() for name in names}
"""Maps the value of `from` in lower case to the role of the message."""

_CALL_FORM = '{"name": "…", "arguments": {…}}, or a list of such objects'


def standard_chats(row: Row, names: Counter[str] | None, *, conversations: bool) -> Row | Problem:
    """Rename `conversations` to `messages`, and convert all columns of chats to {role, content} messages.

    Return the row or its problem. A single message in `TURN_COLUMNS` becomes a list. If a conversation has no system
    message, the column `system` becomes its first message, as in LLaMA-Factory.

    Args:
        names: counter for the messages of each speaker, or None.
        conversations: True if a column `conversations` is converted.
    """
    counted: Counter[str] = Counter()
    result: Row = {}
    for name, value in row.items():
        if name in TURN_COLUMNS and isinstance(value, dict) and {"from", "role"} & value.keys():
            value = [value]
        converts = conversations if name == "conversations" else name in CHATS and _is_shared(value)
        if not converts:
            result[name] = value
            continue
        if name == "conversations" and {"messages", "prompt"} & row.keys():
            continue  # the trainer takes the other column
        messages = _messages(name, value, counted)
        if isinstance(messages, Problem):
            return messages
        result["messages" if name == "conversations" else name] = messages
    system = row.get("system")
    if "messages" in result and "messages" not in row and isinstance(system, str):
        if system and result["messages"][0]["role"] != "system":
            result["messages"] = [{"role": "system", "content": system}, *result["messages"]]
        del result["system"]
    if names is not None:
        names.update(counted)
    return result


def roles_line(source: str, names: Counter[str], sample: int | None) -> str | None:
    """Return a line about the roles of speakers; None without speakers. `sample`: number of counted rows; None for all."""
    if not names:
        return None
    counts = names.most_common()
    read = ", ".join(f"{count:,} of '{name}' as {SPEAKERS[name.lower()]}" for name, count in counts)
    among = "" if sample is None else f" (in the first {sample:,} rows)"
    return f"{source}: ShareGPT messages get the roles of chat templates: {read}{among}"


def _is_shared(value: object) -> bool:
    if not isinstance(value, list) or not value or not isinstance(value[0], dict):
        return False
    return "from" in value[0] and "role" not in value[0]


def _messages(column: str, value: Any, names: Counter[str]) -> list[Row] | Problem:
    """Return the messages of a chat as {role, content}, or the first problem of the chat."""
    standard = isinstance(value, list) and value and isinstance(value[0], dict) and "role" in value[0]
    fault = messages_fault(value) if standard else conversation_fault(value)
    if fault:
        fix = "write [{…}, …] with 'from' and 'value', or with 'role' and 'content'"
        return Problem(f"column '{column}' {fault}", "a list of {from, value} messages", fix)
    if not standard:
        unknown = [name for name in dict.fromkeys(m["from"] for m in value) if name.lower() not in SPEAKERS]
        if unknown:
            what = f"column '{column}' holds a message from {listed(map(repr, unknown))}"
            fix = "rename the speaker; if the chat template has such a role, write {role, content} messages in a column 'messages'"
            return Problem(what, f"one of {', '.join(SPEAKERS)}", fix)
    converted = value if standard else [_message(column, message) for message in value]
    messages = [message for message in converted if not isinstance(message, Problem)]
    wrong = (message for message in converted if isinstance(message, Problem))
    if problem := next(chain(wrong, chat_problems(column, messages)), None):
        return problem
    if not standard:
        names.update(message["from"] for message in value)
    return messages


def _message(column: str, message: Row) -> Row | Problem:
    role = SPEAKERS[message["from"].lower()]
    rest = {key: value for key, value in message.items() if key not in ("from", "value")}
    if role != CALL:
        return {"role": role, "content": message["value"], **rest}
    calls = _calls(message["value"])
    if calls is None:
        what = f"column '{column}' holds a '{message['from']}' whose 'value' is no tool call"
        return Problem(what, f"JSON: {_CALL_FORM}", "correct the call, or write a message of 'gpt'")
    return {"role": "assistant", "content": "", "tool_calls": calls, **rest}


def _calls(text: str) -> list[Row] | None:
    """Convert a JSON text to tool calls in the format of chat templates. Return None if the text contains no call."""
    value = _parsed(text)
    calls = value if isinstance(value, list) else [value]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        return None
    # Chat templates write arguments as JSON, so arguments that are JSON text are parsed.
    arguments = (_parsed(call.get("arguments", call.get("parameters", {}))) for call in calls)
    functions = (
        {"name": call["name"], "arguments": args} for call, args in zip(calls, arguments, strict=True)
    )
    return [{"type": "function", "function": function} for function in functions]


def _parsed(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (json.JSONDecodeError, RecursionError):
        return value
