"""How rules write fixes: one action on several targets, advice, and whether a cast loses digits."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from isotype.core.names import distinct_names
from isotype.records.finding import Action, ActionKind, Fix, Safety
from isotype.records.trace import Weight


def fix(
    description: str, kind: ActionKind, targets: Iterable[str], value: str, safety: Safety = "safe"
) -> Fix:
    """One change of every target, each once."""
    return Fix(description, safety, actions=actions(kind, targets, value))


def actions(kind: ActionKind, targets: Iterable[str], value: str) -> tuple[Action, ...]:
    """The same action on every target, each once."""
    return tuple(Action(kind, target, value) for target in dict.fromkeys(targets))


def advice(target: str, how: str, value: str | None = None) -> Fix:
    """Something only the user can change: `how` says it in words, `value` where something shorter does for `target`."""
    return fix(how, "advice", (target,), how if value is None else value)


def setting(description: str, target: str, value: str, safety: Safety = "safe") -> Fix:
    """Another value of one argument of the step."""
    return fix(description, "setting", (target,), value, safety)


def safety_of_cast(weights: Iterable[Weight], dtype: torch.dtype) -> Safety:
    """Whether `dtype` is known to hold every value of `weights`."""
    return "safe" if all(weight.exact_in == dtype for weight in weights) else "unsafe"


def and_its_like(names: Iterable[str]) -> str:
    """The first name with a `*` for the numbers of layers, and that there are others."""
    first, *others = distinct_names(names)
    return f"{first} and its like" if others else first
