"""Findings that rules derive from traces, and their fixes."""

import json
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Literal, Self, get_args

from isotype.core.json_records import Share
from isotype.core.terminal import printed_command
from isotype.records.trace import Operand

Severity = Literal["error", "warning", "note"]
Safety = Literal["safe", "unsafe"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)

Kind = Literal[
    "step",  # dtypes of the step
    "untraced",  # a part of the step that was not traced or not checked
    "memory",  # fit of the step in the device's memory
    "device",  # missing or slow features of the device, for any step
    "versions",  # installed libraries
    "values",  # values of tensors, independent of dtypes
    "wiring",  # dependence of outputs on inputs, independent of dtypes
]

ActionKind = Literal[
    "parameter",  # cast the parameter `target` to the dtype `value`
    "trainable",  # the parameter `target` requires a gradient
    "differentiable",  # the output of the module `target` requires a gradient
    "gradient",  # the parameter `target` accumulates its gradient in `value`
    "buffer",  # cast the buffer `target` to `value`; rotary frequencies are computed again
    "output",  # the module `target` returns its float outputs in `value`
    "input",  # the module `target` takes its float inputs in `value`
    "state",  # the quantization state of the layer `target` dequantizes to `value`
    "compute",  # the quantized layer `target` computes in `value`
    "layout",  # the 4-bit layer `target` keeps the layout that has a backward
    "boundary",  # the module `target` casts at its boundary, see isotype.model.boundary.BoundarySettings
    "ranges",  # the model casts at the boundaries in `value`, a `RangeBoundaries` as JSON
    "line",  # the code at `target` (`file:line`) casts to, or creates tensors in, `value`; only the user can change it
    "setting",  # the argument `target` of the step (autocast, scaler, optimizer, …) becomes `value`
    "advice",  # a change that only the user can make: `target` names the change, `value` describes it
]


Scope = Literal["model", "setting", "line", "library", "advice"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
"""Parts that a fix can change, in order of preference. `repair` changes the model, and the caller changes the rest."""


@dataclass(frozen=True)
class Action:
    """A change that is part of a fix.

    Attributes:
        target: a fully qualified name with `*` for layer numbers, a code line (`file:line`), or the name of a setting.
        value: new value of the target.
    """

    kind: ActionKind
    target: str
    value: str

    @property
    def scope(self) -> Scope:
        """The part that the action changes, one of `SCOPES`."""
        match self.kind:
            case "line":
                return "library" if in_library(self.target) else "line"
            case "setting" | "advice":
                return self.kind
            case _:
                return "model"


@cache
def in_library(source: str) -> bool:
    """Return True if `file:line` is in an installed package or the standard library, because an update would undo edits there."""
    path = Path(source.rpartition(":")[0])
    installed = not {"site-packages", "dist-packages"}.isdisjoint(path.parts)
    return installed or path.is_relative_to(sysconfig.get_path("stdlib"))


@dataclass(frozen=True)
class RangeBoundaries:
    """The decisions of a policy that depend on measured value ranges. They are the value of a `ranges` action.

    Attributes:
        compute: name of the matmuls' dtype.
        wide_residual: True if the residual stream is in float32.
        exceptions: (`module`, `how`, `exponent`) of each `isotype.precision.policy.ModuleException`.
    """

    compute: str
    wide_residual: bool
    exceptions: tuple[tuple[str, str, int], ...] = ()

    def action(self) -> Action:
        """Return the action that applies these decisions to a whole model."""
        return Action("ranges", "", json.dumps(asdict(self)))

    @classmethod
    def of(cls, value: str) -> Self:
        fields = json.loads(value)
        return cls(**{**fields, "exceptions": tuple(map(tuple, fields["exceptions"]))})


@dataclass(frozen=True)
class Fix:
    """A change that resolves a finding.

    Attributes:
        description: the change as an instruction ("return each norm's output in bfloat16").
        safety: `"safe"` if the fix keeps the meaning of the model and all digits of its weights; else `"unsafe"`.
        verified: True if the whole step was traced with the fix, without the finding and without new findings.
        actions: the changes of the fix; empty if no actions can express the fix.
        outcome: a description of the result of a trace with the fix; "" before this trace.
        command: a command that applies the fix, as a program and its arguments; empty if there is none.
    """

    description: str
    safety: Safety
    verified: bool = False
    actions: tuple[Action, ...] = ()
    outcome: str = ""
    command: tuple[str, ...] = ()

    @property
    def works(self) -> bool:
        """True if a trace with the fix lacks the finding and has no new findings. The trace may have ended early."""
        return self.verified or bool(self.outcome)

    @property
    def text(self) -> str:
        """The instruction ("return each norm's output in bfloat16") and the command in one line."""
        return f"{self.description}: {printed_command(self.command)}" if self.command else self.description

    @property
    def scope(self) -> Scope:
        """The last scope of the fix's actions, in the order of `SCOPES`; `advice` without actions."""
        return max((action.scope for action in self.actions), key=SCOPES.index, default="advice")


def marked(fix: Fix) -> str:
    """Return a fix's description, with a remark if it changes a library's code."""
    return f"{fix.text} (in a library's code)" if fix.scope == "library" else fix.text


def by_preference(fixes: Iterable[Fix], *, unsafe: bool = False, command: bool = False) -> tuple[Fix, ...]:
    """Return fixes in order of preference. Fixes of equal rank keep the rule's order.

    Fixes of the model come first, and then fixes of settings, of the user's code, and of library code. Inside each of
    these groups, safe fixes come first. Unless `unsafe` is set, unsafe fixes come after the safe fixes of all groups.
    Fixes of library code always come last.

    Args:
        fixes: fixes of one finding.
        unsafe: whether unsafe fixes are requested.
        command: True if the fixes are for an isotype command. Fixes of settings then come first.
    """
    scopes: Sequence[Scope] = ("setting", *(s for s in SCOPES if s != "setting")) if command else SCOPES

    def rank(fix: Fix) -> tuple[bool, bool, int, bool]:
        last, risky = fix.scope in ("library", "advice"), fix.safety == "unsafe"
        return last, risky and not unsafe, scopes.index(fix.scope), risky

    return tuple(sorted(fixes, key=rank))


@dataclass(frozen=True)
class Cost:
    """The cost of a finding that raises no error, in one step.

    Attributes:
        flops_share: fraction (0 to 1) of the step's FLOPs that the finding moves to a slower dtype.
        cast_bytes: bytes that the finding's casts read and write.
        memory_bytes: bytes that the finding adds to the memory peak.
        slowdown: estimated time of the step on the profile's device, divided by the time without the finding; None if
            unknown.
    """

    flops_share: Share = 0.0
    cast_bytes: int = 0
    memory_bytes: int = 0
    slowdown: float | None = None


@dataclass(frozen=True)
class Finding:
    """A fact that a rule finds in a trace. All operators with the same cause share a finding.

    Attributes:
        severity: `"error"` crashes or corrupts the training. `"warning"` silently costs speed, memory or precision. `"note"`
            does neither.
        message: the fact in one line.
        module: fully qualified name of the first module with the finding.
        op: the operator; "" if there is none.
        source: `file:line` of the code that called the operator.
        cause: a description of how the finding's dtype was introduced, and by which module or source line.
        evidence: the dtype's path from its cause to the operator, one line per step.
        notes: further facts, such as the number of places or an assumption.
        fixes: fixes in order of preference (see `by_preference`).
        operands: operands of the operator, which the terminal shows.
        cost: cost of a silent finding; None for other findings.
        places: all modules with the finding.
        kind: topic of the finding. `judge` sets `kind` and `code` from the rule.
        code: `IST###`.
    """

    severity: Severity
    message: str
    module: str = ""
    op: str = ""
    phase: str = "forward"
    source: str = ""
    cause: str = ""
    evidence: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    fixes: tuple[Fix, ...] = ()
    operands: tuple[Operand, ...] = ()
    cost: Cost | None = None
    places: tuple[str, ...] = ()
    kind: Kind = "step"
    code: Annotated[str, ("pattern", "^IST[0-9]{3}$")] = ""

    @property
    def key(self) -> tuple[str, str, str]:
        """Values that identify the finding in other traces of the same model."""
        return (self.code, self.cause, self.module)
