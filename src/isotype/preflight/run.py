"""Checks a requested step: traces the step, finds the problems, and tries their fixes."""

import ast
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import nn

from isotype.compat.torch import has_values
from isotype.core.dtypes import dtype_name
from isotype.core.errors import IsotypeError, UsageError, error_line
from isotype.core.names import listed, named, plural, short
from isotype.core.random_states import random_states_kept
from isotype.precision.ranges import Ranges
from isotype.preflight.apply import apply_actions
from isotype.preflight.repair import faults, needs_the_caller
from isotype.preflight.setup import setup_of
from isotype.ranges import measure as ranges_measure
from isotype.ranges.measure import Batches, Measured
from isotype.records.finding import Action, Finding, Fix, Severity
from isotype.records.reach import Reach
from isotype.records.request import Setup, StepRequest, named_inputs
from isotype.records.trace import Call, Trace, Weight
from isotype.report.check.report import Report
from isotype.rules import judge, resolves, unjudged
from isotype.rules.kit.contract_rule import settled
from isotype.rules.kit.value_ranges import computes_float16
from isotype.trace.fake.code import state_reached_by, surroundings
from isotype.trace.fake.state_snapshot import Untouched
from isotype.trace.fake.step import failed_trace, trace_step
from isotype.trace.reach.measure import measure_reach
from isotype.trace.weights import weights_of


@random_states_kept()
def run(
    request: StepRequest,
    *,
    verify: bool = True,
    seconds: float = math.inf,
    measure: bool = True,
    traced: Trace | None = None,
) -> Report:
    """Return the report on a step. `isotype.preflight.check.check` documents the report and the other arguments.

    Args:
        measure: True if the values of a float16 step may be measured.
        traced: the trace of this request, from `trace_of` or from an earlier report; None to trace the request now.
    """
    started = time.perf_counter()
    setup = setup_of(request)
    try:
        # No other code runs between these traces, so the objects that the step can reach are saved once for all traces.
        untouched = state_reached_by(request)
        step = _Step(request, setup, weights_of(request.model), untouched=untouched)
        trace = traced or step.trace(deadline=time.monotonic() + seconds)
        reach = trace.reach or reach_of(request, max(trace.memory.peak // 4, COPIED))
        untouched.restore()
        step, trace = replace(step, reach=reach), replace(trace, reach=reach)
    except IsotypeError:
        raise
    except Exception as error:  # noqa: BLE001 - a check never ends a script: the failure becomes a finding
        trace = failed_trace(request.model, setup, error)
        return Report(trace, judge(trace), time.perf_counter() - started)
    if measure and setup.ranges is None:
        ranges, notes = measured(request, trace)
        trace = replace(trace, setup=replace(trace.setup, ranges=ranges), notes=(*trace.notes, *notes))
        untouched.restore()
        step = replace(step, setup=trace.setup)
    findings = judge(trace)
    if verify:
        try:
            findings = step.verified(trace, findings)
        except Exception as error:  # noqa: BLE001 - the findings stay, whatever the trials raise
            findings = (*findings, unjudged("the fixes could not be tried", error))
    return Report(trace, findings, time.perf_counter() - started, replace(step, untouched=None).judged)


@random_states_kept()
def trace_of(request: StepRequest) -> Trace:
    """Return the trace of a requested step, without findings. If the step cannot be traced, `failure` of the trace has the reason."""
    setup = setup_of(request)
    try:
        return _Step(request, setup, weights_of(request.model)).trace()
    except IsotypeError:
        raise
    except Exception as error:  # noqa: BLE001 - as in `run`
        return failed_trace(request.model, setup, error)


@dataclass(frozen=True)
class _Step:
    """A step that can be traced again with the actions of a fix.

    Attributes:
        known: actions -> the findings of the step with these actions.
        whole: actions of steps that were traced to the end. The values of such a step are measured if it computes in float16.
        tried: actions of a tried fix -> the findings; None if the fix cannot be applied or causes another error.
    """

    request: StepRequest
    setup: Setup
    weights: Sequence[Weight]
    reach: Reach | None = None
    untouched: Untouched | None = None
    known: dict[tuple[Action, ...], tuple[Finding, ...]] = field(default_factory=dict)
    whole: set[tuple[Action, ...]] = field(default_factory=set)
    tried: dict[tuple[Action, ...], tuple[Finding, ...] | None] = field(default_factory=dict)

    def trace(
        self,
        actions: Sequence[Action] = (),
        deadline: float = math.inf,
        enough: Callable[[Trace], bool] | None = None,
    ) -> Trace:
        trace = trace_step(
            self.request,
            with_settings(self.setup, actions),
            weights=self.weights,
            change=partial(apply_actions, actions=actions) if actions else None,
            lines={
                action.target: getattr(torch, action.value) for action in actions if action.kind == "line"
            },
            deadline=deadline,
            untouched=self.untouched,
            enough=enough,
        )
        return replace(trace, reach=self.reach)

    def judged(self, actions: Sequence[Action]) -> tuple[Finding, ...]:
        """Return the findings of the step with `actions`. For the same actions, the step is traced only once."""
        key = tuple(actions)
        if key not in self.known:
            self._judge(key, self.trace(actions))
        return self.known[key]

    def _judge(self, actions: tuple[Action, ...], trace: Trace) -> None:
        self.known[actions] = judge(trace)
        if not trace.untraced and (trace.setup.ranges is not None or not computes_float16(trace)):
            self.whole.add(actions)

    def verified(self, trace: Trace, findings: Sequence[Finding]) -> tuple[Finding, ...]:
        """Return the findings, each with its advice and the fixes that resolve it. `_roots` joins errors that have
        the same cause.

        A finding without such a fix gets the fix of another finding if that fix resolves both.
        """
        fixed = [
            replace(f, fixes=self._working(f, findings), notes=(*self._too_large(f, findings), *f.notes))
            for f in findings
        ]
        working = [fix for finding in fixed for fix in finding.fixes if fix.works]
        for at, finding in enumerate(fixed):
            if finding.severity != "note" and not any(fix.works for fix in finding.fixes):
                both = (fix for fix in working if resolves(finding, findings, self.tried[fix.actions] or ()))
                fixed[at] = replace(finding, fixes=(*islice(both, 1), *finding.fixes))
        order = {place: at for at, place in enumerate(dict.fromkeys(map(_place, trace.breaches())))}
        return _roots(fixed, self.tried, order)

    def _working(self, finding: Finding, findings: Sequence[Finding]) -> tuple[Fix, ...]:
        good: list[Fix] = []
        costly: list[Fix] = []
        advice = [fix for fix in finding.fixes if all(action.kind == "advice" for action in fix.actions)]
        for fix in finding.fixes:
            if fix in advice or len(good) == _FIXES_SHOWN[finding.severity]:
                continue
            after = self._with(fix.actions, finding, findings)
            if after is None:
                continue
            whole = all(other.kind != "untraced" for other in after)
            if resolves(finding, findings, after):
                good.append(replace(fix, verified=whole, outcome=_outcome(after, fix.actions in self.whole)))
            elif finding.severity == "error" and resolves(finding, findings, after, True):
                new = {f.code for f in after if f.severity == "warning"} - {f.code for f in findings}
                outcome = f"the finding is gone, but the step then has {', '.join(sorted(new))}"
                costly.append(replace(fix, verified=whole, outcome=outcome))
        return (*(good or costly[:1]), *advice)

    def _too_large(self, finding: Finding, findings: Sequence[Finding]) -> Iterator[str]:
        """Yield a note about each tried fix that resolves the finding, but makes the step too large for the memory."""
        for fix in finding.fixes:
            after = self.tried.get(fix.actions) or ()
            memory = [other for other in after if other.kind == "memory" and other.severity == "error"]
            if memory and resolves(finding, findings, [other for other in after if other not in memory]):
                yield f"not a fix here: {fix.description}, because {memory[0].message}"

    def _with(
        self, actions: tuple[Action, ...], finding: Finding, findings: Sequence[Finding]
    ) -> tuple[Finding, ...] | None:
        """Return the findings of the step with `actions`; None if the actions cannot be applied or do not resolve `finding`.

        The trace stops after a forward with a new error or with the error of `finding`, because `actions` are then no
        fix.
        """
        if actions in self.tried:
            return self.tried[actions]
        errors = faults(other for other in findings if other.severity == "error")
        shown: frozenset[tuple[str, str]] = frozenset()

        def fails(trace: Trace) -> bool:
            nonlocal shown
            shown = settled(trace)
            return not shown <= errors - {(finding.code, finding.cause)}

        try:
            if actions not in self.known:
                trace = self.trace(actions, enough=fails)
                if not shown <= errors - {(finding.code, finding.cause)}:
                    if not shown <= errors:
                        self.tried[actions] = None
                    return None
                self._judge(actions, trace)
            self.tried[actions] = self.known[actions]
        except UsageError:
            self.tried[actions] = None  # this model lacks a target of the actions
        return self.tried[actions]


def _roots(
    findings: Sequence[Finding],
    tried: Mapping[tuple[Action, ...], Sequence[Finding] | None],
    order: Mapping[tuple[str, str, str], int],
) -> tuple[Finding, ...]:
    """Return the findings. Turn an error that another error causes into a note of that other error.

    Error A causes error B if three conditions hold: B is later in the step, a fix of A resolves both, and no fix of B
    resolves A. Only fixes of the model are considered, because a change of an argument or of the code may fix several
    causes at once.
    """
    errors = [finding for finding in findings if finding.severity == "error"]
    position = {finding.key: order.get(_place(finding), len(order)) for finding in errors}
    resolved = {finding.key: _resolved(finding, errors, tried) for finding in errors}
    below: dict[tuple[str, str, str], list[Finding]] = {}
    roots = list(errors)
    for root in sorted(errors, key=lambda finding: -len(resolved[finding.key])):
        for other in list(roots):
            downstream = other.key in resolved[root.key] and root.key not in resolved[other.key]
            later = other is not root and position[other.key] >= position[root.key]
            if downstream and later and root in roots:
                roots.remove(other)
                below.setdefault(root.key, []).append(other)
    notes = {key: (_downstream(errors),) for key, errors in below.items()}
    kept = (f for f in findings if f.severity != "error" or f in roots)
    return tuple(replace(f, notes=(*f.notes, *notes.get(f.key, ()))) for f in kept)


def _place(where: Finding | Call) -> tuple[str, str, str]:
    return where.phase, where.module, where.source


def _resolved(
    finding: Finding, errors: Sequence[Finding], tried: Mapping[tuple[Action, ...], Sequence[Finding] | None]
) -> set[tuple[str, str, str]]:
    resolved: set[tuple[str, str, str]] = set()
    for fix in finding.fixes:
        after = tried.get(fix.actions) if fix.works else None
        if after is not None and not needs_the_caller(fix):
            present = faults(after)
            resolved |= {error.key for error in errors if (error.code, error.cause) not in present}
    return resolved


def _downstream(errors: Sequence[Finding]) -> str:
    places = [f"{error.code} at {short(error.source) or named(error.module)}" for error in errors]
    return f"{plural(len(places), 'downstream error')}: {listed(places)}"


# Number of preferred fixes that a finding shows. More alternatives would not help, and each needs a trace.
_FIXES_SHOWN: Mapping[Severity, int] = {"error": 3, "warning": 3, "note": 1}


def _outcome(after: Sequence[Finding], whole: bool) -> str:
    if any(finding.kind == "untraced" for finding in after):
        return "the finding is gone, but the step was not traced to its end"
    if remaining := sum(finding.severity != "note" for finding in after):
        return f"the finding is gone; {plural(remaining, 'other finding')} left"
    return "the step then runs clean" if whole else "nothing else is found"


def with_settings(setup: Setup, actions: Sequence[Action]) -> Setup:
    changes: dict[str, Any] = {a.target: setting_value(a.value) for a in actions if a.kind == "setting"}
    if "autocast" in changes and "scaler" not in changes:
        changes["scaler"] = setup.scaler or changes["autocast"] == torch.float16
    was = setup.policy
    if "master_dtype" in changes and was is not None:
        changes["policy"] = replace(was, master=changes.pop("master_dtype"))
    if "compute" in changes and was is not None:  # the request itself changes
        compute = changes["compute"]
        storage = dtype_name(compute) if was.storage == dtype_name(was.compute) else was.storage
        scaling = changes.get("scaler", was.loss_scaling)
        changes["policy"] = replace(was, compute=compute, storage=storage, loss_scaling=scaling)
    return replace(setup, **changes)


def setting_value(value: str) -> Any:
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError):
        dtype = getattr(torch, value, None)
        return dtype if isinstance(dtype, torch.dtype) else value


COPIED = 64 << 20
"""Bytes that `measure_reach` may always use for a copy of layers, even if the step itself needs little memory."""


def reach_of(request: StepRequest, most_bytes: int) -> Reach | None:
    """Measure the inputs of the step that affect each prediction.

    Return None if the request disables this measurement, or if the inputs have no token ids or labels. The measurement
    runs a copy of the model's layers. If this copy needs more than `most_bytes`, the measurement runs a small model of
    the same class, if possible.
    """
    if request.wiring is False or "forward" not in request.phases:
        return None
    batch = named_inputs(request.inputs) if request.wiring is True else request.wiring
    inputs = {name: value for name, value in batch.items() if name.isidentifier() and name != "fused_lm_head"}
    with surroundings():
        reach = measure_reach(
            request.model,
            inputs,
            most_bytes=most_bytes,
            others=request.others,
            sharing="fsdp" if request.fsdp else "ddp" if request.devices > 1 else "",
        )
    if "fused_lm_head" not in batch or reach is None or reach.labels is None or reach.labels.shift != 0:
        return reach
    # The model's own forward may not shift the labels (BartForCausalLM), but the step's fused head shifts them.
    return replace(reach, labels=replace(reach.labels, shift=1))


logger = logging.getLogger("isotype")

SECONDS = 20.0
"""A check measures value ranges if the estimated time is at most this many seconds. `measure_ranges` has no limit."""

_FLOPS_A_SECOND = {"cpu": 3e10, "cuda": 3e12}
"""Maps a device type to the float32 FLOP/s of a slow device of this type: two CPU cores with AVX2, and a T4 GPU."""
_WEIGHTS_A_SECOND = 2e8
"""Number of weights that are cast to float32 per second."""
_AGAIN = 4 / 3
"""FLOPs of a measurement divided by the FLOPs of a step: the backward of a measurement recomputes the forward of each block."""


def measured(request: StepRequest, trace: Trace) -> tuple[Ranges | None, tuple[str, ...]]:
    """Return the measured ranges or None, and notes on values that were not measured."""
    model, inputs = request.model, named_inputs(request.inputs)
    if not _measurable(model, inputs, trace):
        return None, ()
    seconds = _seconds_to_measure(model, trace)
    if seconds > SECONDS:
        return None, (f"value ranges: a measurement on this machine would take about {seconds:.0f} s",)
    logger.info("measuring value ranges, for about %.0f s at most", seconds)
    try:
        with surroundings():
            ranges = ranges_measure.measure(Measured.of(model), Batches.of(dict(inputs)))
        return ranges, tuple(f"value ranges: {note}" for note in ranges.notes)
    except Exception as error:  # noqa: BLE001 - a check never ends a script: the report says what was not measured
        raised = error_line(error)
        return None, (f"value ranges: the model could not be measured on these inputs, because of {raised}",)


def _measurable(model: nn.Module, inputs: Mapping[str, object], trace: Trace) -> bool:
    if trace.failure is not None or not computes_float16(trace):
        return False
    named = bool(inputs) and all(name.isidentifier() for name in inputs)
    tensors = [value for value in inputs.values() if isinstance(value, torch.Tensor)]
    return named and all(has_values(tensor) and tensor.numel() for tensor in (*model.parameters(), *tensors))


def _seconds_to_measure(model: nn.Module, trace: Trace) -> float:
    devices = {parameter.device.type for parameter in model.parameters()} or {"cpu"}
    rate = min(_FLOPS_A_SECOND.get(device, _FLOPS_A_SECOND["cpu"]) for device in devices)
    weights = sum(parameter.numel() for parameter in model.parameters())
    return _AGAIN * sum(trace.flops.values()) / rate + 2 * weights / _WEIGHTS_A_SECOND
