"""Parts of messages beside text and role: content parts, pictures, marks of turns for the loss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from isotype.core.errors import Problem
from isotype.core.names import listed, plural
from isotype.data.cells import Row, describe

LEARNED_MARKS = (
    *("weight", "loss_weight"),  # OpenAI
    *("train", "training", "trainable", "train_on_turn"),  # axolotl
    *("loss", "loss_mask", "step_loss_mask"),  # ms-swift, xtuner; slime
)
_LEFT_OUT_MARKS = ("mask", "masked")  # torchtune
_PARTLY = ("train_detail", "training_detail")  # axolotl
MARKS = (*LEARNED_MARKS, *_LEFT_OUT_MARKS)
"""Keys of a message that include it in the loss or exclude it."""

# 1, 1.0, 0 and 0.0 are equal to these.
_YES, _NO = (True, "true", "True", "1"), (False, "false", "False", "0")

_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
MESSAGE_KEYS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", *_THOUGHTS, *MARKS})
PART_KEYS = frozenset({"type", "text", "thinking"})


def left_out(message: Mapping[str, Any]) -> bool:
    """Return True if a message is marked as excluded from the loss."""
    return any(message.get(key) in _NO for key in LEARNED_MARKS) or any(
        message.get(key) in _YES for key in _LEFT_OUT_MARKS
    )


def message_problems(row: Row, chats: Sequence[str], method: str, sees: bool) -> Iterator[Problem]:
    """Yield problems of the marks and parts of a row's messages; `sees`: the trainer takes pictures."""
    for name in chats:
        for message in row[name] if isinstance(row[name], list) else ():
            yield from _mark_problems(name, message, method)
            parts = message.get("content")
            if isinstance(parts, list):
                problems = [_part_problem(name, part, sees) for part in parts]
                yield from dict.fromkeys(problem for problem in problems if problem)


def _mark_problems(column: str, message: Mapping[str, Any], method: str) -> Iterator[Problem]:
    for key in message.keys() & {*MARKS, *_PARTLY}:
        value = message[key]
        if value is None:
            continue
        what = f"column '{column}' holds a message with '{key}': {value!r}"[:200]
        if key in _PARTLY:
            expected = "turns that are learned whole or not at all"
            yield Problem(what, expected, "split the turn, or remove the key")
        elif value not in _YES and value not in _NO:
            yield Problem(what, "1 or true, 0 or false", "round it, or remove the key")
        elif method != "sft" and column != "prompt" and left_out(message):
            expected = f"answers that are learned whole: {method} leaves no turn out"
            yield Problem(what, expected, "remove the key")


def _part_problem(column: str, part: Mapping[str, Any], sees: bool) -> Problem | None:
    kind, given = part["type"], f"column '{column}' holds"
    if kind in ("text", "thinking"):
        text = part.get(kind) if kind == "text" or "thinking" in part else part.get("text")
        if isinstance(text, str) or (kind == "thinking" and text is not None):
            return None
        what = f"{given} a part whose '{kind}' is {describe(text)}"
        return Problem(what, "text", "write it as text, or remove the part")
    if kind == "image" and sees:
        return None
    fix = "write it as text, or remove it; nothing of it would be trained"
    expected = "parts of the types 'text' and 'image'" if sees else "parts of the type 'text'"
    return Problem(f"{given} a part of the type '{kind}'", expected, fix)


def count_keys(row: Row, chats: Sequence[str], keys: Counter[tuple[str, str]]) -> None:
    """Count the keys of messages and of their parts that isotype and TRL do not know."""
    for name in chats:
        for message in row[name] if isinstance(row[name], list) else ():
            keys.update(("message", key) for key in message.keys() - MESSAGE_KEYS if message[key] is not None)
            parts = message.get("content")
            for part in parts if isinstance(parts, list) else ():
                keys.update(("part", key) for key in part.keys() - PART_KEYS if part[key] is not None)


def unread_line(source: str, keys: Mapping[tuple[str, str], int], sample: int | None = None) -> str | None:
    """Describe the unused keys of a data set with their counts; None if everything is used.

    Args:
        keys: (row, message or part; name) -> count.
        sample: number of rows counted, None if all.
    """
    named = {
        where: [f"'{key}' of {plural(n, where)}" for (w, key), n in sorted(keys.items()) if w == where]
        for where, _ in keys
    }
    turns = [*named.get("message", ()), *named.get("part", ())]
    said = [f"unused: {listed(named['row'])}"] if "row" in named else []
    said += [f"used only by a chat template that names it: {listed(turns)}"] if turns else []
    counted = f" (in the first {sample:,} rows)" if sample and turns else ""
    return f"{source}: {'; '.join(said)}{counted}" if said else None
