"""The rows of a training command, and those held back for evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from isotype.core.errors import UsageError
from isotype.data.load import load_training_data
from isotype.data.locate import find_local
from isotype.train.command.settings import Settings

if TYPE_CHECKING:
    from datasets import DatasetDict, IterableDatasetDict


def training_data(
    settings: Settings, say: Callable[[str], object], *, evaluates: bool | None = None
) -> DatasetDict | IterableDatasetDict:
    """Return the data before rows are held back; `evaluates`: with a test split (default: if evaluation is on)."""
    evaluates = settings.training.eval_strategy != "no" if evaluates is None else evaluates
    return load_training_data(
        settings.script,
        settings.dataset,
        settings.method.name,
        need_test=evaluates and settings.extra.eval_split is None,
        text_field=getattr(settings.training, "dataset_text_field", "text"),
        columns=settings.extra.columns,
        chat=settings.extra.apply_chat_template,
        prompts=getattr(settings.training, "completion_only_loss", None) is False,
        lines=settings.extra.text_lines,
        say=say,
    )


def training_data_here(
    settings: Settings, say: Callable[[str], object]
) -> DatasetDict | IterableDatasetDict | None:
    """Return `training_data` if it is on this machine; None if none is named or it is on the hub."""
    script, mixture = settings.script, settings.dataset
    if mixture is not None and mixture.datasets:
        here = all(not e.data_files and not e.data_dir and find_local(e.path) for e in mixture.datasets)
    else:
        name = script.dataset_name
        here = bool(name and find_local(name, test_split=script.dataset_test_split))
    return training_data(settings, say) if here else None


def hold_back(settings: Settings, data: Any) -> Any:
    """Return the splits, with `--eval_split` of the training rows as the test split."""
    share, script = settings.extra.eval_split, settings.script
    if share is None:
        return data
    rows = data[script.dataset_train_split]
    countable = hasattr(rows, "train_test_split")
    held = int(share) if share >= 1 else math.ceil(share * len(rows)) if countable else 0
    if not countable or not 0 < held < len(rows):
        expected = "no --dataset_streaming"
        if countable:
            expected = f"a share below 1, or fewer rows than the {len(rows):,} there are"
        fix = "--eval_split 0.05 holds back a twentieth"
        raise UsageError.of("no rows can be held back", f"--eval_split {share:g}", expected, fix)
    parts = rows.train_test_split(test_size=held, seed=settings.training.seed)
    return type(data)({script.dataset_train_split: parts["train"], script.dataset_test_split: parts["test"]})
