"""Messages of torch as templates: `expected scalar type Float but found Half` is one message, not one per dtype."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping

from isotype.contracts.pattern import fill, letters_in

# Every way torch spells a float dtype, with its letter and the format specification that writes it again.
_SPELLINGS: dict[str, tuple[str, str]] = {
    "torch.float32": ("f", ":torch"),
    "torch.bfloat16": ("b", ":torch"),
    "torch.float16": ("h", ":torch"),
    "torch.float64": ("d", ":torch"),
    "c10::BFloat16": ("b", ""),
    "c10::Half": ("h", ""),
    "float": ("f", ""),
    "double": ("d", ""),
    "BFloat16": ("b", ":name"),
    "Half": ("h", ":name"),
    "Float": ("f", ":name"),
    "Double": ("d", ":name"),
}
_WORD = re.compile(r"(?<![\w.])(" + "|".join(map(re.escape, _SPELLINGS)) + r")(?![\w.]*\w)")
_MOST = 256  # readings of one message worth looking at


def templates(messages: Mapping[str, str]) -> dict[str, str]:
    """Pattern -> message, to pattern -> template, with as few distinct templates as a greedy choice finds.

    A dtype in a message may be that of any operand which has it; the reading that explains the most messages of the
    operator is taken. `fill(template, letters_in(pattern))` gives each message back to the letter.
    """
    readings = {pattern: list(_readings(pattern, message)) for pattern, message in messages.items()}
    chosen: dict[str, str] = {}
    while len(chosen) < len(messages):
        left = [pattern for pattern in messages if pattern not in chosen]
        votes = Counter(reading for pattern in left for reading in readings[pattern])
        best = min(votes, key=lambda reading: (-votes[reading], reading))
        chosen |= dict.fromkeys([pattern for pattern in left if best in readings[pattern]], best)
    return chosen


def _readings(pattern: str, message: str) -> Iterator[str]:
    """Every template that gives `message` for `pattern`."""
    letters = letters_in(pattern)
    # re.split with one group alternates between text and dtype words.
    parts = _WORD.split(message.replace("{", "{{").replace("}", "}}"))
    choices = [[part] if at % 2 == 0 else _places(part, letters) for at, part in enumerate(parts)]
    for reading in itertools.islice(itertools.product(*choices), _MOST):
        template = "".join(reading)
        if fill(template, letters) != message:
            raise RuntimeError(f"{template!r} does not give {message!r} for {pattern}")
        yield template


def _places(word: str, letters: str) -> list[str]:
    letter, style = _SPELLINGS[word]
    return [f"{{{at}{style}}}" for at, found in enumerate(letters) if found == letter] or [word]
