"""check: see one training step, judge it, try the fixes. The one place where trace, rules and fixes meet."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from isotype.core.dtypes import parse_dtype
from isotype.core.errors import IsotypeError, Problem, UsageError
from isotype.model.adapters import adapter_words
from isotype.model.enforce import policy_of
from isotype.precision.devices.profile import device_profile
from isotype.precision.policy import PrecisionPolicy
from isotype.preflight.apply import apply_actions
from isotype.preflight.repair import needs_the_caller
from isotype.report.check.record import Report
from isotype.rules import clears, judge
from isotype.rules.finding import Action, Finding, Fix, Severity
from isotype.trace.fake.optimizers import learning_rate_of, unknown_optimizer
from isotype.trace.fake.step import LossOf, failed_trace, trace_step, untouched_by
from isotype.trace.fake.untouched import Untouched
from isotype.trace.record import PHASES, Call, Phase, Setup, Trace, Weight
from isotype.trace.sides import tallies, whole
from isotype.trace.source import first_line, line_of
from isotype.trace.weights import unread_weights, weights_of

DEFAULT_PHASES: tuple[Phase, ...] = ("forward", "backward", "unscale", "optimizer")


def check(
    model: Any,
    inputs: Any = None,
    policy: PrecisionPolicy | None = None,
    device: str | torch.device | None = None,
    autocast: str | torch.dtype | bool | None = None,
    scaler: bool | None = None,
    optimizer: Any = "adamw",
    phases: Sequence[str] = DEFAULT_PHASES,
    *,
    learning_rate: float | None = None,
    fsdp: int = 0,
    gradient_checkpointing: Mapping[str, Any] | bool | None = None,
    generate: Callable[[nn.Module], Any] | None = None,
    autocast_eval: bool = False,
    verify: bool = True,
    seconds: float = math.inf,
    fold: bool = False,
) -> Report:
    """Run one training step on fake tensors, find every dtype problem in it, and try the fixes.

    The model, the inputs and the random states come out untouched; no weights are read or copied.

    Args:
        model: any `nn.Module`, real or on the meta device; or a transformers/TRL trainer (then nothing else is
            needed: its first batch and its arguments are taken).
        inputs: the keyword arguments the model is called with (labels included), or a callable model -> loss.
        policy: the policy the model is meant to follow; by default the one it carries, if any.
        device: a device profile (`"t4"`) or a real device; by default the policy's, else the best one here.
        autocast: dtype of autocast around forward and loss; None: the policy's, else off; False: off.
        scaler: whether a GradScaler is used; None: with float16 autocast.
        optimizer: a name (`"adamw"`, `"adamw_fused"`, `"sgd"`, …), an optimizer, or a callable parameters ->
            optimizer.
        phases: of the step, in order; `"generate"` adds a forward without labels and gradients.
        learning_rate: of the optimizer, for rules on lost updates.
        fsdp: 0, or the version of FSDP the run is sharded by.
        gradient_checkpointing: switch it on for the step: True, or the arguments of the model's
            `gradient_checkpointing_enable`; None leaves it as the model has it.
        generate: what the phase `"generate"` runs, given the model.
        autocast_eval: whether autocast is on in the phase `"generate"` too.
        verify: whether fixes are tried by a second trace each.
        seconds: that the step may be traced for; what was seen until then is judged. Trials of fixes are not counted.
        fold: trace layers that are equal but for their values once; what is found in one is said of all.

    What cannot be traced is a finding (IST199), with all that was seen until then.

    Raises:
        UsageError: arguments that do not fit; PrecisionError: an unknown device or dtype.
    """
    if not isinstance(model, nn.Module):
        from isotype.preflight.from_trainer import check_trainer

        return check_trainer(model, verify=verify)
    _check_arguments(inputs, phases, optimizer)
    started = time.perf_counter()
    policy = policy or policy_of(model)
    if policy is not None and policy.keep_frozen:
        policy = None
    setup = _setup(model, policy, device, autocast, scaler, optimizer, phases, learning_rate, fsdp)
    setup = replace(
        setup,
        gradient_checkpointing={} if gradient_checkpointing is True else gradient_checkpointing or None,
        autocast_eval=autocast_eval,
        checkpoint_dtype=_checkpoint_dtype(model),
        attention=getattr(getattr(model, "config", None), "_attn_implementation", None),
        batch=_shapes(inputs),
        details=(*adapter_words(model), *_checkpointing_words(model, gradient_checkpointing)),
    )
    given = None if isinstance(optimizer, str) else optimizer
    try:
        step = _Step(model, inputs, setup, given, generate, weights_of(model), fold)
        trace = step.trace(deadline=time.monotonic() + seconds)
    except IsotypeError:
        raise
    except Exception as error:  # noqa: BLE001 - a check never ends a script: IST199 says what it failed on
        trace = failed_trace(model, setup, error)
        return Report(trace, judge(trace), time.perf_counter() - started)
    findings = judge(trace)
    if verify:
        findings = _verified(step, trace, findings)
    return Report(trace, findings, time.perf_counter() - started, step.judged)


def _verified(step: _Step, trace: Trace, findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """The findings with their fixes tried; as they were, and one that says so, where trying them failed."""
    try:
        # Nobody else's code runs between these traces: what it reaches is saved once for all of them, and let go then.
        saved = untouched_by(step.model, step.inputs, step.optimizer, step.generate)
        return replace(step, untouched=saved).verified(trace, findings)
    except Exception as error:  # noqa: BLE001 - what was found stays, whatever trying its fixes met
        said = f"{type(error).__name__}: {first_line(error)}"
        message = f"the fixes could not be tried, because {said}"
        return (*findings, Finding("IST199", "warning", message, source=line_of(error), cause=said))


def _checkpointing_words(model: nn.Module, asked: object) -> tuple[str, ...]:
    on = asked or any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules())
    return ("gradient checkpointing",) if on else ("no gradient checkpointing",)


def _check_arguments(inputs: Any, phases: Sequence[str], optimizer: Any) -> None:
    problems = list(unknown_optimizer(optimizer))
    if not callable(inputs) and not isinstance(inputs, (Mapping, LossOf)) and not hasattr(inputs, "keys"):
        problems.append(
            Problem(
                f"inputs of type {type(inputs).__name__}",
                "the dict that the model is called with (labels included), or a callable model -> loss",
                "isotype.check(model, {'input_ids': …, 'labels': …})",
            )
        )
    unknown = [phase for phase in phases if phase not in PHASES]
    if unknown:
        problems.append(Problem(f"phases {unknown}", f"of {', '.join(PHASES)}", "leave them out"))
    if problems:
        raise UsageError("the step cannot be checked as asked", problems)


def _setup(
    model: nn.Module,
    policy: PrecisionPolicy | None,
    device: Any,
    autocast: Any,
    scaler: bool | None,
    optimizer: Any,
    phases: Sequence[str],
    learning_rate: float | None,
    fsdp: int,
) -> Setup:
    profile = device_profile(device if device is not None else policy.device if policy else "auto")
    if autocast is None and policy is not None:
        autocast = policy.autocast
    cast = None if autocast in (None, False) else parse_dtype(autocast)
    known = policy.compute if policy is not None else cast
    if isinstance(optimizer, torch.optim.Optimizer) and learning_rate is None:
        learning_rate = learning_rate_of(optimizer)
    return Setup(
        profile=profile,
        autocast=cast,
        scaler=cast == torch.float16 if scaler is None else scaler,
        optimizer=optimizer if isinstance(optimizer, str) else type(optimizer).__name__,
        compute=known or compute_dtype(model),
        learning_rate=learning_rate,
        phases=tuple(phase for phase in PHASES if phase in phases),
        policy=policy,
        fsdp=fsdp,
    )


def _shapes(inputs: Any) -> dict[str, tuple[int, ...]]:
    given = inputs.inputs if isinstance(inputs, LossOf) else {} if callable(inputs) else inputs
    return {name: tuple(value.shape) for name, value in given.items() if isinstance(value, torch.Tensor)}


def _checkpoint_dtype(model: nn.Module) -> torch.dtype | None:
    """The dtype the model's config says its checkpoint was saved in."""
    dtype = getattr(getattr(model, "config", None), "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else None


def compute_dtype(model: nn.Module) -> torch.dtype:
    """The dtype a model computes in by itself: that of most modules that compute, of most elements in a tie."""
    return whole(tallies(unread_weights(model))) or torch.float32


@dataclass(frozen=True)
class _Step:
    """A step that can be traced again with a fix in it."""

    model: nn.Module
    inputs: Any
    setup: Setup
    optimizer: Any
    generate: Callable[[nn.Module], Any] | None
    weights: Sequence[Weight]
    folded: bool = False
    untouched: Untouched | None = None
    known: dict[tuple[Action, ...], tuple[Finding, ...]] = field(default_factory=dict)

    def trace(self, actions: Sequence[Action] = (), deadline: float = math.inf) -> Trace:
        setup = with_settings(self.setup, actions)

        def change(twin: nn.Module) -> None:
            apply_actions(twin, actions)

        return trace_step(
            self.model,
            self.inputs,
            setup,
            change=change if actions else None,
            lines={each.target: parse_dtype(each.value) for each in actions if each.kind == "line"},
            optimizer=self.optimizer,
            generate=self.generate,
            weights=self.weights,
            deadline=deadline,
            folded=self.folded,
            untouched=self.untouched,
        )

    def judged(self, actions: Sequence[Action]) -> tuple[Finding, ...]:
        """What is found with `actions` applied to the model as it was checked; traced once."""
        key = tuple(actions)
        if key not in self.known:
            self.known[key] = judge(self.trace(actions))
        return self.known[key]

    def verified(self, trace: Trace, findings: Sequence[Finding]) -> tuple[Finding, ...]:
        """The findings with fixes that were tried and work, and with what only the user can do."""
        tried: dict[tuple[Action, ...], tuple[Finding, ...] | None] = {}
        mended = [replace(finding, fixes=self._working(finding, findings, tried)) for finding in findings]
        return _roots(mended, tried, _order(trace))

    def _working(
        self,
        finding: Finding,
        findings: Sequence[Finding],
        tried: dict[tuple[Action, ...], tuple[Finding, ...] | None],
    ) -> tuple[Fix, ...]:
        good: list[Fix] = []
        dear: list[Fix] = []
        advice = [fix for fix in finding.fixes if _only_advice(fix)]
        for fix in finding.fixes:
            if fix in advice or len(good) == _FIXES_SHOWN[finding.severity]:
                continue
            if fix.actions not in tried:
                tried[fix.actions] = self._with(fix.actions)
            after = tried[fix.actions]
            if after is not None and clears(finding, findings, after):
                good.append(replace(fix, verified=True, outcome=_outcome(after)))
            elif after is not None and finding.severity == "error" and clears(finding, findings, after, True):
                dear.append(replace(fix, verified=True, outcome=_priced(findings, after)))
        return (*(good or dear[:1]), *advice)

    def _with(self, actions: Sequence[Action]) -> tuple[Finding, ...] | None:
        try:
            return self.judged(actions)
        except UsageError:
            return None  # it names what this model has not


def _roots(
    findings: Sequence[Finding],
    tried: Mapping[tuple[Action, ...], Sequence[Finding] | None],
    order: Mapping[tuple[str, str, str], int],
) -> tuple[Finding, ...]:
    """The findings without the errors that come of another one.

    An error comes of another where that one's fix clears both, and none of its own fixes clears the other; what the
    step meets first comes of nothing that it meets later. A change of the step's arguments or of a line says nothing
    here: it may mend several causes at once.
    """
    errors = [finding for finding in findings if finding.severity == "error"]
    met = {finding.key: order.get(_place(finding), len(order)) for finding in errors}
    gone = {finding.key: _cleared(finding, errors, tried) for finding in errors}
    come: dict[tuple[str, str, str], list[Finding]] = {}
    left = list(errors)
    for root in sorted(errors, key=lambda finding: -len(gone[finding.key])):
        clear = [each for each in left if each.key in gone[root.key] and root.key not in gone[each.key]]
        for other in clear:
            if root in left and other is not root and met[other.key] >= met[root.key]:
                left.remove(other)
                come.setdefault(root.key, []).append(other)
    return tuple(
        replace(finding, notes=(*finding.notes, _come_of_it(come[finding.key])))
        if finding.key in come
        else finding
        for finding in findings
        if finding.severity != "error" or finding in left
    )


def _order(trace: Trace) -> dict[tuple[str, str, str], int]:
    """Where the step breaks a contract first, second, …"""
    return {place: at for at, place in enumerate(dict.fromkeys(map(_place, trace.breaches())))}


def _place(where: Finding | Call) -> tuple[str, str, str]:
    return where.phase, where.module, where.source


def _cleared(
    finding: Finding,
    errors: Sequence[Finding],
    tried: Mapping[tuple[Action, ...], Sequence[Finding] | None],
) -> set[tuple[str, str, str]]:
    found: set[tuple[str, str, str]] = set()
    for fix in finding.fixes:
        after = tried.get(fix.actions) if fix.verified else None
        if after is not None and not needs_the_caller(fix):
            present = {(each.code, each.cause) for each in after}
            found |= {each.key for each in errors if (each.code, each.cause) not in present}
    return found


def _come_of_it(errors: Sequence[Finding]) -> str:
    places = [f"{each.code} at {each.source.rpartition('/')[2] or each.module}" for each in errors]
    more = f" and {len(places) - 3} more" if len(places) > 3 else ""
    plural = "s come" if len(places) > 1 else " comes"
    return f"{len(places)} more error{plural} of it: {', '.join(places[:3])}{more}"


# Tried in order of preference: more ways than these to mend the same thing help nobody, and each costs a trace.
_FIXES_SHOWN: Mapping[Severity, int] = {"error": 3, "warning": 3, "note": 1}


def _outcome(after: Sequence[Finding]) -> str:
    left = sum(1 for each in after if each.severity != "note")
    if not left:
        return "the step then runs clean"
    return f"it is gone; {left} other finding{'s' if left > 1 else ''} left"


def _priced(before: Sequence[Finding], after: Sequence[Finding]) -> str:
    known = {each.code for each in before}
    new = sorted({each.code for each in after if each.severity == "warning" and each.code not in known})
    return f"it is gone, at the price of {', '.join(new)}"


def _only_advice(fix: Fix) -> bool:
    return all(action.kind == "advice" for action in fix.actions)


def with_settings(setup: Setup, actions: Sequence[Action]) -> Setup:
    """The set-up after the `setting` actions among `actions`.

    Values are written as in Python: a dtype's name, `True`, `None`, a number.
    """
    changes: dict[str, Any] = {}
    for action in actions:
        if action.kind == "setting":
            changes[action.target] = setting_value(action.value)
    if "autocast" in changes and "scaler" not in changes:
        changes["scaler"] = setup.scaler or changes["autocast"] == torch.float16
    return replace(setup, **changes)


def setting_value(value: str) -> Any:
    """What the value of a `setting` action stands for."""
    words = {"True": True, "False": False, "None": None}
    if value in words:
        return words[value]
    try:
        return float(value) if not value.isdigit() else int(value)
    except ValueError:
        named = getattr(torch, value, None)
        return named if isinstance(named, torch.dtype) else value
