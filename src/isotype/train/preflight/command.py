"""A training command as words: arguments set in it, and the command that a check has repaired."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from isotype.core.commands import printed_command
from isotype.records.finding import Action, Finding, Fix

_FLAGS = {
    "autocast": "--dtype",
    "optimizer": "--optim",
    "learning_rate": "--learning_rate",
    "compute": "--dtype",
}


@dataclass(frozen=True)
class Repaired:
    """What `isotype check --fix` answers.

    Attributes:
        text: in words.
        fixes: what together resolves the findings.
        left: findings that nothing resolves, each with the reason.
        command: the repaired training command; of a function's model None.
    """

    text: str
    fixes: Sequence[Fix]
    left: Sequence[tuple[Finding, str]]
    command: Sequence[str] | None = None

    def content(self) -> dict[str, Any]:
        """As JSON; a fix that changes nothing but the model has the scope `model`, for the others see `SCOPES`."""
        fixes = [{**asdict(fix), "scope": fix.scope} for fix in self.fixes]
        left = [{"code": each.code, "cause": each.cause, "reason": reason} for each, reason in self.left]
        command = None if self.command is None else printed_command(self.command)
        return {"fixes": fixes, "left": left, "command": command}


def repaired_command(
    command: Sequence[str], fixes: Sequence[Fix], left: Sequence[tuple[Finding, str]] = ()
) -> Repaired:
    """The training command with the arguments that the fixes change, what no argument can change, and what is left."""
    tokens, by_hand = list(command), []
    for fix in fixes:
        flags = [flag for action in fix.actions if (flag := _flag(action)) is not None]
        if not flags:
            by_hand.append(fix.description)
        for name, value in flags:
            tokens = set_flag(tokens, name, value)
    lines = [f"repaired:\n{printed_command(tokens, indent=4)}"] if tokens != list(command) else []
    lines += [f"by hand:   {text}" for text in by_hand]
    lines += [f"left:      {finding.code}: {reason}" for finding, reason in left]
    return Repaired("\n".join(lines) or "nothing to repair", fixes, left, tokens)


def _flag(action: Action) -> tuple[str, str] | None:
    name = _FLAGS.get(action.target if action.kind == "setting" else action.kind)
    return None if name is None or action.value in ("", "None") else (name, action.value)


def set_flag(tokens: list[str], name: str, value: str) -> list[str]:
    """`tokens` with the argument `name` set to `value`, in place of a former value or at the end."""
    for at, token in enumerate(tokens):
        written, equals, _ = token.partition("=")
        if _same(written, name):
            return [
                *tokens[:at],
                *([f"{name}={value}"] if equals else [name, value]),
                *tokens[at + 1 + (not equals) :],
            ]
    return [*tokens, name, value]


def value_of(command: Sequence[str], name: str) -> str | None:
    """The value of the argument `name` in `command`, however it is written (`--a-b v`, `--a_b=v`), the last one; None without."""
    value = None
    for at, token in enumerate(command):
        written, equals, behind = token.partition("=")
        if _same(written, name):
            value = behind if equals else command[at + 1] if at + 1 < len(command) else None
    return value


def _same(written: str, name: str) -> bool:
    return written.startswith("--") and written.replace("-", "_") == name.replace("-", "_")


def without_flag(command: Sequence[str], name: str) -> list[str]:
    """`command` without the argument `name` and its value."""
    kept, skip = [], False
    for token in command:
        written, equals, _ = token.partition("=")
        named = not skip and _same(written, name)
        if not skip and not named:
            kept.append(token)
        skip = named and not equals
    return kept
