"""Findings and fixes that rules derive from traces."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from isotype.core.json_records import Share
from isotype.core.terminal import printed_command
from isotype.records.trace import Call, Operand, Weight

Severity = Literal["error", "warning", "note"]
Safety = Literal["safe", "unsafe"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)

Kind = Literal[
    "step",  # the dtypes of the step
    "untraced",  # not traced or not judged
    "memory",  # fit of the step in the device's memory
    "device",  # missing or slow features of the device, whatever the step does
    "versions",  # installed libraries
    "values",  # values of numbers, independent of dtypes
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
    "layout",  # the 4-bit layer `target` keeps the layout that trains
    "boundary",  # the module `target` casts at its boundary, see isotype.model.boundary.BoundarySettings
    "ranges",  # the model gets the boundaries that float16 needs for its values: `value` is JSON, see `RangeBoundaries`
    "line",  # the code at `target` (`file:line`) casts to, or creates tensors in, `value`; only the user can change it
    "setting",  # the argument `target` of the step (autocast, scaler, optimizer, …) becomes `value`
    "advice",  # a change only the user can make: `target` names it, `value` describes it
]


Scope = Literal["model", "setting", "line", "library", "advice"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
"""Targets of a fix, nearest first: `repair` changes only the model, the caller the rest."""

_SCOPES: dict[str, Scope] = {"setting": "setting", "line": "line", "advice": "advice"}


@dataclass(frozen=True)
class Action:
    """A change that a fix makes.

    Attributes:
        kind: what is changed.
        target: a fully qualified name, `*` standing for layer numbers; `file:line` of a line; the
            argument of a setting.
        value: its new value.
    """

    kind: ActionKind
    target: str
    value: str

    @property
    def scope(self) -> Scope:
        """The part that it changes."""
        scope = _SCOPES.get(self.kind, "model")
        return "library" if scope == "line" and in_library(self.target) else scope


@cache
def in_library(source: str) -> bool:
    """Return whether `file:line` is in an installed package or the standard library, where edits do not last."""
    path = Path(source.rpartition(":")[0])
    installed = not {"site-packages", "dist-packages"}.isdisjoint(path.parts)
    return installed or path.is_relative_to(sysconfig.get_path("stdlib"))


@dataclass(frozen=True)
class RangeBoundaries:
    """The value of a `ranges` action: a policy's decisions for value ranges.

    Attributes:
        compute: name of the dtype of the matmuls.
        wide_residual: whether the residual stream is carried in float32.
        exceptions: (module in the base model, how, exponent), see
            `isotype.precision.policy.ModuleException`.
    """

    compute: str
    wide_residual: bool
    exceptions: tuple[tuple[str, str, int], ...] = ()

    def action(self) -> Action:
        """Return the action that applies them to a whole model."""
        return Action("ranges", "", json.dumps(asdict(self)))

    @classmethod
    def of(cls, value: str) -> RangeBoundaries:
        """Return the boundaries of an action's value (inverse of `action`)."""
        read = json.loads(value)
        exceptions = tuple((module, how, exponent) for module, how, exponent in read["exceptions"])
        return cls(read["compute"], read["wide_residual"], exceptions)


@dataclass(frozen=True)
class Fix:
    """A change that resolves a finding.

    Attributes:
        description: the change as an instruction ("return each norm's output in bfloat16").
        safety: `"safe"` keeps the meaning of the model and its stored digits; `"unsafe"` may not.
        verified: whether a second trace with the fix lacks the finding and has no new ones.
        actions: the changes; empty if they cannot be expressed.
        outcome: result of the second trace, "" before it.
        command: the command in the description, as a program and its arguments; empty without one.
    """

    description: str
    safety: Safety
    verified: bool = False
    actions: tuple[Action, ...] = ()
    outcome: str = ""
    command: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The instruction ("return each norm's output in bfloat16") with its command, in one line."""
        return f"{self.description}: {printed_command(self.command)}" if self.command else self.description

    @property
    def scope(self) -> Scope:
        """The farthest scope of its actions: a fix that also needs a setting is the caller's."""
        scopes = [action.scope for action in self.actions]
        return max(scopes, key=SCOPES.index, default="advice")


def marked(fix: Fix) -> str:
    """Return a fix's description, marked if it names a library's line."""
    return f"{fix.text} (in a library's code)" if fix.scope == "library" else fix.text


def by_preference(fixes: Iterable[Fix], *, unsafe: bool = False, command: bool = False) -> tuple[Fix, ...]:
    """Return fixes in order of preference; the rule's order decides between equal ones.

    Changes of the model come before settings, the user's lines and library lines; safe ones before unsafe
    ones of the same scope. Unsafe fixes come after all safe ones unless `unsafe`, but before library lines.

    Args:
        fixes: of one finding.
        unsafe: whether unsafe fixes are requested.
        command: whether a command is repaired, whose settings can be changed and whose model cannot.
    """
    scopes: Sequence[Scope] = ("setting", *(s for s in SCOPES if s != "setting")) if command else SCOPES

    def rank(fix: Fix) -> tuple[bool, bool, int, bool]:
        last, risky = fix.scope in ("library", "advice"), fix.safety == "unsafe"
        return last, risky and not unsafe, scopes.index(fix.scope), risky

    return tuple(sorted(fixes, key=rank))


@dataclass(frozen=True)
class Cost:
    """The cost of a silent finding in one step.

    Attributes:
        flops_share: share (0 to 1) of the step's FLOPs in a slower dtype.
        cast_bytes: bytes read and written by the casts that it needs.
        memory_bytes: additional bytes at the peak.
        slowdown: estimated step time over the step time without it, on the device profile; None if
            unknown.
    """

    flops_share: Share = 0.0
    cast_bytes: int = 0
    memory_bytes: int = 0
    slowdown: float | None = None


@dataclass(frozen=True)
class Finding:
    """A fact that a rule derives from a trace. All operators broken by one cause share a finding.

    Attributes:
        code: `IST###`.
        severity: `"error"` crashes or corrupts; `"warning"` silently costs speed, memory or precision;
            `"note"`.
        message: the fact in one line.
        module: fully qualified name of the module where it surfaces first.
        op: the operator, "" if there is none.
        phase: phase of the step.
        source: `file:line` of the code that called the operator.
        cause: fully qualified name or source of the code that introduced the dtype, and how.
        evidence: the dtype's path from cause to place, one line per step.
        notes: further facts (how many places, what was assumed).
        fixes: in order of preference, see `by_preference`.
        operands: of the operator, for the terminal.
        cost: of a silent finding, else None.
        places: every module it surfaces in.
        kind: topic of the finding; `judge` sets its rule's.
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
        """Identity of a finding across two traces of the same model."""
        return (self.code, self.cause, self.module)


def places(of: Iterable[Call | Weight]) -> tuple[str, ...]:
    """Return the modules of calls or weights without duplicates."""
    return tuple(dict.fromkeys(each.module for each in of))


def finding_at(
    code: str, severity: Severity, message: str, call: Call, others: Iterable[Call] = (), **more: Any
) -> Finding:
    """Return a finding about an operator and about `others` with the same cause."""
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
