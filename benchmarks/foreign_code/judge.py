"""One set-up judged: the real step says what happens, where and whether a repair helps; the preflight is asked first."""

from __future__ import annotations

import gc
import hashlib
import os
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy
import torch
from tests.reality import Outcome, real_step
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

import isotype
from foreign_code.case import Case, Step
from isotype.preflight.run import setting_value
from isotype.records.finding import Finding
from isotype.report.check.report import Report

_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
# Code that has no line to edit: torch's own, Python's, and what torch.fx generates.
_NOBODYS = (_TORCH, "<frozen", "<eval_with_key>")
_OURS = (str(Path(isotype.__file__).parent), str(Path(__file__).parents[2] / "tests"))


@dataclass
class Row:
    """What became of one set-up.

    Attributes:
        code_base, case: which.
        real: `runs`, or what the real step raised.
        real_place: `phase module file:line` of it.
        said: `runs`, `raises`, `unknown` (the step was not traced to its end), or what check itself raised.
        said_place: of the first error.
        causes: of the error findings.
        verdict, place, cause, repaired: whether right; None where there was nothing to judge.
        repair: what was done, what the caller had to do, and how the real step then ended.
        untouched: what check changed: the loss, the weights, random states, fake tensors that are still alive.
        seconds: CPU time of the real step, of check without and with trying fixes.
    """

    code_base: str
    case: str
    real: str = ""
    real_place: str = ""
    said: str = ""
    said_place: str = ""
    causes: list[str] = field(default_factory=list)
    verdict: bool | None = None
    place: bool | None = None
    cause: bool | None = None
    repaired: bool | None = None
    repair: str = ""
    touched: list[str] = field(default_factory=list)
    seconds: tuple[float, float, float] = (0.0, 0.0, 0.0)


def warm_up() -> None:
    """What a first step and a first check load is no set-up's time."""
    case = Case("warm-up", lambda: Step(torch.nn.Linear(2, 2), lambda model: model(torch.ones(1, 2)).sum()))
    _run(made(case))
    checked(made(case))


def judge(code_base: str, case: Case, fixes: bool = True) -> Row:
    """Run, check, run again what was checked, repair, run; without `fixes` none is tried and nothing repaired."""
    row = Row(code_base, case.name)
    outcome = _run(made(case))
    row.real = "runs" if outcome[0].error is None else _one_line(outcome[0].error)
    _ask(row, case, outcome, fixes)
    row.touched += _alive()
    return row


def _ask(row: Row, case: Case, outcome: tuple[Outcome, str, float], fixes: bool) -> None:
    """Check the set-up, compare with the real `outcome`, and run what was checked and what was repaired."""
    real, digest, real_seconds = outcome
    line = _line(real.error) if real.error is not None else ""
    row.real_place = f"{real.phase} {real.module} {line}".strip()
    step = made(case)
    states, seconds = _random_states(), 0.0
    try:
        report, fast_seconds = _timed(lambda: checked(step, verify=False))
        if fixes:
            report, seconds = _timed(lambda: checked(step, verify=True))
    except Exception as error:  # noqa: BLE001 - a check that raises is a result
        row.said, row.verdict = f"check raised {_one_line(error)} at {_line(error, inside=True)}", False
        return
    if states != _random_states():
        row.touched.append("random states")
    row.seconds = (real_seconds, fast_seconds, seconds)
    _compare(row, case, real, line, report)
    again, digest_again, _ = _run(step)
    row.touched += _differences(real, digest, again, digest_again)
    if fixes and (real.error is not None or report.errors):
        _repair(row, step, report)


def made(case: Case) -> Step:
    """The set-up, the same each time."""
    _seed()
    return case.build()


def checked(step: Step, verify: bool = True) -> Report:
    """`isotype.check` of a set-up on this machine's CPU."""
    return isotype.check(
        step.model,
        step.inputs,
        device="cpu",
        autocast=step.autocast or False,
        scaler=step.scaler,
        optimizer=step.optimizer,
        verify=verify,
    )


def _run(step: Step, lines: Mapping[str, torch.dtype] | None = None) -> tuple[Outcome, str, float]:
    """The real step: how it ended, a digest of the weights after it, and its seconds."""
    step.model.train()
    _seed()
    with EditedLines(lines) if lines else nullcontext():
        outcome, seconds = _timed(
            lambda: real_step(
                step.model, step.inputs, autocast=step.autocast, scaler=step.scaler, optimizer=step.optimizer
            )
        )
    digest = hashlib.sha256()
    for value in (*step.model.parameters(), *step.model.buffers()):
        if isinstance(value, torch.Tensor):
            digest.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return outcome, digest.hexdigest(), seconds


def _compare(row: Row, case: Case, real: Outcome, line: str, report: Report) -> None:
    errors = report.errors
    row.said = "raises" if errors else "runs" if report.complete else f"unknown: {report.trace.failure}"
    row.causes = [f"{finding.code} {finding.cause}" for finding in errors]
    row.verdict = row.said == ("runs" if real.error is None else "raises")
    if real.error is None:
        return
    at = [finding for finding in errors if _is_at(finding, real, line)]
    first = next(iter(at or errors), None)
    if first is not None:
        row.said_place = f"{first.phase} {first.module} {first.source}".strip()
    row.place = bool(at)
    row.cause = bool(errors) and all(re.search(case.cause, finding.cause) for finding in errors)


def _is_at(finding: Finding, real: Outcome, line: str) -> bool:
    """Whether a finding names where the real step raised: its line, or (where torch's engine raised) its phase."""
    if finding.phase != real.phase:
        return False
    inside = line and not line.startswith(_OURS)
    return not inside or finding.source == line


def _repair(row: Row, step: Step, report: Report) -> None:
    """Repair the set-up, do what is left to the caller, and run the real step."""
    step.model.zero_grad()
    for unsafe in (False, True):
        repairs = isotype.repair(step.model, report, unsafe=unsafe)
        if unsafe or not any(finding.severity == "error" for finding, _ in repairs.left):
            break
        repairs.undo()
    names = {name: setting_value(value) for name, value in repairs.settings.items()}
    if "autocast" in names and "scaler" not in names:
        names["scaler"] = step.scaler or names["autocast"] == torch.float16
    step = replace(step, **{name: value for name, value in names.items() if hasattr(step, name)})
    lines = {place: setting_value(value) for place, value in repairs.lines.items()}
    ended, _, _ = _run(step, lines)
    row.repaired = ended.error is None
    row.repair = "; ".join(
        [
            *(["unsafe=True"] if unsafe else []),
            *(fix.description for fix in repairs),
            *(f"{place} -> {value}" for place, value in repairs.lines.items()),
            *(f"left: {finding.code} {why}" for finding, why in repairs.left if finding.severity == "error"),
            "runs" if ended.error is None else f"raises {_one_line(ended.error)} at {_line(ended.error)}",
        ]
    )


class EditedLines(TorchFunctionMode):
    """The code as its owner would edit it: casts and new float tensors of these lines are of another dtype.

    Where an operator of such a line does not run, its operands are cast.
    """

    _MAKE = ("to", "type", "float", "half", "bfloat16", "double", "type_as")

    def __init__(self, lines: Mapping[str, torch.dtype]) -> None:
        super().__init__()
        self.lines = lines

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func` as the edited line would."""
        kwargs = kwargs or {}
        dtype = self.lines.get(_asking())
        if dtype is None:
            return func(*args, **kwargs)
        try:
            result = func(*args, **kwargs)
        except (RuntimeError, NotImplementedError):
            return func(*_cast(args, dtype), **_cast(kwargs, dtype))
        makes = not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves((args, kwargs)))
        return _cast(result, dtype) if makes or getattr(func, "__name__", "") in self._MAKE else result


def _cast(values: Any, dtype: torch.dtype) -> Any:
    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return tree_map(cast, values)


def _asking() -> str:
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((*_NOBODYS, __file__)):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _line(error: Exception, inside: bool = False) -> str:
    """`file:line` of the innermost frame outside of torch (`inside`: of any frame)."""
    found, step = "", error.__traceback__
    while step is not None:
        name = step.tb_frame.f_code.co_filename
        if inside or not name.startswith(_NOBODYS):
            found = f"{name}:{step.tb_lineno}"
        step = step.tb_next
    return found


def _differences(real: Outcome, digest: str, again: Outcome, digest_again: str) -> Iterator[str]:
    """How the real step on what was checked differs from the one on what was not."""
    if repr(real.error) != repr(again.error):
        yield f"ends with {again.error!r}"
    if (real.loss is None) != (again.loss is None) or (
        real.loss is not None
        and again.loss is not None
        and real.loss.item() != again.loss.item()
        and not (real.loss.isnan() and again.loss.isnan())
    ):
        yield "the loss"
    if digest != digest_again:
        yield "the weights after the step"


_LEFT = ("FakeTensor", "FakeTensorMode", "Trace", "FakeRecorder")


def _alive() -> list[str]:
    """Names of what a check makes and that is still alive."""
    gc.collect()
    # By the type's name: to ask proxies for their class may import or raise.
    kinds = [type(each).__name__ for each in gc.get_objects()]
    return [f"{kinds.count(kind)} {kind} alive" for kind in _LEFT if kind in kinds]


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    started = time.process_time()
    result = work()
    return result, time.process_time() - started


def _seed() -> None:
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)


def _random_states() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), str(numpy.random.get_state())


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:160]
