"""Chat templates get the day on which the run was first started as today's date. Checkpoints record the day."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

from isotype.compat.templates import writes_date
from isotype.train.launched import from_first
from isotype.train.output.resume import TEMPLATE_DATE, template_date
from isotype.train.run import Run


def day_of_run(resume: Path | None) -> date:
    """Return the day that the resumed checkpoint records, or today. All processes get the date of rank 0."""
    return from_first(lambda: template_date(resume) or date.today())


def mark(run: Run, tokenizer: Any) -> None:
    """Store the day in the tokenizer, so that the day is in the key under which `datasets` caches tokenized rows."""
    if writes_date(tokenizer) or run.settings.chat_template_path is not None:
        getattr(tokenizer, "tokenizer", tokenizer).template_date = run.identity[TEMPLATE_DATE]


def day_note(run: Run, tokenizer: Any) -> str | None:
    from trl import is_conversational

    rows = run.data[run.settings.dataset_train_split]
    if not writes_date(tokenizer) or not is_conversational(next(iter(rows), {})):
        return None
    day = run.identity[TEMPLATE_DATE]
    if run.resume is None:
        which = "the day of the run's start, which a resumed run keeps"
    elif template_date(run.resume) is None:
        which = f"today: {run.resume.name} records no day, and its run may have used another day"
    else:
        which = f"as in {run.resume.name}, from which the run resumes"
    return f"the chat template can write today's date; it writes {day}: {which}"
