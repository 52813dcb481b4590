"""Which layers a training run computes again in its backward: as asked, as it began, or as the memory of its step asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from isotype.checkpoint.adapter import Adapter
from isotype.model.recompute import checkpointing, take_checkpointing
from isotype.precision.policy import PrecisionPolicy
from isotype.train.launched import from_first
from isotype.train.lengths import Lengths
from isotype.train.plan import training_plan
from isotype.train.recompute_choice import Choice
from isotype.train.same_run import RUN_FILE
from isotype.train.saved import read_json
from isotype.train.settings import Settings
from isotype.train.step import choice_of

SAVED_AS = "gradient_checkpointing"
"""Name of the choice in `RUN_FILE`."""


def take_choice(
    settings: Settings,
    policy: PrecisionPolicy,
    resume: Path | None,
    start: Adapter | None,
    tokenizer: Any,
    data: Any,
    lengths: Lengths | None,
) -> Choice:
    """Choose, and set the training's arguments so; the processes of a run take what the first of them finds.

    Args:
        settings: of the run.
        policy: of the run.
        resume: the checkpoint that it goes on from.
        start: the adapter that is trained further.
        tokenizer: the model's tokenizer or processor.
        data: splits of rows.
        lengths: of the training rows, where they are known already.
    """
    training = settings.training
    if not settings.auto_checkpointing or (settings.sharding is not None and settings.sharding.checkpointing):
        return Choice(checkpointing(training), "as asked")
    saved = {} if resume is None else read_json(resume / RUN_FILE) or {}
    if resume is not None and SAVED_AS in saved:
        choice = Choice(saved[SAVED_AS], f"as in {resume.name}, which the run goes on from")
    else:
        plan = training_plan(settings, start, tokenizer, data, lengths)
        choice = from_first(lambda: choice_of(plan, policy))
    take_checkpointing(training, choice.arguments)
    return choice
