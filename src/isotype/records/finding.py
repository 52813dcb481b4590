"""Findings and fixes: what a rule draws from a trace."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from isotype.core.commands import printed_command
from isotype.core.json_records import Share
from isotype.records.trace import Call, Operand, Weight

Severity = Literal["error", "warning", "note"]
Safety = Literal["safe", "unsafe"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)

Kind = Literal[
    "step",  # what the step does with its dtypes
    "untraced",  # what could not be traced or judged
    "memory",  # whether the step fits into the device's memory
    "device",  # what the device lacks or runs slowly, whatever the step does
    "versions",  # what is installed
    "values",  # which numbers it computes, whatever takes them
    "wiring",  # which inputs reach which outputs, whatever their dtypes
]

ActionKind = Literal[
    "parameter",  # cast the parameter `target` to the dtype `value`
    "trainable",  # the parameter `target` requires a gradient
    "differentiable",  # what the module `target` returns requires a gradient
    "gradient",  # the parameter `target` accumulates its gradient in `value`
    "buffer",  # cast the buffer `target` to `value`; rotary frequencies are computed again
    "output",  # the module `target` returns its float outputs in `value`
    "input",  # the module `target` takes its float inputs in `value`
    "state",  # the quantization state of the layer `target` dequantizes to `value`
    "compute",  # the quantized layer `target` computes in `value`
    "layout",  # the 4-bit layer `target` keeps the layout that trains
    "boundary",  # the module `target` casts at its border, see isotype.model.boundary.BoundarySettings
    "ranges",  # the model gets the boundaries that float16 needs for its values: `value` is JSON, see `RangeBoundaries`
    "line",  # the code at `target` (`file:line`) casts to, or makes tensors in, `value`; only the user can do it
    "setting",  # the argument `target` of the step (autocast, scaler, optimizer, …) becomes `value`
    "advice",  # something only the user can change: `target` names it, `value` says how
]


Scope = Literal["model", "setting", "line", "library", "advice"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
"""What a fix changes, the nearest first: only the model can be changed by `repair`, the rest is the caller's."""

_SCOPES: dict[str, Scope] = {"setting": "setting", "line": "line", "advice": "advice"}


@dataclass(frozen=True)
class Action:
    """One change.

    Attributes:
        kind: what is changed.
        target: a fully qualified name in which `*` stands for a layer's number; `file:line` of a line; the argument of a setting.
        value: what it becomes.
    """

    kind: ActionKind
    target: str
    value: str

    @property
    def scope(self) -> Scope:
        """What it changes."""
        scope = _SCOPES.get(self.kind, "model")
        return "library" if scope == "line" and in_library(self.target) else scope


@cache
def in_library(source: str) -> bool:
    """Whether `file:line` lies in an installed package or the standard library, where no edit lasts."""
    path = Path(source.rpartition(":")[0])
    installed = not {"site-packages", "dist-packages"}.isdisjoint(path.parts)
    return installed or path.is_relative_to(sysconfig.get_path("stdlib"))


@dataclass(frozen=True)
class RangeBoundaries:
    """The value of a `ranges` action: what a policy says of value ranges.

    Attributes:
        compute: name of the dtype of the matmuls.
        wide_residual: whether the residual stream is carried in float32.
        exceptions: (module in the base model, how, exponent), see `isotype.precision.policy.ModuleException`.
    """

    compute: str
    wide_residual: bool
    exceptions: tuple[tuple[str, str, int], ...] = ()

    def action(self) -> Action:
        """The action that sets them in a whole model."""
        return Action("ranges", "", json.dumps(asdict(self)))

    @classmethod
    def of(cls, value: str) -> RangeBoundaries:
        """The inverse of `action`."""
        read = json.loads(value)
        exceptions = tuple((module, how, exponent) for module, how, exponent in read["exceptions"])
        return cls(read["compute"], read["wide_residual"], exceptions)


@dataclass(frozen=True)
class Fix:
    """A change that resolves a finding.

    Attributes:
        description: what to do, as an order ("return each norm's output in bfloat16").
        safety: `"safe"` keeps the meaning of the model and its stored digits; `"unsafe"` may not.
        verified: whether a second trace with it was run, in which the finding was gone and nothing new appeared.
        actions: what has to change; empty where it cannot be named.
        outcome: what the second trace showed, "" before.
        command: the command that the description speaks of, as a program and its arguments; empty without one.
    """

    description: str
    safety: Safety
    verified: bool = False
    actions: tuple[Action, ...] = ()
    outcome: str = ""
    command: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """What to do, as an order ("return each norm's output in bfloat16"), with its command, in one line."""
        return f"{self.description}: {printed_command(self.command)}" if self.command else self.description

    @property
    def scope(self) -> Scope:
        """The farthest of what its actions change: a fix that needs a setting too is the caller's."""
        scopes = [action.scope for action in self.actions]
        return max(scopes, key=SCOPES.index, default="advice")


def marked(fix: Fix) -> str:
    """A fix's description, marked where it names a library's line."""
    return f"{fix.text} (in a library's code)" if fix.scope == "library" else fix.text


def by_preference(fixes: Iterable[Fix], *, unsafe: bool = False, command: bool = False) -> tuple[Fix, ...]:
    """Fixes, the one to take first in front: of equal ones the rule's own order decides.

    A change of the model comes before one of a setting, of the user's line and of a library's line, and a safe one
    before an unsafe one of the same thing. What nobody asked for (`unsafe`) comes after all that is safe, but before a
    library's line.

    Args:
        fixes: of one finding.
        unsafe: unsafe fixes are asked for.
        command: what is repaired is a command, whose settings are at hand and whose model is not.
    """
    scopes: Sequence[Scope] = ("setting", *(s for s in SCOPES if s != "setting")) if command else SCOPES

    def rank(fix: Fix) -> tuple[bool, bool, int, bool]:
        last, risky = fix.scope in ("library", "advice"), fix.safety == "unsafe"
        return last, risky and not unsafe, scopes.index(fix.scope), risky

    return tuple(sorted(fixes, key=rank))


@dataclass(frozen=True)
class Cost:
    """What a silent finding costs in one step.

    Attributes:
        flops_share: share (0 to 1) of the step's FLOPs in a slower dtype.
        cast_bytes: bytes read and written by casts that it makes necessary.
        memory_bytes: bytes more at the peak.
        slowdown: estimated step time over the step time without it, on the device profile; None where unknown.
    """

    flops_share: Share = 0.0
    cast_bytes: int = 0
    memory_bytes: int = 0
    slowdown: float | None = None


@dataclass(frozen=True)
class Finding:
    """One fact that a rule draws from a trace; one cause is one finding, however many operators it breaks.

    Attributes:
        code: `IST###`.
        severity: `"error"` crashes or corrupts; `"warning"` silently costs speed, memory or precision; `"note"`.
        message: the fact in one line.
        module: fully qualified name of the module where it surfaces first.
        op: the operator, "" where there is none.
        phase: where in the step.
        source: `file:line` of the code that called the operator.
        cause: fully qualified name or source of what introduced the dtype, with what it did.
        evidence: the dtype's way from cause to place, one line a step.
        notes: further facts (how many places, what was assumed).
        fixes: in order of preference, see `by_preference`.
        operands: what the operator was given, for the picture in a terminal.
        cost: of a silent finding.
        places: every module it surfaces in.
        kind: what it is about, for readers that treat some findings in their own way; `judge` sets its rule's.
    """

    code: Annotated[str, ("pattern", "^IST[0-9]{3}$")]
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

    @property
    def key(self) -> tuple[str, str, str]:
        """What tells one finding from another across two traces of the same model."""
        return (self.code, self.cause, self.module)


def places(of: Iterable[Call | Weight]) -> tuple[str, ...]:
    """The modules of calls or weights, each once."""
    return tuple(dict.fromkeys(each.module for each in of))


def finding_at(
    code: str, severity: Severity, message: str, call: Call, others: Iterable[Call] = (), **more: Any
) -> Finding:
    """A finding about an operator, and about `others` that have the same cause."""
    return Finding(
        code,
        severity,
        message,
        module=call.module,
        op=call.op,
        phase=call.phase,
        source=call.source,
        operands=call.operands,
        **{"places": places((call, *others)), **more},
    )
