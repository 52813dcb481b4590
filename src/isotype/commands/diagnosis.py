"""What `isotype run` says: before the first step, at the script's end, and under the traceback of a crash."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from typing import Any

import torch
from rich.console import Console
from torch import nn

from isotype.dtypes import dtype_name
from isotype.precision.hardware import device_profile
from isotype.preflight import DEFAULT_PHASES, check, compute_dtype
from isotype.report.check import Report
from isotype.report.check_text import fix_standing, render, repairable, short_source
from isotype.report.text import format_bytes
from isotype.rules import judge
from isotype.rules.finding import Finding
from isotype.rules.words import evidence, plural
from isotype.trace.live import device_of
from isotype.trace.modes import no_modes
from isotype.trace.optimizers import learning_rate_of
from isotype.trace.record import Breach, Call, Failure, Memory, Operand, Origin, Setup
from isotype.trace.step import LossOf, loss_of
from isotype.trace.watch import Beginning, Watch, enumerate_inputs

VERIFY_WITHIN = 20.0
"""Seconds that trying the fixes may take, each by one more look ahead; the script waits."""

MENTIONED_FROM = 5.0
"""Seconds from which on a look ahead that found nothing is mentioned: the script waited for it."""

_NOT_FOLLOWED = "IST199"
_UNSCALE_REFUSED = "Attempting to unscale FP16 gradients"
# How torch and its friends put it when dtypes do not fit.
_ABOUT_DTYPES = re.compile(
    r"dtype|scalar type|data type|not implemented for '|\b(c10::)?(B?Float16|Half|BFloat16|FP16|float32|Double)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Ahead:
    """The arguments of `check` for the script's step.

    Attributes:
        inputs: of the first forward, or their shapes.
        device, autocast, scaler, optimizer, learning_rate: as `check` takes them.
    """

    inputs: LossOf
    device: str
    autocast: torch.dtype | None
    scaler: bool
    optimizer: Any
    learning_rate: float | None

    def check(self, model: nn.Module, phases: Sequence[str] = DEFAULT_PHASES) -> Report:
        """The report; fixes are tried where that does not take long. Nothing of the script is touched."""
        step = partial(
            check,
            model,
            self.inputs,
            device=self.device,
            autocast=self.autocast or False,
            scaler=self.scaler,
            optimizer=self.optimizer or "adamw",
            learning_rate=self.learning_rate,
            phases=phases,
        )
        with _unnoticed():
            report = step(verify=False)
            if report.findings and _trial_seconds(report) <= VERIFY_WITHIN:
                report = step(verify=True)
        return report


class Diagnosis:
    """Follows one script and speaks about it.

    Args:
        steps: optimizer steps to watch.
        device: a profile to judge for, None for the device the model is on.
        preflight: whether the step is followed on fake tensors before it runs.
        console: where to speak.
    """

    def __init__(self, steps: int, device: str | None, preflight: bool, console: Console) -> None:
        self.watch = Watch(steps, self._before, self._after)
        self.report: Report | None = None
        self._device, self._preflight, self._console = device, preflight, console
        self._ahead: Ahead | None = None
        self._live: tuple[Finding, ...] = ()
        self._returned_loss = True
        self._stopped = False

    def begin(self) -> None:
        """Wait for the first step."""
        self.watch.attach()

    def stop(self) -> None:
        """Take everything away from the script; what was recorded stays."""
        self.watch.detach()
        self._stopped = True

    # ------------------------------------------------------------------------------------------------ before a step

    def _before(self, beginning: Beginning) -> None:
        model = getattr(beginning.model, "module", beginning.model)
        model = model if _is_wrapper(beginning.model) else beginning.model
        device = device_of(model)
        optimizer, scaler = _helpers(model)
        ahead = Ahead(
            LossOf(self._loss, _given(beginning)),
            self._device or device,
            autocast_of(model, device),
            scaler,
            _asked(optimizer),
            None if optimizer is None else learning_rate_of(optimizer),
        )
        if self._preflight:
            self.report = self._looked_ahead(ahead, model)
        shapes = torch.utils._pytree.tree_map(_shape_only, ahead.inputs.inputs)
        self._ahead = replace(ahead, inputs=LossOf(self._loss, shapes))

    def _loss(self, model: nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
        args = [value for name, value in inputs.items() if name.startswith("argument ")]
        output = model(*args, **{k: v for k, v in inputs.items() if not k.startswith("argument ")})
        self._returned_loss = _has_loss(output)
        return loss_of(output)

    def _looked_ahead(self, ahead: Ahead, model: nn.Module) -> Report | None:
        started = time.perf_counter()
        try:
            report = ahead.check(model)
        except Exception as error:  # noqa: BLE001 - the script runs whether or not we can look ahead
            self._say(f"the step could not be followed ahead: {type(error).__name__}: {_first_line(error)}")
            return None
        # That the step was not followed to its end is said below.
        report = replace(
            report, findings=tuple(finding for finding in report.findings if finding.code != _NOT_FOLLOWED)
        )
        seconds, found = time.perf_counter() - started, (*report.errors, *report.warnings)
        title = report.trace.setup.profile.title
        if found:
            tried = "" if _tried(report) else "; fixes were not tried, that would take too long"
            self._say(f"before the first step, on {title} ({seconds:.1f} s{tried}):")
            self._print_brief(found)
        elif seconds > MENTIONED_FROM:
            self._say(f"looked ahead at the first step, on {title} ({seconds:.1f} s): no findings")
        failure = report.trace.failure
        if failure is not None:
            where = f"{failure.phase} of {failure.module}" if failure.module else failure.phase
            self._say(f"the step could be followed ahead only up to {where}: {failure.error}")
        if not self._returned_loss:
            self._say("the model returns no loss: the script's own loss could not be followed ahead")
        return report

    # ------------------------------------------------------------------------------------------------- after a step

    def _after(self) -> None:
        if self.report is None or not self.report.complete:
            setup = self._setup()
            if setup is not None:
                self._live = judge(self.watch.trace(setup))

    def _setup(self) -> Setup | None:
        """How the watched step was run, as far as it was seen; None where its model has gone."""
        watch, model = self.watch, self.watch.model
        if model is None or watch.recorder is None:
            return None
        autocast = watch.autocast()
        return Setup(
            profile=device_profile(self._device or device_of(model)),
            autocast=autocast,
            scaler=watch.scaler,
            optimizer=watch.optimizer or "an optimizer",
            compute=autocast or compute_dtype(nn.ModuleList(watch.roots)),
            learning_rate=watch.learning_rate,
        )

    def left(self, code: Any) -> None:
        """The script has ended by itself, with `code` as `sys.exit` takes it."""
        recorder = self.watch.recorder
        died = code not in (None, 0) and recorder is not None and bool(recorder.failure_text)
        self.stop()
        if died and recorder is not None:
            # A script that prints its own traceback and leaves.
            self._explain(recorder.failure_text, "RuntimeError")
        else:
            self._print_summary()
        self.watch.forget()

    def _print_summary(self) -> None:
        watch = self.watch
        for note in watch.notes:
            self._say(note)
        if not watch.seen:
            self._say("no training step was seen")
            return
        steps, last = len(watch.seen), watch.seen[-1]
        found = [finding for finding in self._findings() if finding.severity != "note"]
        if self.report is None or not self.report.complete:
            self._print_brief(found)
        words = plural(len(found), "finding") if found else "no findings"
        step = "step 1" if steps == 1 else f"steps 1-{steps}"
        self._say(f"{step} watched: {plural(last.operators, 'operator')}, {words}; {_peak(last.memory)}")

    def _findings(self) -> tuple[Finding, ...]:
        return self.report.findings if self.report is not None and self.report.complete else self._live

    # -------------------------------------------------------------------------------------------------- after a crash

    def crashed(self, error: BaseException) -> None:
        """Explain an exception that ended the script; `stop` has been called."""
        for each in _chain(error):
            text = str(each)
            recorder = self.watch.recorder
            if recorder is not None and recorder.failure_text and recorder.failure_text == text:
                self._explain(text, type(each).__name__)
                break
            if _UNSCALE_REFUSED in text or _ABOUT_DTYPES.search(text):
                self._explain_elsewhere(text, type(each).__name__)
                break
        self.watch.forget()

    def _explain(self, text: str, name: str) -> None:
        """An operator of the watched step raised."""
        recorder = self.watch.recorder
        assert recorder is not None
        call = next(call for call in reversed(recorder.calls) if call.breach is not None)
        verdict = recorder.contracts.judge(call.op, tuple(operand.dtype for operand in call.operands))
        rejected = verdict is not None and not verdict.accepted
        if not rejected and not _ABOUT_DTYPES.search(text):
            at = f" in {call.module}" if call.module else ""
            self._say(f"{call.op}{at} ({call.phase}) raised this; dtypes are not the cause:")
            self._print_call(call)
            return
        # Only what ended the script is broken; what the script caught is not.
        recorder.calls[:] = [call if each is call else replace(each, breach=None) for each in recorder.calls]
        self._diagnose(call, f"{name}: {text.strip().splitlines()[0]}")

    def _explain_elsewhere(self, text: str, name: str) -> None:
        """Something about dtypes was raised by no operator that was watched: after the watch, or above operators."""
        headline, recorder = f"{name}: {text.strip().splitlines()[0]}", self.watch.recorder
        model, ahead = self.watch.model, self._ahead
        if model is None or ahead is None:
            self._say("no training step had begun: nothing to diagnose")
            return
        if _UNSCALE_REFUSED in text:
            ahead = replace(ahead, scaler=True)
            if recorder is not None:
                call = _unscaled(model, recorder.origin)
                recorder.calls.append(call)
                self.watch.scaler = True
                self._diagnose(call, headline)
                return
        try:
            report = ahead.check(model, phases=(*DEFAULT_PHASES, "generate"))
        except Exception as error:  # noqa: BLE001 - the script's own error was shown; this is one line under it
            self._say(
                f"its last known step could not be followed: {type(error).__name__}: {_first_line(error)}"
            )
            return
        if report.errors:
            self._say("the script's last known step, followed once more, explains it:")
            self._render(report)
        else:
            self._say(
                "the script's last known step, followed once more, runs clean: the cause lies outside of it"
            )

    def _diagnose(self, call: Call, headline: str) -> None:
        setup = self._setup()
        if setup is None:
            self._print_call(call)
            return
        failure = Failure(call.phase, call.module, call.source, headline, dtype_related=True)
        trace = self.watch.trace(setup, failure)
        # That the step ended early is what the traceback says.
        live = [finding for finding in judge(replace(trace, failure=None)) if finding.severity == "error"]
        foreseen = self._foreseen(call, live)
        if foreseen is not None:
            self._say("foreseen before the step:")
            self._render(foreseen)
        elif live:
            self._render(Report(trace, tuple(live)))
        else:
            self._say(f"{call.op} was given dtypes that do not fit:")
            self._print_call(call)

    def _foreseen(self, call: Call, live: Sequence[Finding]) -> Report | None:
        """The look ahead, with the finding that came true first, where it holds one."""
        if self.report is None:
            return None
        codes, causes = {finding.code for finding in live}, {finding.cause for finding in live}
        for finding in self.report.errors:
            place = call.module in (finding.module, *finding.places) and finding.phase == call.phase
            if (place or finding.cause in causes) and (finding.code in codes or not live):
                came = replace(finding, notes=("the script stopped here", *finding.notes))
                others = [other for other in self.report.findings if other is not finding]
                return replace(self.report, findings=(came, *others))
        return None

    # ------------------------------------------------------------------------------------------------------ speaking

    def _say(self, text: str) -> None:
        self._console.print(f"isotype: {text}", highlight=False, markup=False, soft_wrap=True)

    def _plain(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _render(self, report: Report) -> None:
        self._plain("")
        render(report, self._console)

    def _print_brief(self, findings: Sequence[Finding]) -> None:
        for finding in findings:
            self._plain(f"{finding.severity}[{finding.code}]: {finding.message}")
            parts = (finding.module or "the model", finding.op, finding.phase, short_source(finding.source))
            self._plain(f"  --> {'   '.join(part for part in parts if part)}")
            if finding.cause:
                self._plain(f"   = cause  {finding.cause}")
            for fix in finding.fixes[:1]:
                self._plain(f"   = help   {fix.description}   ({fix_standing(fix)})")

    def _print_call(self, call: Call) -> None:
        where = "   ".join(
            part for part in (call.module, call.op, call.phase, short_source(call.source)) if part
        )
        self._plain(f"  --> {where}")
        for operand in call.operands:
            way = "; ".join(evidence(operand.origin))
            self._plain(f"   |   {operand.role}  {dtype_name(operand.dtype)}  {list(operand.shape)}   {way}")


# --------------------------------------------------------------------------------------------------------- helpers


@contextlib.contextmanager
def _unnoticed() -> Iterator[None]:
    """Within it the script's modes are off, and what its code prints or warns of is not shown."""
    log = logging.getLogger(
        "torch._subclasses.fake_tensor"
    )  # it logs what a fake kernel refuses, with a traceback
    disabled, log.disabled = log.disabled, True
    try:
        with no_modes(), contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.disabled = disabled


def _trial_seconds(report: Report) -> float:
    trials = {fix.actions for finding in report.findings for fix in finding.fixes if fix.actions}
    return report.seconds * len(trials)


def _tried(report: Report) -> bool:
    """Whether the fixes were tried: one that was says what came of it."""
    fixes = [fix for finding in report.findings for fix in finding.fixes if repairable(fix)]
    return not fixes or any(fix.outcome for fix in fixes)


def _given(beginning: Beginning) -> Mapping[str, Any]:
    if beginning.inputs is not None:
        return beginning.inputs
    return dict(enumerate_inputs(beginning.args, beginning.kwargs))


def _shape_only(leaf: Any) -> Any:
    return leaf.detach().to("meta") if isinstance(leaf, torch.Tensor) else leaf


def _asked(optimizer: torch.optim.Optimizer | None) -> Any:
    """The optimizer as `check` takes it, without the parameters that it holds."""
    if optimizer is None:
        return None
    if type(optimizer).__module__.startswith("bitsandbytes"):
        return type(optimizer).__name__.lower()  # kernels of its own, which `check` knows by name
    known = signature(type(optimizer).__init__).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in known}
    return type(optimizer)([nn.Parameter(torch.zeros(1))], **options)


def _is_wrapper(module: nn.Module) -> bool:
    """Whether it only spreads a model over devices; by name, so that nothing has to be imported."""
    return type(module).__name__ in ("DistributedDataParallel", "DataParallel")


def _helpers(model: nn.Module) -> tuple[torch.optim.Optimizer | None, bool]:
    """The optimizer that trains `model`, and whether an enabled GradScaler exists: a script tells nobody of them."""
    parameters = {id(parameter) for parameter in model.parameters()}
    optimizer, scaler = None, False
    for thing in gc.get_objects():
        # Not isinstance: a lazy object of the script would be made to load.
        if issubclass(type(thing), torch.amp.GradScaler):
            scaler = scaler or thing.is_enabled()
        elif issubclass(type(thing), torch.optim.Optimizer) and not hasattr(thing, "optimizer"):
            trained = (parameter for group in thing.param_groups for parameter in group["params"])
            if any(id(parameter) in parameters for parameter in trained):
                optimizer = thing
    return optimizer, scaler


def autocast_of(model: nn.Module, device: str) -> torch.dtype | None:
    """The autocast dtype that a forward of `model` runs under now, or that accelerate puts around it.

    Accelerate's lies inside the forward. On a CPU the look ahead meets it there; another device's it would not.
    """
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    state = sys.modules.get("accelerate.state")
    if device == "cpu" or state is None or not hasattr(model, "_original_forward"):
        return None
    mixed = str(state.AcceleratorState._shared_state.get("_mixed_precision"))
    return {"fp16": torch.float16, "bf16": torch.bfloat16}.get(mixed)


def _has_loss(output: Any) -> bool:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return isinstance(loss, torch.Tensor) or (isinstance(output, torch.Tensor) and output.ndim == 0)


def _unscaled(model: nn.Module, origin: Callable[[torch.Tensor], Origin]) -> Call:
    """What `GradScaler.unscale_` was given and refused (torch/amp/grad_scaler.py)."""
    operands = []
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and parameter.grad.dtype == torch.float16:
            gradient = parameter.grad
            way = Origin("gradient", gradient.dtype, name, before=origin(parameter))
            operands.append(Operand("grad", gradient.dtype, tuple(gradient.shape), way))
    breach = Breach(f"{_UNSCALE_REFUSED}.", False, None)
    return Call("GradScaler.unscale_", "unscale", "", "", tuple(operands), (), breach=breach)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and all that it was raised from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "")


def _peak(memory: Memory) -> str:
    kinds = memory.phases[memory.peak_phase] if memory.peak_phase is not None else {}
    parts = sorted(((size, kind) for kind, size in kinds.items() if size >= memory.peak / 100), reverse=True)
    return f"peak {format_bytes(memory.peak)} ({', '.join(f'{k} {format_bytes(s)}' for s, k in parts)})"
