"""`--early_stopping_patience`: transformers' callback, with a count that goes on where the run does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import EarlyStoppingCallback

from isotype.core.errors import Problem
from isotype.core.names import plural
from isotype.train.settings import Settings


class EarlyStopping(EarlyStoppingCallback):  # type: ignore[misc]  # transformers ships no types
    """Ends a training whose held-back loss, or `--metric_for_best_model`, has not become better for some evaluations."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the count up where the checkpoint has it.

        transformers does so with `restore_callback_states_from_checkpoint`, which would bring a stop of the former run back, too.
        """
        saved = (state.stateful_callbacks or {}).get(type(self).__name__)
        counter = "early_stopping_patience_counter"
        if isinstance(saved, dict) and state.global_step:
            self.early_stopping_patience_counter = int(saved["attributes"].get(counter, 0))

    def said(self, state: Any, metric: str) -> str | None:
        """What to say where it has ended the training."""
        if (
            self.early_stopping_patience_counter < self.early_stopping_patience
            or state.global_step >= state.max_steps
        ):
            return None
        best = (
            ""
            if state.best_metric is None
            else f": {state.best_metric:.4g}, at step {state.best_global_step}"
        )
        count = plural(self.early_stopping_patience, "evaluation")
        return f"stopped early at step {state.global_step} of {state.max_steps}: {count} without a better {metric} than the best{best}"


def early_stopping(settings: Settings) -> EarlyStopping | None:
    """The callback that `--early_stopping_patience` asks for; None where it was not given."""
    patience, training = settings.extra.early_stopping_patience, settings.training
    if patience is None:
        return None
    if training.metric_for_best_model is None:
        training.metric_for_best_model, training.greater_is_better = "loss", False
    return EarlyStopping(patience, settings.extra.early_stopping_threshold)


def early_stopping_problems(settings: Settings) -> Iterator[Problem]:
    """Whether there is an evaluation that it can go by."""
    extra, training = settings.extra, settings.training
    if extra.early_stopping_patience is None:
        if "early_stopping_threshold" in settings.explicit:
            given = f"--early_stopping_threshold {extra.early_stopping_threshold:g}"
            yield Problem(given, "--early_stopping_patience beside it", "--early_stopping_patience 3")
        return
    given = f"--early_stopping_patience {extra.early_stopping_patience}"
    if extra.eval_split is None and training.eval_strategy == "no":
        fix = "--eval_split 0.05, or --eval_strategy steps with a data set that has a test split"
        yield Problem(f"{given} without an evaluation", "held-back rows to go by", fix)


def not_the_best(settings: Settings) -> str | None:
    """What to say where the last model is saved and not the best."""
    training = settings.training
    if settings.extra.early_stopping_patience is None or training.load_best_model_at_end:
        return None
    return (
        "early stopping saves the model of its last step; --load_best_model_at_end True saves the best one (it needs "
        "--eval_strategy steps, and --save_steps that are a multiple of --eval_steps)"
    )
