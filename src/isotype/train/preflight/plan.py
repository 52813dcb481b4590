"""The options of `isotype check`, the step to be checked, and the repaired command."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isotype.core.terminal import printed_command
from isotype.precision.decide import PrecisionRequest
from isotype.records.finding import Action, Finding, Fix
from isotype.train.command.command import Command, with_dtype, without_absent_device

if TYPE_CHECKING:
    from isotype.model.targets import Adapt
    from isotype.precision.policy import PrecisionPolicy
    from isotype.ranges.pictures import Pictures
    from isotype.records.memory import MemoryKind
    from isotype.train.rows.lengths import Lengths

DEFAULT_LENGTH = 1024
"""Default number of tokens per row, which is TRL's default for `--max_length`."""
_BATCH = "per_device_train_batch_size"


@dataclass(frozen=True)
class Options:
    """The arguments that `isotype check` has in addition to those of a training command.

    Attributes:
        bare: True if a model was named without a training method.
        batch, length: number of rows in the step, and number of tokens per row; None if the arguments of the training decide.
        fsdp: version of FSDP (0 for no FSDP); None if the arguments of the training decide.
        devices: number of devices that train together, or None if the launcher decides.
    """

    bare: bool = False
    batch: int | None = None
    length: int | None = None
    generate: bool = False
    fsdp: int | None = None
    devices: int | None = None
    json: bool = False
    sarif: str | None = None
    html: Path | None = None
    fix: bool = False
    fail_on: str = "error"
    verbose: bool = False
    image: tuple[int, int] | None = None
    images: int = 1


@dataclass(frozen=True)
class StepPlan:
    """A training step to check. All lengths are numbers of tokens.

    Attributes:
        rows: number of rows in a batch, or of pairs of rows for dpo and reward.
        length: length of a row, or None for the default.
        checkpointing: arguments of `gradient_checkpointing_enable`, or None if gradient checkpointing is off.
        auto: True if the memory of the step decides `checkpointing`.
        longest: length of the longest possible row of the training; None if no row can be longer than `length`.
        unforeseen: a clause that says why a trace cannot show the memory of the step; "" if it can.
        lora: a `peft.LoraConfig`, or None if every weight is trained.
        fsdp: version of FSDP, or 0 for no FSDP.
        reshard: True if FSDP frees a block's gathered weights after its forward.
        step_rows: rows of an optimizer step on one device. If `step_rows` is more than `rows`, gradients are accumulated.
        evaluation: rows in an evaluation batch (0 means `rows`), or None if the training has no evaluation.
        evaluation_length: length of the longest evaluation row, or None if evaluation rows are as long as training rows.
        prompt: length of the prompt at the beginning of every row. Prompt tokens have no loss.
        completion: length of a completion (grpo, rloo).
        generations: number of batches for which completions are generated together. 0 means all batches of an optimizer step.
            None means that completions are not generated on this device.
        reference: True if every step runs the reference model.
        copied: part of the model that the reference model copies (`weights` or `adapters`), or None without a copy.
        packed: True if rows have several documents that are separated by position ids.
        ranges: `measure` to measure value ranges, `known` to use only cached ranges (see `policy_by_ranges`).
        data: description of the data set's rows, or "" if no data set was opened.
        dropout: True if the training uses dropout (TRL turns dropout off for methods that compare answers).
        data_rows: number of rows in the training data, or None for a stream or if no data set was opened.
        unpads: True if the batches consist of rows of `lengths`, and the training may remove their padding.
        lengths, evaluation_lengths: lengths of the training rows and the evaluation rows, or None if they were not counted.
        adapt: parts of the model to train, or None for all parts.
        check_policy: function that raises PrecisionError if the arguments contradict the decided policy.
    """

    source: str
    method: str
    precision: PrecisionRequest
    device: str
    rows: int
    length: int | None
    lora: Any
    learning_rate: float
    optimizer: str
    checkpointing: Mapping[str, Any] | None
    auto: bool = False
    longest: int | None = None
    unforeseen: str = ""
    fsdp: int = 0
    devices: int = 1
    deepspeed: bool = False
    reshard: bool = True
    step_rows: int = 0
    evaluation: int | None = None
    evaluation_length: int | None = None
    evaluation_lengths: Lengths | None = None
    prompt: int = 0
    completion: int = 0
    generations: int | None = None
    reference: bool = False
    copied: MemoryKind | None = None
    revision: str | None = None
    attention: str | None = None
    packed: bool = False
    notes: tuple[str, ...] = ()
    ranges: str = "measure"
    data: str = ""
    fuse: bool = True
    dropout: bool = True
    data_rows: int | None = None
    unpads: bool = False
    lengths: Lengths | None = None
    adapt: Adapt | None = None
    pictures: Pictures | None = None
    check_policy: Callable[[PrecisionPolicy], None] = field(default=lambda policy: None, compare=False)


@dataclass(frozen=True)
class Repaired:
    """The result of `isotype check --fix`.

    Attributes:
        fixes: the fixes that resolve the findings together.
        unresolved: findings that have no fix, each with the reason.
        command: the repaired training command, or None if the checked model came from a function.
    """

    text: str
    fixes: Sequence[Fix]
    unresolved: Sequence[tuple[Finding, str]]
    command: Command | None = None

    def content(self) -> dict[str, Any]:
        """Return the result for JSON. Each fix has the field `scope` (see `isotype.records.finding.SCOPES`)."""
        fixes = [{**asdict(fix), "scope": fix.scope} for fix in self.fixes]
        left = [{"code": f.code, "cause": f.cause, "reason": reason} for f, reason in self.unresolved]
        command = None if self.command is None else printed_command(self.command.tokens())
        return {"fixes": fixes, "left": left, "command": command}


def with_commands(
    findings: Sequence[Finding], command: Command, *, bare: bool, present: bool
) -> tuple[Finding, ...]:
    """Add a command to each fix that changes arguments: `isotype check` if `bare` is True, else the training command."""

    def commanded(fix: Fix) -> Fix:
        if fix.command or fix.scope != "setting":
            return fix
        fixed = reduce(_with_action, fix.actions, command)
        if fixed.same_settings(command):
            return fix
        if not bare:
            return replace(fix, command=without_absent_device(fixed, present).tokens())
        one = fixed if _BATCH in fixed else fixed.but(**{_BATCH: 1})
        check = (*fixed.environment(), "isotype", "check", fixed.method, *one.arguments())
        return replace(fix, command=check)

    return tuple(replace(finding, fixes=tuple(map(commanded, finding.fixes))) for finding in findings)


def repaired_command(
    command: Command,
    fixes: Sequence[Fix],
    unresolved: Sequence[tuple[Finding, str]] = (),
    *,
    present: bool = True,
    remaining: Callable[[Command], Sequence[tuple[Finding, str]]] | None = None,
) -> Repaired:
    """Apply the fixes to a training command. The text of the result also describes fixes that no argument expresses.

    Args:
        unresolved: findings of the traced step that have no fix, each with the reason.
        remaining: function that checks the changed command and returns pairs (finding, why no fix resolves it). None checks
            nothing.
    """
    repaired, by_hand = command, []
    for fix in fixes:
        repaired = reduce(_with_action, fix.actions, repaired)
        if not any(_argument(action) for action in fix.actions):
            by_hand.append(fix.description)
    final = without_absent_device(repaired, present)
    changed = not repaired.same_settings(command)
    if changed and not by_hand and remaining is not None:
        unresolved = remaining(repaired)
    printed = printed_command(final.tokens(), indent=4)
    lines = [f"repaired:\n{printed}"] if changed else []
    lines += [f"by hand:   {text}" for text in by_hand]
    lines += [f"left:      {finding.code}: {reason}" for finding, reason in unresolved]
    return Repaired("\n".join(lines) or "nothing to repair", fixes, unresolved, final)


_ARGUMENTS = {"autocast": "dtype", "compute": "dtype", "optimizer": "optim"}
_ARGUMENTS |= {name: name for name in ("learning_rate", "master_dtype")}
"""Maps the kind of a fix's action to the argument that the action changes. For an action of the kind `setting`, the key is the target of the action."""


def _argument(action: Action) -> str | None:
    name = _ARGUMENTS.get(action.target if action.kind == "setting" else action.kind)
    return None if action.value in ("", "None") else name


def _with_action(command: Command, action: Action) -> Command:
    name = _argument(action)
    if name is None:
        return command
    if name == "dtype":
        return command if command["dtype"] == action.value else with_dtype(command, action.value)
    return command.but(**{name: float(action.value) if name == "learning_rate" else action.value})
