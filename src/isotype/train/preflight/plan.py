"""The description of a step to check, and the check's own options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isotype.core.terminal import printed_command
from isotype.precision.decide import PrecisionRequest
from isotype.records.finding import Action, Finding, Fix
from isotype.train.command.command import Command, here, with_dtype

if TYPE_CHECKING:
    from isotype.model.targets import Adapt
    from isotype.ranges.pictures import Pictures
    from isotype.records.memory import MemoryKind
    from isotype.train.rows.lengths import Lengths

DEFAULT_LENGTH = 1024
"""Default tokens per row, TRL's default of `--max_length`."""
_BATCH = "per_device_train_batch_size"


@dataclass(frozen=True)
class Options:
    """The check's own arguments.

    Attributes:
        bare: a model was named without a training method.
        batch, length: rows and tokens of the step, None if the training's arguments decide.
        fsdp: 0, 1 or 2; None if the training's arguments decide.
        devices: number of devices that train together; None if the launcher decides.
        json, sarif, html: outputs; `-` for sarif is standard output.
        fail_on: severity from which the exit status is 1.
        verbose: print the parts of memory and time.
        image: size of the pictures in each row; None if from the data.
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
    """A step to be checked.

    Attributes:
        device: name of a device or of a profile.
        rows, length: of the batch, in pairs for dpo and reward; length None for the default.
        step_rows: rows of an optimizer step on one device; if more than `rows`, gradients are accumulated.
        evaluation: rows of an evaluation batch during the training; 0: as many as `rows`; None: no evaluation.
        evaluation_length: tokens of its longest row; None: as for training.
        evaluation_lengths: of the evaluation rows; None if not counted.
        prompt: tokens at the beginning of every row without loss.
        completion: tokens of a completion (grpo, rloo).
        reference: every step runs the reference model.
        copied: the reference is a frozen copy of `weights` or `adapters`; None if there is none.
        lora: arguments of `peft.LoraConfig`, or one; None if every weight is trained.
        pictures: of each row; None for the default of the model's config.
        adapt: parts of the model that get adapters; None for all.
        checkpointing: arguments of `gradient_checkpointing_enable`, None if it is off.
        auto: choose `checkpointing` by the memory of the step.
        longest: tokens of the longest possible row in the training; None: as `length`.
        unforeseen: why the step's cost cannot be known, as a clause; "" if a trace shows it.
        fsdp: 0, 1 or 2.
        devices: number of devices that train together, one process per device.
        reshard: FSDP frees a block's gathered weights after its forward.
        attention: attention implementation, None for transformers' choice.
        packed: rows have several documents, separated by their positions.
        ranges: `measure` or `known`, see `isotype.train.policy.policy_by_ranges`.
        data: description of the rows' lengths and format; "" if no data set was opened.
        fuse: the training fuses its layers, adapted or not.
        dropout: the training uses dropout; TRL switches it off if answers are compared.
        data_rows: rows of the training's data set; None if none was opened, or it is a stream.
        lengths: of these rows; None if not counted.
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
    reshard: bool = True
    step_rows: int = 0
    evaluation: int | None = None
    evaluation_length: int | None = None
    evaluation_lengths: Lengths | None = None
    prompt: int = 0
    completion: int = 0
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
    lengths: Lengths | None = None
    adapt: Adapt | None = None
    pictures: Pictures | None = None


@dataclass(frozen=True)
class Repaired:
    """The result of `isotype check --fix`.

    Attributes:
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
    """Return the findings with commands for fixes by arguments; `bare`: of a model's check, not a training."""

    def commanded(fix: Fix) -> Fix:
        if fix.command or fix.scope != "setting":
            return fix
        fixed = reduce(_acted, fix.actions, command)
        if fixed.same_settings(command):
            return fix
        if not bare:
            return replace(fix, command=here(fixed, present).tokens())
        one = fixed if _BATCH in fixed else fixed.but(**{_BATCH: 1})
        check = (*fixed.environment(), "isotype", "check", fixed.method, *one.arguments())
        return replace(fix, command=check)

    return tuple(replace(finding, fixes=tuple(map(commanded, finding.fixes))) for finding in findings)


def repaired_command(
    command: Command, fixes: Sequence[Fix], left: Sequence[tuple[Finding, str]] = (), *, present: bool = True
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
    name = _argument(action)
    if name is None:
        return command
    if name == "dtype":
        return command if command["dtype"] == action.value else with_dtype(command, action.value)
    return command.but(**{name: float(action.value) if name == "learning_rate" else action.value})
