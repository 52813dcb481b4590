"""What to do about arguments that TRL or transformers refuse in words of their own."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any


def cure_by_trial(explicit: Iterable[str], works_without: Callable[[str], bool]) -> str | None:
    """The arguments of which any one, left out, makes the rest work; None where no single one does.

    Args:
        explicit: the names that were given.
        works_without: whether the command works with this argument at its default.
    """
    cures = [name for name in sorted(explicit) if works_without(name)]
    return f"leave {' or '.join(f'--{name}' for name in cures)} out" if cures else None


def cure_by_name(message: str, explicit: Collection[str], values: Mapping[str, Any], help_of: str) -> str:
    """What to do by the arguments that a message names: those that were given go, the others are shown as they are.

    Args:
        message: of the library.
        explicit: the names that were given.
        values: every argument with its value.
        help_of: the command, whose help is the last resort.
    """
    words = dict.fromkeys(re.findall(r"[a-z][a-z0-9_]*", message))
    named = [name for name in words if name in values and ("_" in name or f"--{name}" in message)]
    out = [f"--{name}" for name in named if name in explicit]
    other = [f"--{name} (now {values[name]})" for name in named if name not in explicit]
    parts = [f"leave {' or '.join(out)} out"] * bool(out)
    parts += [f"{'or change' if out else 'change'} {' or '.join(other)}"] * bool(other)
    given = [f"--{name}" for name in sorted(explicit) if name in values]
    last = f"leave out one of {', '.join(given)}" if given else "see what each takes"
    return ", ".join(parts) or f"{last}; {help_of} --help-all lists all"
