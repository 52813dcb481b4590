"""The command that a check has repaired."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import reduce
from typing import Any

from isotype.core.terminal import printed_command
from isotype.records.finding import Action, Finding, Fix
from isotype.train.command.command import Command, here, with_dtype


@dataclass(frozen=True)
class Repaired:
    """The result of `isotype check --fix`.

    Attributes:
        text: in words.
        fixes: fixes that together resolve the findings.
        left: unresolved findings, each with the reason.
        command: the repaired training command; None for a function's model.
    """

    text: str
    fixes: Sequence[Fix]
    left: Sequence[tuple[Finding, str]]
    command: Command | None = None

    def content(self) -> dict[str, Any]:
        """The result as JSON; a fix that changes only the model has the scope `model`, for others see `SCOPES`."""
        fixes = [{**asdict(fix), "scope": fix.scope} for fix in self.fixes]
        left = [{"code": each.code, "cause": each.cause, "reason": reason} for each, reason in self.left]
        command = None if self.command is None else printed_command(self.command.tokens())
        return {"fixes": fixes, "left": left, "command": command}


def with_commands(
    findings: Sequence[Finding], command: Command, *, bare: bool, present: bool
) -> tuple[Finding, ...]:
    """Return the findings; each fix that arguments can make gets its command.

    `bare`: a model was checked and no training, so its command is another check; `present`: the device is in this
    machine.
    """

    def commanded(fix: Fix) -> Fix:
        if fix.command or fix.scope != "setting":
            return fix
        fixed = reduce(_acted, fix.actions, command)
        if fixed.same_settings(command):
            return fix
        check = (*fixed.environment(), "isotype", "check", fixed.method, *_one_row(fixed).arguments())
        return replace(fix, command=check if bare else here(fixed, present).tokens())

    return tuple(replace(each, fixes=tuple(map(commanded, each.fixes))) for each in findings)


def _one_row(command: Command) -> Command:
    """Return the command with a bare model's default of one row."""
    rows = "per_device_train_batch_size"
    return command if rows in command else command.but(**{rows: 1})


def repaired_command(
    command: Command,
    fixes: Sequence[Fix],
    left: Sequence[tuple[Finding, str]] = (),
    *,
    present: bool = True,
) -> Repaired:
    """Return the training command changed by the fixes, what no argument can change, and what is left."""
    repaired, by_hand = command, []
    for fix in fixes:
        for action in fix.actions:
            repaired = _acted(repaired, action)
        if not any(_argument(action) for action in fix.actions):
            by_hand.append(fix.description)
    final = here(repaired, present)
    printed = printed_command(final.tokens(), indent=4)
    lines = [] if repaired.same_settings(command) else [f"repaired:\n{printed}"]
    lines += [f"by hand:   {text}" for text in by_hand]
    lines += [f"left:      {finding.code}: {reason}" for finding, reason in left]
    return Repaired("\n".join(lines) or "nothing to repair", fixes, left, final)


_ARGUMENTS = {"autocast": "dtype", "compute": "dtype", "optimizer": "optim", "learning_rate": "learning_rate"}
"""A setting or a kind of action -> its argument."""


def _argument(action: Action) -> str | None:
    name = _ARGUMENTS.get(action.target if action.kind == "setting" else action.kind)
    return None if action.value in ("", "None") else name


def _acted(command: Command, action: Action) -> Command:
    """Return the command changed by one action, if an argument does that."""
    name = _argument(action)
    if name is None:
        return command
    if name == "dtype":
        return command if command["dtype"] == action.value else with_dtype(command, action.value)
    return command.but(**{name: float(action.value) if name == "learning_rate" else action.value})
