"""Writes the report of a run into the folder of the run and into each checkpoint. A resumed run continues the report."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from isotype.core.errors import CheckpointError, SaveError
from isotype.core.files import write_whole
from isotype.report.html import render
from isotype.report.html import write_report as write_page
from isotype.report.run.html import to_html
from isotype.report.run.record import (
    HTML_NAME,
    JSON_NAME,
    RunRecord,
    from_json,
    loss_sentences,
    summarize,
    to_json,
)
from isotype.report.text import format_count, format_duration
from isotype.train.output.resume import RUN_FILE


def earlier_report(resume: Path | None) -> RunRecord | None:
    """Return the report in the resumed checkpoint, or None. Raise CheckpointError if the report is damaged."""
    path = None if resume is None else resume / JSON_NAME
    if path is None or not path.is_file():
        return None
    try:
        return from_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        headline = "the report in the checkpoint cannot be read"
        fix = f"delete {path}; the new report then begins at the checkpoint"
        expected = "an unchanged report of isotype"
        raise CheckpointError.of(headline, f"{path}: {error}", expected, fix) from error


def files_of_checkpoint(identity: Mapping[str, Any], record: Callable[[], RunRecord], folder: Path) -> None:
    write_whole(folder / RUN_FILE, json.dumps(identity, indent=2) + "\n")
    write_whole(folder / JSON_NAME, to_json(record()))


def write_report(record: RunRecord, root: Path, *, made_steps: bool, writes: bool = True) -> Path:
    """Write the report into the run's folder `root` if `writes` is True (in rank 0). Return the path of the HTML report.

    A command that runs no step does not overwrite a report with steps, because this may be the report of a finished
    run.
    """
    complete = record.status == "finished" and bool(record.steps)
    if not writes or (not made_steps and not complete and _has_steps(root / JSON_NAME)):
        return root / HTML_NAME
    try:
        html, _ = write_run_report(record, root)
    except SaveError as error:
        if record.status != "finished":
            raise
        hint = f"the trained model in {root} and the checkpoints are complete; only the report is missing"
        raise SaveError(error.headline, error.problems, hint) from error
    return html


def _has_steps(path: Path) -> bool:
    try:
        return bool(from_json(path.read_text(encoding="utf-8")).steps)
    except (FileNotFoundError, ValueError):
        return False


def write_run_report(record: RunRecord, directory: str | Path) -> tuple[Path, Path]:
    """Write `run_report.html` and `run_report.json`, each completely or not at all. Return the paths of both files."""
    directory = Path(directory)
    html, data = to_html(record), to_json(record)
    data_path = write_page(directory / JSON_NAME, data)
    return write_page(directory / HTML_NAME, html), data_path


def model_card(record: RunRecord) -> str:
    """Return the run's model card in Markdown, with a metadata block (huggingface.co/docs/hub/model-cards)."""
    summary = summarize(record)
    return render(
        "card.md.j2",
        run=record,
        adapter=record.parameters_trainable < record.parameters_total,
        # The hub accepts only names of its own data sets.
        of_hub=not (Path(record.dataset).exists() or ":" in record.dataset),
        name=Path(record.output_dir).name,
        steps=summary.steps,
        tokens=format_count(summary.tokens),
        time=format_duration(summary.seconds),
        losses=["".join(pieces) for pieces in loss_sentences(record)],
        samples=[(s.question, s.before or "", s.after) for s in record.samples if s.after is not None],
        policy=[(row.role, row.dtype, row.reason) for row in record.policy],
        quoted=json.dumps,
    )
