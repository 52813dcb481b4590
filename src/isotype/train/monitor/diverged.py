"""The error of a loss, a gradient or a weight that is not finite, with fixes to try."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isotype.core.errors import Problem, TrainingError
from isotype.report.nonfinite import problem_of
from isotype.train.monitor.meter import Replay
from isotype.train.monitor.step import Step

_OF_THE_DATA = ("input", "labels", "row", "empty", "constant", "outside")
"""Causes independent of learning rate and dtype."""


def not_finite(
    headline: str,
    arguments: Any,
    step: int,
    seen: Mapping[str, object],
    checkpoint: Path | None,
    replay: Replay | None = None,
    script: bool = False,
) -> TrainingError:
    """Return the error that ends a run.

    Args:
        headline: what is not finite.
        arguments: TrainingArguments of the run.
        step: number of the optimizer step.
        seen: measurements of that step, by name.
        checkpoint: the complete one to resume from, None if there is none.
        replay: result of running the step again, None if not tried.
        script: the trainer belongs to a user's script, with arguments in Python.
    """
    figures = ", ".join(f"{name} {value}" for name, value in seen.items())
    what = f"step {step}{': ' if figures else ''}{figures}"
    first = replay.finding if replay is not None else None
    if replay is not None and first is None:
        why = replay.why_not and f"could not be run again ({replay.why_not})"
        what += f"\n    this step {why or 'was run again, and all of its values were finite'}"
    tries = _tries(arguments, step, script)
    if first is not None and (first.cause in _OF_THE_DATA or first.entries == (0.0, 0.0)):
        tries = []
    problems = [Problem(what, "finite numbers", "; ".join(tries) or "what is said below of the operator")]
    if first is not None:
        problems.append(problem_of(first))
    return TrainingError(headline, problems, _hint(checkpoint, script))


def stopped(
    what: str, arguments: Any, step: Step, checkpoint: Path | None, replay: Replay, script: bool = False
) -> TrainingError:
    """Return `not_finite` for a step without update; `what` is not finite, by `isotype.trace.nonfinite.again`."""
    parts = {
        "loss": step.loss,
        "learning rate": step.learning_rate,
        "gradient norm": step.grad_norm,
        "loss scale": step.scale,
    }
    seen = {name: f"{value:g}" for name, value in parts.items() if value is not None}
    headline = f"{what}: stopped before the update"
    return not_finite(headline, arguments, step.number, seen, checkpoint, replay, script)


def _hint(checkpoint: Path | None, script: bool) -> str:
    if script:
        return (
            f"{checkpoint} was saved before: trainer.train(resume_from_checkpoint={str(checkpoint)!r})"
            if checkpoint
            else "no checkpoint had been saved before; save_steps=N keeps one every N steps"
        )
    return (
        f"{checkpoint} was saved before and is whole: isotype chat {checkpoint}"
        if checkpoint
        else "no checkpoint had been saved before; --save_steps N keeps one every N steps"
    )


def _tries(arguments: Any, step: int, script: bool) -> list[str]:
    def flag(name: str, value: str) -> str:
        return f"{name}={value}" if script else f"--{name} {value}"

    tries = []
    if arguments.fp16:
        wider = "bf16=True, or neither bf16 nor fp16" if script else "--dtype bfloat16 or float32"
        tries.append(f"{wider}: float16 ends at 65504")
    if step > 1:
        tries.append(flag("learning_rate", f"{arguments.learning_rate / 10:g}"))
        if not arguments.warmup_steps:
            tries.append(flag("warmup_steps", "0.05"))
        if arguments.max_grad_norm <= 0:
            tries.append(flag("max_grad_norm", "1"))
    elif not arguments.fp16:
        tries.append(
            "the first batch alone does this: look at its rows (one without a token to learn has no loss) and at "
            "the model's config"
        )
    return tries
