"""A run as JSON; `schema.json` beside this file describes it, written from the records by `python -m tools.schemas`."""

from __future__ import annotations

from isotype.core.json_records import record_of, text_of
from isotype.report.run.record import SCHEMA_VERSION, RunRecord


def to_json(record: RunRecord) -> str:
    """A run as strict JSON: `schema_version` and the fields of `RunRecord`, nested records as objects.

    JSON has no NaN and no infinities: they are the strings `"NaN"`, `"Infinity"`, `"-Infinity"`.
    """
    return text_of(record, SCHEMA_VERSION)


def from_json(text: str) -> RunRecord:
    """The run that `to_json` wrote.

    Raises:
        ValueError: it is not JSON, or of another version of the form.
    """
    return record_of(text, RunRecord, SCHEMA_VERSION)
