"""Checks of a row's cells: types of values, roles and parts of messages, and keys that exclude messages from the loss."""

import difflib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isotype.core.errors import Problem
from isotype.core.names import listed, plural
from isotype.core.tables import table

Row = dict[str, Any]

_OTHERS = table(__file__, "names.json")
OTHER_NAMES: Mapping[str, Mapping[str, list[str]]] = {
    kind: {name: others.split() for name, others in names.items()} for kind, names in _OTHERS.items()
}
"""Maps the keys `columns`, `methods` and `speakers` (of ShareGPT) to {isotype's name: other names in data sets}."""

REFILL = "fill in the column, or remove the example"


def describe(value: object) -> str:
    """Return the kind of a JSON value in plain words, such as "an empty list"."""
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


def _message_fault(message: Row) -> str | None:
    role = message.get("role")
    if role is None:
        return "holds a message without 'role'"
    if not isinstance(role, str) or not role:
        return f"holds a message whose 'role' is {describe(role)}"
    return _content_fault(message)


def messages_fault(value: object, judge: Callable[[Row], str | None] = _message_fault) -> str | None:
    """Return the fault of a list of messages, or None. `judge` checks a message; by default, its role and content are checked."""
    if not isinstance(value, list) or not value:
        return f"is {describe(value)}"
    for message in value:
        if not isinstance(message, dict):
            return f"holds {describe(message)} where a message belongs"
        if fault := judge(message):
            return fault
    return None


def conversation_fault(value: object) -> str | None:
    def judge(message: Row) -> str | None:
        lacking = next((key for key in ("from", "value") if not isinstance(message.get(key), str)), None)
        return lacking and f"holds a message without '{lacking}'"

    return messages_fault(value, judge)


def _ids_fault(value: object) -> str | None:
    if not isinstance(value, list) or not value:
        return f"is {describe(value)}"
    wrong = set(map(type, value)) - {int}
    if not wrong:
        return f"holds {min(value)}" if min(value) < 0 else None
    return f"holds {describe(next(item for item in value if type(item) in wrong))} where a token id belongs"


def _fault_unless(*kinds: type) -> Callable[[object], str | None]:
    """Return a function that returns a value's fault; None if its type is one of `kinds`. A bool does not count as an int."""
    return lambda value: None if type(value) in kinds else f"is {describe(value)}"


def _tools_fault(value: object) -> str | None:
    if value is None or (isinstance(value, list) and all(isinstance(tool, dict) for tool in value)):
        return None
    if not isinstance(value, str):
        return f"is {describe(value)}"
    try:
        return _tools_fault(json.loads(value))
    except (json.JSONDecodeError, RecursionError):
        return "is text that is not JSON"


@dataclass(frozen=True)
class Column:
    """A column. `expected` describes valid values, `fault` returns the fault of a value or None, and `fix` corrects a fault."""

    expected: str
    fault: Callable[[object], str | None]
    fix: str


_MESSAGES_FIX = (
    'write [{"role": "user", "content": "…"}, …]; a CSV cell cannot contain a list, but a JSON line can'
)
_TURNS = Column(
    "text, or a list of {role, content} messages",
    lambda value: messages_fault(value) if isinstance(value, list) else _text_fault(value),
    'write "…", or [{"role": "user", "content": "…"}, …]',
)
TEXT = Column("text", _text_fault, 'write the cell as text: "…"')
_IDS = Column(
    "a list of token ids", _ids_fault, "write whole numbers of at least 0, as a tokenizer returns them"
)
_NUMBER = Column("a number", _fault_unless(int, float), "write a number without quotes")
_LABEL_FIX = "write true for a good completion and false for a bad one"
TURN_COLUMNS = ("prompt", "completion", "chosen", "rejected")
_NUMBERS = ("margin", "ref_chosen_logps", "ref_rejected_logps")

COLUMNS: Mapping[str, Column] = {
    "text": TEXT,
    **dict.fromkeys(TURN_COLUMNS, _TURNS),
    **dict.fromkeys(
        ("messages", "conversations"),
        Column("a list of {role, content} messages", messages_fault, _MESSAGES_FIX),
    ),
    "label": Column("true or false", _fault_unless(bool), _LABEL_FIX),
    **dict.fromkeys(_NUMBERS, _NUMBER),
    "tools": Column(
        "null, or a list of tool schemas", _tools_fault, "write JSON schemas, or JSON text of them"
    ),
    "chat_template_kwargs": Column(
        "an object", _fault_unless(dict), "write {} in a row without template arguments"
    ),
    **dict.fromkeys(("input_ids", "chosen_ids", "rejected_ids"), _IDS),
}

TEXT_COLUMNS = frozenset(COLUMNS) - {"label", *_NUMBERS}
"""Columns whose cells in a CSV file are always text. Cells of other columns may be numbers or true/false."""

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "observation")
"""Roles that chat templates write."""

ANSWERS = frozenset({"messages", "conversations", "completion", "chosen", "rejected"})
"""Columns whose chats contain trained answers."""

CHATS = ANSWERS | {"prompt"}

_MEANT = {"human": "user", **dict.fromkeys(("gpt", "ai", "bot", "chatbot", "model"), "assistant")}


def chat_problems(column: str, value: object) -> Iterator[Problem]:
    """Yield the problems with the roles in a chat of valid messages. Plain text has no roles and no problems."""
    if not isinstance(value, list):
        return
    roles = [str(message["role"]) for message in value]
    for role in dict.fromkeys(role for role in roles if role not in ROLES):
        # A role that is similar to none of `ROLES` may be defined by the model's chat template.
        near = difflib.get_close_matches(role.lower(), ROLES, n=1, cutoff=0.75)
        meant = near[0] if near else _MEANT.get(role.lower())
        if meant is not None:
            what = f"column '{column}' holds a message of the role '{role}'"
            yield Problem(what, f"one of {', '.join(ROLES)}", f"did you mean '{meant}'?")
    # The chat template may define another role, whose message may be the answer.
    if column in ANSWERS and "assistant" not in roles and set(ROLES).issuperset(roles):
        what = f"column '{column}' holds no message of the assistant"
        yield Problem(what, "at least one answer to train on", "add the answer, or remove the example")


def as_messages(row: Row) -> Row:
    """Convert the texts in `TURN_COLUMNS` to messages. The user writes prompts, and the assistant writes answers."""
    roles = {name: "user" if name == "prompt" else "assistant" for name in TURN_COLUMNS}
    return {
        name: [{"role": roles[name], "content": value}] if name in roles and isinstance(value, str) else value
        for name, value in row.items()
    }


def mixed_turns(row: Mapping[str, object], names: Sequence[str]) -> Problem | None:
    plain = [name for name in names if isinstance(row[name], str)]
    if not plain or len(plain) == len(names):
        return None
    spoken = next(name for name in names if name not in plain)
    what = f"'{plain[0]}' is text but '{spoken}' is a list of messages"
    expected = f"one kind of value in {', '.join(map(repr, names))}"
    return Problem(what, expected, "write all turns as text, or all turns as messages")


LEARNED_MARKS = (
    *("weight", "loss_weight"),  # OpenAI
    *("train", "training", "trainable", "train_on_turn"),  # axolotl
    *("loss", "loss_mask", "step_loss_mask"),  # ms-swift, xtuner; slime
)
_LEFT_OUT_MARKS = ("mask", "masked")  # torchtune
_PARTLY = ("train_detail", "training_detail")  # axolotl
MARKS = (*LEARNED_MARKS, *_LEFT_OUT_MARKS)
"""Keys of a message that include the message in the loss or exclude it."""

# 1, 1.0, 0 and 0.0 are equal to these.
_YES, _NO = (True, "true", "True", "1"), (False, "false", "False", "0")

_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
MESSAGE_KEYS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", *_THOUGHTS, *MARKS})
PART_KEYS = frozenset({"type", "text", "thinking"})


def left_out(message: Mapping[str, Any]) -> bool:
    marks = (*((key, _NO) for key in LEARNED_MARKS), *((key, _YES) for key in _LEFT_OUT_MARKS))
    return any(message.get(key) in values for key, values in marks)


def message_problems(row: Row, chats: Sequence[str], method: str, takes_pictures: bool) -> Iterator[Problem]:
    """Yield the problems of each message in a row: wrong values of keys in `MARKS` (loss or no loss), and wrong content."""
    for name in chats:
        for message in row[name] if isinstance(row[name], list) else ():
            yield from _mark_problems(name, message, method)
            parts = message.get("content")
            if isinstance(parts, list):
                problems = [_part_problem(name, part, takes_pictures) for part in parts]
                yield from dict.fromkeys(problem for problem in problems if problem)


def _mark_problems(column: str, message: Mapping[str, Any], method: str) -> Iterator[Problem]:
    for key in message.keys() & {*MARKS, *_PARTLY}:
        value = message[key]
        if value is None:
            continue
        what = f"column '{column}' holds a message with '{key}': {value!r}"[:200]
        if key in _PARTLY:
            expected = "turns in which all tokens have loss, or no token has loss"
            yield Problem(what, expected, "split the turn, or remove the key")
        elif value not in _YES and value not in _NO:
            yield Problem(what, "1 or true, 0 or false", "write 0 or 1, or remove the key")
        elif method != "sft" and column != "prompt" and left_out(message):
            expected = f"answers without this key, because {method} trains on every turn"
            yield Problem(what, expected, "remove the key")


def _part_problem(column: str, part: Mapping[str, Any], takes_pictures: bool) -> Problem | None:
    kind, holds = part["type"], f"column '{column}' holds"
    if kind in ("text", "thinking"):
        text = part.get(kind) if kind == "text" or "thinking" in part else part.get("text")
        if isinstance(text, str) or (kind == "thinking" and text is not None):
            return None
        what = f"{holds} a part whose '{kind}' is {describe(text)}"
        return Problem(what, "text", "write the content as text, or remove the part")
    if kind == "image" and takes_pictures:
        return None
    fix = "write the part as text, or remove it, because training would not use it"
    expected = "parts of the types 'text' and 'image'" if takes_pictures else "parts of the type 'text'"
    return Problem(f"{holds} a part of the type '{kind}'", expected, fix)


def count_keys(row: Row, chats: Sequence[str], keys: Counter[tuple[str, str]]) -> None:
    """Count each key in messages and parts of messages that neither isotype nor TRL reads."""
    for name in chats:
        for message in row[name] if isinstance(row[name], list) else ():
            keys.update(("message", key) for key in message.keys() - MESSAGE_KEYS if message[key] is not None)
            parts = message.get("content")
            for part in parts if isinstance(parts, list) else ():
                keys.update(("part", key) for key in part.keys() - PART_KEYS if part[key] is not None)


def unread_line(source: str, keys: Mapping[tuple[str, str], int], sample: int | None) -> str | None:
    """Return a line about the unused keys of a data set; None if all keys are used.

    `keys` maps (place, unused key) to a count. A place is "row", "message" or "part". `sample` is the number of counted
    rows, or None for all rows.
    """
    named: dict[str, list[str]] = {}
    for (where, key), count in sorted(keys.items()):
        named.setdefault(where, []).append(f"'{key}' of {plural(count, where)}")
    turns = [*named.get("message", ()), *named.get("part", ())]
    unused = [f"unused: {listed(named['row'])}"] if "row" in named else []
    unused += [f"used only if the chat template reads the keys: {listed(turns)}"] if turns else []
    counted = f" (in the first {sample:,} rows)" if sample and turns else ""
    return f"{source}: {'; '.join(unused)}{counted}" if unused else None
