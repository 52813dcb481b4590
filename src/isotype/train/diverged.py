"""A loss, a gradient or a weight that is not finite: what is said, and what to try."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isotype.core.errors import Problem, TrainingError


def not_finite(headline: str, trainer: Any, step: int, seen: Mapping[str, object]) -> TrainingError:
    """The error that ends a run.

    Args:
        headline: what is not finite.
        trainer: from `isotype.train.governed.governed`.
        step: number of the optimizer step.
        seen: what was measured in that step, by name.
    """
    whole = trainer.last_checkpoint()
    hint = (
        f"{whole} was saved before and is whole: isotype chat {whole}"
        if whole
        else "no checkpoint had been saved before; --save_steps N keeps one every N steps"
    )
    told = ", ".join(f"{name} {value}" for name, value in seen.items())
    given = f"step {step}{': ' if told else ''}{told}"
    return TrainingError(headline, [Problem(given, "finite numbers", _advice(trainer.args, step))], hint)


def _advice(arguments: Any, step: int) -> str:
    tries = []
    if arguments.fp16:
        tries.append("--dtype bfloat16 or float32: float16 ends at 65504")
    if step > 1:
        tries.append(f"--learning_rate {arguments.learning_rate / 10:g}")
        if not arguments.warmup_steps:
            tries.append("--warmup_steps 0.05")
        if arguments.max_grad_norm <= 0:
            tries.append("--max_grad_norm 1")
    elif not arguments.fp16:
        tries.append(
            "the first batch alone does this: look at its rows (one without a token to learn has no loss) and at "
            "the model's config"
        )
    return "; ".join(tries)
