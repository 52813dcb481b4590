"""The two files of a run report."""

from __future__ import annotations

from pathlib import Path

from isotype.core.errors import Problem, SaveError
from isotype.core.files import write_whole
from isotype.report.run.html import to_html
from isotype.report.run.json import to_json
from isotype.report.run.record import HTML_NAME, JSON_NAME, RunRecord


def write_run_report(record: RunRecord, directory: str | Path) -> tuple[Path, Path]:
    """Write `run_report.html` and `run_report.json` into a directory, which is made if need be.

    Each file is written under a temporary name and then moved into place, so that a reader sees the former file
    or the new one and never a part of one.

    Returns:
        The paths of the HTML and of the JSON file.

    Raises:
        SaveError: the directory or a file cannot be written; the former files are untouched.
    """
    directory = Path(directory)
    html, data = to_html(record), to_json(record)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        data_path = write_whole(directory / JSON_NAME, data)
        html_path = write_whole(directory / HTML_NAME, html)
    except OSError as error:
        problem = Problem(
            f"{directory}: {error.strerror or error}",
            "a directory that can be written to, with room for the report",
            "free the path or give another directory",
        )
        raise SaveError("the run report could not be written", [problem]) from error
    return html_path, data_path
