"""Explains the exception that ended a script under `isotype run`, from the recorded step and from another trace of it."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from types import ModuleType

import torch
from torch import nn

from isotype.contracts.contract import applies_to_cpus_only, contracts_of
from isotype.core.dtypes import dtype_name
from isotype.core.errors import causes, error_line
from isotype.core.names import listed
from isotype.core.source import condition_at, line_of, raising_line
from isotype.model.loss import NOT_TRAINABLE
from isotype.model.shard import free_gathered, uncopied
from isotype.preflight.script import setup_errors
from isotype.preflight.script.ahead import TRIED_AFTER, look_ahead, tried
from isotype.preflight.script.family import Family
from isotype.preflight.script.missing_gpu import MissingGpu
from isotype.preflight.script.output import Output
from isotype.preflight.script.outside import (
    Unloads,
    calls_of,
    casts_since,
    outside,
    owners_in,
    stepped_at,
    updated_at,
)
from isotype.records.finding import Finding
from isotype.records.memory import Memory
from isotype.records.request import DEFAULT_PHASES, Setup, StepRequest
from isotype.records.trace import GRADIENT_ERRORS, NOTHING_UNSCALED, Breach, Call, Failure, Trace
from isotype.report.check.report import Report
from isotype.rules import (
    ist107_recomputation,
    ist307_no_gradient,
    ist308_clipped_scaled,
    ist309_not_trained,
    ist403_packed_raw,
    judge,
)
from isotype.rules.kit.groups import code_of
from isotype.trace.live.forward import Beginning, trains
from isotype.trace.live.watch import Watch

AGAIN_SECONDS = 60.0
"""Time limit in seconds for tracing the step again after a crash."""
_UNSCALE_REFUSED = "Attempting to unscale FP16 gradients"
_ABOUT_GRADIENTS = (_UNSCALE_REFUSED, *GRADIENT_ERRORS)
# Words for incompatible dtypes in errors of torch and its libraries.
_ABOUT_DTYPES = re.compile(
    r"dtype|scalar type|data type|for complex tensors|not implemented for '|\b(c10::)?(B?Float16|Half|BFloat16|FP16|float32|Double)\b",
    re.IGNORECASE,
)
_NAMED_DTYPES = re.compile(r"\b(?:bfloat16|half|float|double)\b")


@dataclass
class Crash:
    """Explains the exception that ended a script.

    Attributes:
        watch: the `Watch` of the script's steps, with the recorder of the last step.
        family: the processes of the run. Only one of these processes explains an error.
        gpu: the GPU that the script asked for and that this machine lacks.
        unloads: the lines at which PEFT has removed adapters.
        report: the report of the trace before the first step; None without this trace.
        request: function that builds the request for the last known step from its model; None if no step is known.
        seen: the settings of the last recorded step; None before this step has ended.
        request_of: function that builds the request for a forward of any model, with the phases to trace.
        setup: function that returns the settings of the watched step; None if its model no longer exists.
        casts: printed descriptions of casts after the step that was checked.
    """

    watch: Watch
    family: Family
    output: Output
    gpu: MissingGpu
    unloads: Unloads
    report: Report | None
    request: partial[StepRequest] | None
    seen: Setup | None
    request_of: Callable[..., StepRequest]
    setup: Callable[[], Setup | None]
    casts: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.model = self.watch.model

    def explain(self, error: BaseException) -> bool:
        for link in causes(error):
            text, recorder = str(link), self.watch.recorder
            updates = any(isinstance(owner, torch.optim.Optimizer) for owner in owners_in(link))
            if _UNSCALE_REFUSED in text or (self.model is None and updates):
                self.model = updated_at(link) or self.model
            known = setup_errors.explained(link)
            refused = _has(text, ist308_clipped_scaled.REFUSALS)
            if known is not None and (self.request is None or not refused):
                if self.family.claim("explained"):
                    self.output.say("this set-up cannot train:")
                    self.output.outside(known)
                return True
            if recorder is not None and recorder.failed is not None and recorder.failure_text == text:
                return self._explain_once(partial(self._explain, text, type(link).__name__, link))
            if _has(text, _ABOUT_GRADIENTS) or refused or _ABOUT_DTYPES.search(text):
                if self.model is None and self.request is not None and not self.family.knows("explained"):
                    return self._explain_by_other(link) and self.family.claim("explained")
                return self._explain_once(partial(self._explain_elsewhere, link))
            if sentence := self.gpu.explained(link):
                if self.family.claim("explained"):
                    self.output.say(sentence)
                return True
        if foreseen := self._foreseen_in_layer(error):
            return self._explain_once(partial(self._repeat, foreseen))
        return False

    def _foreseen_in_layer(self, error: BaseException) -> list[Finding]:
        """Return the findings about the quantization state of the layer that raised the error, whatever the error is."""
        raised_in = {id(owner) for owner in owners_in(error)}
        parts = () if self.model is None or self.report is None else self.model.named_modules()
        names = {name for name, part in parts if id(part) in raised_in and not [*part.children()]}
        errors = self.report.errors if self.report is not None else ()
        return [
            f for f in errors if f.code.startswith("IST4") and not names.isdisjoint((f.module, *f.places))
        ]

    def _repeat(self, findings: Sequence[Finding]) -> None:
        self.output.say("predicted before the step:")
        self.output.brief(findings)

    def explain_printed(self) -> bool:
        """Explain the error of the recorded step. The script has printed the traceback before its exit."""
        recorder = self.watch.recorder
        if recorder is None or recorder.failed is None:
            return False
        return self._explain_once(partial(self._explain, recorder.failure_text, "RuntimeError"))

    def _explain_once(self, explain: Callable[[], None]) -> bool:
        """Call `explain`, unless another process has explained the error. Return True if the error was explained."""
        if self.family.knows("explained"):
            if self.family.is_top:
                self.output.say("the process that raised this error has printed the explanation above")
            return True
        if self.request is None or self.model is None or not self.family.claim("explained"):
            return False
        explain()
        return True

    def _explain(self, text: str, name: str, error: BaseException | None = None) -> None:
        recorder = self.watch.recorder
        assert recorder is not None
        call = recorder.failed
        assert call is not None
        if error is not None and self._explain_by_other(error, call.phase == "generate"):
            return
        refused = recorder.contracts.refusal(call.op, (operand.dtype for operand in call.operands))
        first, _, _ = text.strip().partition("\n")
        headline = f"{name}: {first}"
        if not _ABOUT_DTYPES.search(text):
            foreseen = None if refused else _matching(self.report, call, ())
            if foreseen is not None and foreseen.findings[0].op == call.op:
                self.output.say("predicted before the step:")
                self.output.render(foreseen)
                return
            if self._explain_by_codes(call, headline):
                return
            if refused is None:
                at = f" in {call.module}" if call.module else ""
                self.output.say(f"{call.op}{at} ({call.phase}) raised this error; dtypes are not the cause:")
                self.output.call(call)
                return
        # The script has caught the errors of other operators. So these are no breaches.
        recorder.calls[:] = [c if c is call else replace(c, breach=None) for c in recorder.calls]
        self._diagnose(call, headline)

    def _explain_by_codes(self, call: Call, headline: str) -> bool:
        """Report packed codes that the failed operator read as if they were the weight. Return True if it did."""
        setup = self.setup()
        if setup is None:
            return False
        trace = self.watch.trace(setup, Failure(call.phase, call.module, call.source, headline))
        if codes := findings_of(judge(trace), ist403_packed_raw):
            self.output.render(Report(trace, tuple(codes)))
        return bool(codes)

    def _explain_elsewhere(self, error: BaseException) -> None:
        """Explain a dtype error that an operator raises after the recorded step, or that other code raises."""
        text, recorder, model = str(error), self.watch.recorder, self.model
        headline = error_line(error)
        assert model is not None
        assert self.request is not None
        if _UNSCALE_REFUSED in text:
            self.request = partial(self.request, scaler=True)
            if recorder is not None:
                breach = Breach(f"{_UNSCALE_REFUSED}.", False, None)
                call = Call("GradScaler.unscale_", "unscale", "", "", (), (), breach=breach)
                recorder.calls.append(call)
                self._diagnose(call, headline)
                return
        if _has(text, ist308_clipped_scaled.REFUSALS) and (setup := self.seen or self.setup()):
            failure = Failure("optimizer", "", setup_errors.line_of_script(error), headline)
            trace = Trace(setup, (), (), {}, Memory({}), failure)
            self.output.brief(findings_of(judge(trace), ist308_clipped_scaled))
            return
        if type(error).__name__ == "CheckpointError" and recorder is not None and (setup := self.setup()):
            failure = Failure("backward", "", line_of(error), headline, recomputed=True)
            self.output.brief(findings_of(judge(self.watch.trace(setup, failure)), ist107_recomputation))
            return
        lost = {} if recorder is None else {**recorder.without_autocast}
        for module in owners_in(error):
            if isinstance(module, nn.Module) and module in lost:
                self.output.say(lost[module])
                return
        if self._explain_by_other(error):
            return
        of_gradients = _has(text, _ABOUT_GRADIENTS)
        report = self._traced_again(trains=of_gradients)
        shown = report is not None and ((of_gradients and report.errors) or _shows(report, text))
        if (
            not shown
            and not of_gradients
            and self._explain_by_call(error, calls_of(error)[-1:], "the call of {}")
        ):
            return
        if report is None:
            return
        if shown:
            self.output.say("a trace of the script's last known step explains the error:")
            self.output.render(report)
        elif report.errors:
            self.output.say("a trace of the script's last known step shows other errors, but not this one:")
            self.output.outside(outside(error, model, report.trace, self.unloads.lines))
            self.output.brief(report.errors)
        elif (end := report.trace.failure) is not None:
            self.output.say(f"a trace of the script's last known step ended in {end.phase}: {end.error}")
        else:
            without = f", without {listed(report.trace.untraced)}," if report.trace.untraced else ""
            described = outside(error, model, report.trace, self.unloads.lines)
            cause = described.cause or ("" if self.casts else "the cause is outside of the step")
            clean = f"a trace of the script's last known step{without} runs clean"
            self.output.say(f"{cause}; {clean}" if cause else clean)
            self.output.outside(replace(described, cause=""))
            for optimizer in stepped_at(error) if NOTHING_UNSCALED in text and recorder is not None else []:
                self.watch.weigh_gradients(optimizer)
                findings = judge(self.watch.trace(self.setup() or report.trace.setup))
                self.output.brief(findings_of(findings, ist307_no_gradient, ist309_not_trained))

    def _diagnose(self, call: Call, headline: str) -> None:
        self.watch.scaler |= call.phase == "unscale"
        setup = self.setup()
        if setup is None:
            self.output.call(call)
            return
        recorder = self.watch.recorder
        refused = contracts_of(setup.profile).refusal(call.op, (operand.dtype for operand in call.operands))
        if refused and applies_to_cpus_only(headline) and recorder is not None:
            breach = Breach(refused.message, refused.assumed, None)  # the simulated device refuses them, too
            recorder.calls[:] = [replace(c, breach=breach) if c is call else c for c in recorder.calls]
        place = call.phase, call.module, call.source
        failure = Failure(*place, headline, dtype_related=True, condition=condition_at(call.source))
        trace = self.watch.trace(setup, failure)
        if recorder is not None and recorder.gathered is not None:
            weights = (w if w.buffer else replace(w, gathered=recorder.gathered) for w in trace.weights)
            trace = replace(trace, weights=tuple(weights))
        # The finding of the failure would only repeat the traceback.
        live = [finding for finding in judge(replace(trace, failure=None)) if finding.severity == "error"]
        foreseen = _matching(self.report, call, live)
        again = foreseen if foreseen is not None and tried(foreseen) else None
        again = again or _matching(self._traced_again(generates=call.phase == "generate"), call, live)
        if again is None and call.phase == "forward":  # perhaps in an evaluation during the step
            again = _matching(self._traced_again(generates=True), call, live)
        again = again or foreseen
        if again is not None:
            self.output.say(
                "predicted before the step:" if foreseen else "a trace of the step explains the error:"
            )
            self.output.render(again)
        elif live and (setup.profile.present or refused or not applies_to_cpus_only(headline)):
            self.output.render(Report(trace, tuple(live)))
        else:
            absent = f"this CPU has no kernel for these dtypes, but a trace for {setup.profile.title} does not show the error:"
            self.output.say(absent if live else f"{call.op} got incompatible dtypes:")
            self.output.call(call)

    def _traced_again(self, *, trains: bool = False, generates: bool = False) -> Report | None:
        """Trace the step again on fake tensors, and try the fixes. Return the report, or None if this is not possible."""
        model = self.model
        if model is None or self.request is None or uncopied(model):
            return None
        request = self.request(model)
        # The request may be for an evaluation before the training. If a backward raised, a training step is traced.
        phases = DEFAULT_PHASES if trains else request.phases
        report = self._traced(replace(request, phases=(*phases, *(["generate"] if generates else []))))
        if self.report and report and model is self.watch.model:
            casts = {*casts_since(self.report.trace, report.trace)}
            for what in sorted(casts - self.casts):
                self.output.say(f"after the step that was checked, the script has cast {what}")
            self.casts |= casts
        return report

    def _explain_by_other(self, error: BaseException, evaluates: bool = False) -> bool:
        """If no recorded step has called the model of the failed call, trace this call. Return True if the trace
        explains the error.

        If `evaluates` is True, no training step was recorded yet. The recorded forward may then be the forward of a
        part (`vae.conv`) that another method of the model (`vae.encode`) called.
        """
        recorded = [root for root in (*self.watch.roots, self.model) if root is not None]
        inside = {id(part) for root in recorded for part in root.modules()}
        other = [
            call
            for call in calls_of(error)
            if inside.isdisjoint(map(id, call.model.modules()))
            or (evaluates and call.method and id(call.model) not in inside)
        ]
        seen = any(not inside.isdisjoint(map(id, call.model.modules())) for call in other)
        of = "the call of {}" if seen else "another model of the script, {},"
        return self._explain_by_call(error, other, of)

    def _explain_by_call(self, error: BaseException, calls: Sequence[Beginning], of: str) -> bool:
        """Trace the calls of models that raised the error, with and without gradients and autocast.

        Return True if a trace fails at the line of the error.
        """
        assert self.request is not None
        trained, line = self.request.keywords["autocast"], raising_line(error)
        phases: list[list[Sequence[str]]] = [[], [("generate",)]]
        for called, phase, autocast in product(calls, phases, dict.fromkeys((trained, False))):
            model = called.model
            if uncopied(model) or next(model.parameters(), None) is None or not (phase or trains(model)):
                continue
            request = self.request_of(called, *phase)
            on = autocast is not False
            report = self._traced(replace(request, autocast=autocast, autocast_eval=on))
            sources = [] if report is None else [call.source for call in report.trace.breaches()]
            failure = "" if report is None or report.trace.failure is None else report.trace.failure.error
            if report is None or {line, ""}.isdisjoint(sources) or not _shows(report, str(error)):
                continue
            if NOT_TRAINABLE in failure and not phase:
                continue  # the result is tokens: the next trace is one without gradients
            self.output.say(f"a trace of {of.format(report.trace.model)} explains the error:")
            if autocast != trained:
                to = dtype_name(trained)
                self.output.say(
                    f"the training step runs under autocast to {to}, but this call runs without autocast"
                )
            self.output.render(report)
            return True
        return False

    def _traced(self, request: StepRequest) -> Report | None:
        """Trace a step after a crash, and try the fixes. Return the report, or None if this is not possible."""
        try:
            free_gathered(request.model)  # parameters that FSDP had gathered at the crash
            with self.output.working("tracing the step again, and trying the fixes"):
                return look_ahead(request, TRIED_AFTER, AGAIN_SECONDS)
        except Exception as error:  # noqa: BLE001 - the script's error was shown; this is one more line
            self.output.say(f"the last known step could not be traced: {error_line(error)}")
            return None


def _matching(report: Report | None, call: Call, live: Sequence[Finding]) -> Report | None:
    """Return the report, after moving the finding that explains `call` or is in `live` to the front; None without one."""
    if report is None:
        return None
    codes, causes = {finding.code for finding in live}, {finding.cause for finding in live}
    for finding in report.errors:
        place = call.module in (finding.module, *finding.places) or call.source == finding.source
        known = (place and finding.phase == call.phase) or finding.cause in causes
        if known and (finding.code in codes or not live):
            notes = "the script stopped here", *finding.notes
            # A finding about the error that ended the trace names no operator.
            op = finding.op or (call.op if finding.source == call.source else "")
            stopped = replace(finding, op=op, source=finding.source or call.source, notes=notes)
            others = [other for other in report.findings if other is not finding]
            return replace(report, findings=(stopped, *others))
    return None


def _has(text: str, phrases: Iterable[str]) -> bool:
    return any(phrase in text for phrase in phrases)


def _shows(report: Report, text: str) -> bool:
    """Return True if an operator, FSDP or the code of the traced step raises an error that names the dtypes in the text."""
    named, failure = {*_NAMED_DTYPES.findall(text.lower())}, report.trace.failure
    messages = [call.refusal for call in report.trace.breaches()]
    messages += [] if failure is None else [failure.error]
    messages += [note for finding in report.errors for note in finding.notes if " raises: " in note]
    shown = not named or any(named.issubset(_NAMED_DTYPES.findall(message.lower())) for message in messages)
    return shown and bool(report.errors)


def findings_of(findings: Iterable[Finding], *rules: ModuleType) -> list[Finding]:
    codes = {code_of(rule.__name__) for rule in rules}
    return [finding for finding in findings if finding.code in codes]
