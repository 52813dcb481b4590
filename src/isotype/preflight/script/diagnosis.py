"""The output of `isotype run`: before the first step, after a step, and at the end of the script."""

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
from rich.console import Console
from torch import nn

from isotype.compat.accelerate import PREPARED, mixed_precision
from isotype.core.dtypes import dtype_name
from isotype.core.errors import error_line
from isotype.core.names import plural
from isotype.core.optimizers import parameters_of
from isotype.model.shard import uncopied
from isotype.model.walk import living
from isotype.precision.devices.profile import device_profile
from isotype.precision.versions import incompatible_here
from isotype.preflight.script.ahead import (
    TRIED_BEFORE,
    LossOfForward,
    look_ahead,
    rank,
    request_of_script,
    steps_scaled,
    tried,
    without_tensors,
)
from isotype.preflight.script.crash import Crash, findings_of
from isotype.preflight.script.family import Family, Options
from isotype.preflight.script.missing_gpu import MissingGpu
from isotype.preflight.script.numbers import Numbers
from isotype.preflight.script.output import Output, peak_of
from isotype.preflight.script.outside import Unloads
from isotype.preflight.setup import compute_dtype
from isotype.records.finding import Finding
from isotype.records.memory import Memory
from isotype.records.request import Setup, StepRequest
from isotype.records.trace import Call, Trace
from isotype.report.check.report import Report
from isotype.rules import (
    ist107_recomputation,
    ist302_scaler_bfloat16,
    ist303_no_scaler,
    ist305_optimizer,
    ist308_clipped_scaled,
    ist309_not_trained,
    ist503_rounded_updates,
    ist801_lost_updates,
    ist805_reductions,
    ist808_counting,
    ist909_stale_casts,
    judge,
)
from isotype.trace.dtype_history import remembered
from isotype.trace.fake.recorder import TimeSpentError
from isotype.trace.live.forward import Averages, Beginning, StaleCasts
from isotype.trace.live.gradients import IdleSteps, KeptGraphs
from isotype.trace.live.recorder import device_of
from isotype.trace.live.watch import MANY_SKIPPED, Watch

MENTIONED_FROM = 5.0
"""If the trace before the first step takes this many seconds, isotype prints a line even without findings."""
_ALL_SKIPPED = (
    "no real step was checked, because the optimizer took no step: either the GradScaler skipped every step "
    "(infinite or NaN gradients), or the script ended before"
)
_SKIPPED = "the gradients are infinite or NaN, so the GradScaler skipped"


class Diagnosis:
    """Records the steps of one script, and prints what isotype finds about them."""

    def __init__(self, options: Options, console: Console, family: Family) -> None:
        twice = partial(self._between, ist308_clipped_scaled)
        hooks = (self._before, self._after, self._evaluates, lambda lines: twice(repeated=lines))
        self.watch = Watch(options.steps, *hooks)
        self.report: Report | None = None
        self._device, self._seconds, self._output = options.device, options.seconds, Output(console)
        self._say, self._brief = self._output.say, self._output.brief
        self._numbers = Numbers(self._say, self.stop) if options.watch else None
        self._stale = StaleCasts(partial(self._between, ist909_stale_casts, stale_casts=True))
        self._averages = Averages(lambda call: self._between(ist503_rounded_updates, (call,)))
        self._kept: KeptGraphs | None = None
        self._idle: IdleSteps | None = None
        self._dtypes = ExitStack()
        self.gpu = MissingGpu(None if options.device is None else device_profile(options.device))
        self._family = family
        self._speaker: int | None = None
        self._main: ModuleType | None = None
        self._request: partial[StepRequest] | None = None
        self._live: tuple[Finding, ...] = ()
        self._late: tuple[Finding, ...] = ()
        self._setup_seen: Setup | None = None
        self._autocasts: dict[str, torch.dtype] = {}
        self._loss_traced = True

    def begin(self) -> None:
        self._unloads = Unloads()
        self._dtypes.enter_context(remembered())
        self.gpu.attach()
        self.watch.attach()

    def stop(self) -> None:
        """Remove all hooks from the script. The recorded data stay."""
        self._averages.detach()
        self.watch.detach()
        self._stale.detach()
        self._unloads.close()
        self.gpu.detach()
        self._dtypes.close()
        for optional in (self._numbers, self._kept, self._idle):
            if optional is not None:
                optional.detach()

    # ------------------------------------------------------------------------------------------------ before a step

    @property
    def _speaks(self) -> bool:
        """True if this process reports on the first step. False in a fork of this process."""
        return self._speaker == os.getpid()

    def _before(self, beginning: Beginning) -> nn.Module | None:
        """Trace the first step, and return its model if the step is a call of this model's method."""
        self._family.claim("seen")
        self._main = sys.modules["__main__"]
        if rank() == 0 and self._family.claim("speaks"):
            self._speaker = os.getpid()
        if self.gpu.sentence and self._speaks:
            self._say(self.gpu.sentence)
        ahead = self._seconds and self._speaks
        calls: list[Beginning | None] = [beginning.around if ahead else None, beginning]
        for call in filter(None, calls):
            request = self._request_of(call)
            self.report = self._looked_ahead(request, call is beginning) if ahead else None
            if self.report is not None:
                break
        self._request = without_tensors(request)
        if self._numbers is not None:
            self._numbers.attach(beginning.model, beginning.args, beginning.kwargs)
        return None if call is beginning else request.model

    def _evaluates(self, beginning: Beginning) -> None:
        """Before the first training step, store the settings of a forward. The forward is traced again after an error."""
        self._request = without_tensors(self._request_of(beginning, ("generate",)))

    def _request_of(self, beginning: Beginning, *phases: Sequence[str]) -> StepRequest:
        request = request_of_script(beginning, LossOfForward(beginning.method), self._device, *phases)
        casts: dict[Any, torch.dtype] = self.gpu.device_autocast
        self.watch.kind, self.watch.device_autocast = self.gpu.kind, casts
        return replace(request, autocast=casts.get(request.autocast, request.autocast))

    def _looked_ahead(self, request: StepRequest, last: bool) -> Report | None:
        """Trace a step, and report its findings. Discard an incomplete trace, unless this is the `last` possible trace."""
        say: Callable[[str], None] = self._say if last else lambda _: None
        if why := uncopied(request.model):
            say(f"the first step is not traced before it runs: {why}")
            return None
        started = time.perf_counter()
        try:
            with self._output.working(f"tracing the first step before it runs (at most {self._seconds:g} s)"):
                report = look_ahead(request, TRIED_BEFORE, self._seconds)
        except Exception as error:  # noqa: BLE001 - the script runs even if it cannot be traced ahead
            say(f"the first step could not be traced: {error_line(error)}")
            return None
        self._loss_traced = not report.trace.partial
        failed = report.trace.failure is not None and not report.errors
        if not last and (failed or not self._loss_traced):
            return None
        # `_say_ahead` reports the error that ended the trace. A finding that only repeats this error is left out.
        raised = "" if report.trace.failure is None else report.trace.failure.error
        repeats = [f for f in report.findings if f.kind == "untraced" and raised in f.cause]
        # Only the real step shows whether the script's own code uses a GradScaler.
        left_out = [
            *repeats,
            *([] if steps_scaled() else findings_of(report.findings, ist302_scaler_bfloat16)),
        ]
        report = replace(report, findings=tuple(f for f in report.findings if f not in left_out))
        report = replace(report, again=None)  # the function would keep the model's memory
        self._say_ahead(report, time.perf_counter() - started)
        return report

    def _say_ahead(self, report: Report, seconds: float) -> None:
        title, failure = report.trace.setup.profile.title, report.trace.failure
        spent = failure is not None and failure.error.startswith(TimeSpentError.__name__)
        # Warnings need the cost of the whole step. Errors also hold for a part of it.
        findings = [*report.errors, *(() if spent else report.warnings)]
        if findings:
            untried = "" if tried(report) else "; fixes were not tried yet"
            self._say(f"before the first step, on {title} ({seconds:.1f} s{untried}):")
            self._brief(findings)
        elif seconds > MENTIONED_FROM and failure is None:
            self._say(f"the first step was traced on {title} ({seconds:.1f} s): no findings")
        if failure is not None:
            where = f"{failure.phase} of {failure.module}" if failure.module else failure.phase
            reason = (
                f"the limit of {self._seconds:g} s (--preflight-seconds) was reached"
                if spent
                else failure.error
            )
            self._say(f"the first step was traced only up to {where}: {reason}")
        if not self._loss_traced:
            self._say("the model returns no loss, so the loss that the script computes was not traced")

    # ------------------------------------------------------------------------------------------------- after a step

    def _after(self) -> None:
        self._setup_seen = setup = self._setup()
        if setup is not None and (self.report is None or not self.report.complete):
            self._live = judge(self._trace(setup))
        elif setup is not None and self._speaks:
            trace = self._trace(setup)
            ahead = {call.module for call in self.report.trace.calls} if self.report is not None else set()
            traced = {*dict(self.watch.roots[0].named_modules())} - {part.module for part in trace.unreached}
            # A module that only the script's loss calls was not traced before the step.
            traced -= {call.module for call in trace.calls} - ahead
            code = trace.unheld, trace.scaled, trace.no_autocast, trace.lost_terms, trace.idle_checkpoints
            if not self._loss_traced or setup.scaler or any(code):
                traced.discard("")  # the script's own code, which computes the loss and clips gradients
            findings = [f for f in judge(trace) if f.severity != "note"]
            # The check before the step assumes that the script uses its GradScaler.
            assert self._request is not None
            late = [ist107_recomputation, ist302_scaler_bfloat16, ist808_counting]
            late += [ist303_no_scaler] if trace.spoiled or self._request.keywords["scaler"] else []
            late += [ist801_lost_updates] if trace.unmoved else []
            late += [ist305_optimizer] if trace.state_casts else []
            shown = findings_of(findings, *late)
            self._say_late([f for f in findings if f.module not in traced or f in shown])
        before = tuple(replace(call, phase="forward") for call in self.watch.evaluation)
        self._between(ist805_reductions, before)
        self.watch.evaluation = ()
        if self._speaks and self._kept is None:
            self._kept = KeptGraphs(self._say)
            self._idle = IdleSteps(
                lambda *step: self._between(ist309_not_trained, when="after a later step:", idle_step=step)
            )
            recorder = self.watch.recorder if self._numbers is None else None
            if recorder is not None and (word := recorder.terms.not_finite(self.watch.scaler)):
                self._say(f"the loss of the first step is {word}; `isotype run --watch` finds the operator")
            elif recorder is not None and self.watch.not_finite and not recorder.terms.not_finite(False):
                self._say(
                    f"the loss of the first step is finite, but the gradient of {self.watch.not_finite} is not; `isotype run --watch` finds the operator"
                )
        if self.watch.skipped == MANY_SKIPPED and self._speaks:
            self._say(f"{_SKIPPED} {MANY_SKIPPED} steps; `isotype run --watch` finds the operator")
        if self.watch.skipping:
            return
        if (model := self.watch.model) is not None:
            self._stale.stepped(torch.device(device_of(model)).type)
        if self._setup_seen is not None and self._speaks:
            self._averages.stepped(self.watch.roots)

    def _trace(self, setup: Setup) -> Trace:
        """Return the trace of the last step. The text `no_autocast` says why a step without autocast is unexpected."""
        recorder = self.watch.recorder
        assert recorder is not None
        asked, products, why = mixed_precision(), recorder.products(), ""
        models = (root.parameters() for root in self.watch.roots if getattr(root, PREPARED, False))
        steps = (parameters_of(o) for o in living(torch.optim.Optimizer) if getattr(o, PREPARED, False))
        prepared = recorder.names_of(weight for weights in (*models, *steps) for weight in weights)
        autocasts = {name: call.autocast for name, call in products.items() if call.autocast is not None}
        if not autocasts and any(call.results[0][0] == torch.float32 for call in products.values()):
            before = [self._autocasts[name] for name in products if name in self._autocasts]
            if asked in ("fp16", "bf16") and not prepared.isdisjoint(products):
                why = f"accelerate's mixed precision is {asked}"
                if (asked, recorder.autocast_device, self.gpu.kind) == ("fp16", "cpu", "cpu"):
                    why += ", which has no effect on a CPU"
            why = f"earlier steps ran under autocast to {dtype_name(before[0])}" if before else why
        self._autocasts |= autocasts
        return self.watch.trace(setup, no_autocast=why)

    def _between(self, rule: ModuleType, calls: tuple[Call, ...] = (), when: str = "", **seen: Any) -> None:
        """Report the findings of a rule between two steps. The rule gets a trace with `calls` and the fields in `seen`."""
        if self._setup_seen is not None and self._speaks:
            trace = Trace(self._setup_seen, calls, (), {}, Memory({}), **seen)
            self._say_late(findings_of(judge(trace), rule), when)

    def _say_late(self, findings: Sequence[Finding], when: str = "") -> None:
        """Report findings of the real step. Skip finding codes that were already reported with this severity or as an
        error.

        `when` is the headline. The default headline has the number of steps so far.
        """
        known = {(finding.code, finding.severity) for finding in (*self._findings(), *self._late)}
        if new := [f for f in findings if not known & {(f.code, "error"), (f.code, f.severity)}]:
            self._late += tuple(new)
            number = len(self.watch.seen) + self.watch.skipped + self._averages.later
            self._say(when or ("after the first step:" if number <= 1 else f"after step {number}:"))
            self._brief(new)

    def _setup(self) -> Setup | None:
        """Return the recorded settings of the watched step; None if its model no longer exists."""
        watch, model = self.watch, self.watch.model
        if model is None or watch.recorder is None:
            return None
        autocast, profile = watch.autocast(), device_profile(self._device or device_of(model))
        assert self._request is not None
        asked = self._request.keywords
        return Setup(
            profile=profile,
            autocast=autocast,
            # Without the phase "unscale", the script itself scales the loss. A step that fails scales it too late.
            scaler=watch.scaler
            or watch.gradients.get("scaled", False)
            or (asked["scaler"] and not ("unscale" in asked["phases"] and watch.optimizer)),
            phases=asked["phases"],
            optimizer=watch.optimizer or "an optimizer",
            compute=autocast or compute_dtype(nn.ModuleList(watch.roots)),
            learning_rate=watch.learning_rate,
            incompatible=incompatible_here() if profile.present else (),
        )

    def left(self, code: Any, reason: BaseException | None) -> bool:
        """Print findings after a script has exited, and return True if an error was explained. Call `stop` first.

        `code` is the argument of `sys.exit`. `reason` is the exception that the script was handling at the exit, or
        None.
        """
        explained = reason is not None and self.crashed(reason)
        if not explained and code not in (None, 0):
            explained = self._crash().explain_printed()
        if not explained and (self._speaks or self._family.is_top):
            self._print_summary()
        self.watch.forget()
        return explained

    def _print_summary(self) -> None:
        watch = self.watch
        for note in watch.notes:
            self._say(note)
        findings = [finding for finding in (*self._findings(), *self._late) if finding.severity != "note"]
        notes = [finding for finding in self._findings() if finding.severity == "note"]
        if self.report is None or not self.report.complete:
            self._brief([finding for finding in findings if finding not in self._late])
        if not watch.seen:
            recorder = watch.recorder
            phases = set() if recorder is None else {call.phase for call in recorder.calls}
            if watch.skipped:
                self._say(
                    f"{_SKIPPED} at least {plural(watch.skipped, 'step')}, so the optimizer took no step"
                )
            elif "unscale" in phases:
                self._say(_ALL_SKIPPED)
            elif recorder is not None and recorder.failed is None and phases == {"forward"}:
                peak = peak_of(recorder.ledger.record())
                self._say(f"forwards with gradients, but no backward: {peak}; torch.no_grad() saves memory")
            return
        steps, last = len(watch.seen), watch.seen[-1]
        words = plural(len(findings), "finding") if findings else "no findings"
        words += f" and {plural(len(notes), 'note')}" if notes else ""
        watched = "step 1" if steps == 1 else f"steps 1-{steps}"
        self._say(
            f"{watched} watched: {plural(last.operators, 'operator')}, {words}; {peak_of(last.memory)}; "
            "later steps and evaluations are not included"
        )
        self._output.notes(notes)

    def _findings(self) -> tuple[Finding, ...]:
        return self.report.findings if self.report is not None and self.report.complete else self._live

    # -------------------------------------------------------------------------------------------------- after a crash

    def crashed(self, error: BaseException) -> bool:
        """Explain the exception that ended the script, and return True if there was an explanation. Call `stop` first."""
        main = sys.modules["__main__"]
        sys.modules["__main__"] = self._main or main  # another trace reads the script's code again
        try:
            return self._crash().explain(error)
        finally:
            sys.modules["__main__"] = main
            self.watch.forget()

    def _crash(self) -> Crash:
        known = self.report, self._request, self._setup_seen
        return Crash(
            self.watch,
            self._family,
            self._output,
            self.gpu,
            self._unloads,
            *known,
            self._request_of,
            self._setup,
        )
