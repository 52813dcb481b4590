"""The report of a check as users hold it: the record, and its writers as methods."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from isotype.core.errors import PrecisionError, Problem
from isotype.records.finding import Finding, marked
from isotype.records.trace import Setup
from isotype.report.check.html import to_html
from isotype.report.check.json import to_json
from isotype.report.check.record import Record
from isotype.report.check.sarif import to_sarif
from isotype.report.check.text import to_text, verdict
from isotype.report.html import write_report


@dataclass(frozen=True)
class Report(Record):
    """A step that was traced and judged; see `Record` for its data."""

    def raise_for_errors(self) -> None:
        """Nothing where `ok`.

        Raises:
            PrecisionError: one problem an error finding: what was given, what was expected, the first fix.
        """
        error = self.error()
        if error is not None:
            raise error

    def error(self) -> PrecisionError | None:
        """What `raise_for_errors` raises; None where `ok`."""
        if not self.errors:
            return None
        problems = [_problem(finding, self.trace.setup) for finding in self.errors]
        hint = f"print(report) shows the operands; isotype explain {self.errors[0].code} says more"
        return PrecisionError(verdict(self), problems, hint)

    def to_json(self) -> str:
        """Strict JSON; `schema_version` says which schema. Bytes, FLOPs, shares and seconds stay unrounded numbers."""
        return to_json(self)

    def to_sarif(self) -> str:
        """A SARIF 2.1.0 log with one run, for code scanning and editors."""
        return to_sarif(self)

    def to_html(self, path: str | Path) -> Path:
        """Write the report as one HTML file that needs no other; the former file stays until the new one is whole.

        Raises:
            SaveError: the file cannot be written.
        """
        return write_report(Path(path), to_html(self))

    def __str__(self) -> str:
        return to_text(self)


def _problem(finding: Finding, setup: Setup) -> Problem:
    place = ", ".join(part for part in (finding.module, finding.op, finding.phase) if part)
    because = f" (cause: {finding.cause})" if finding.cause else ""
    wanted = f"operands that {finding.op} accepts" if finding.op else f"a {finding.phase} that runs"
    if finding.kind == "values":
        wanted = "values that float16 holds"
    return Problem(
        f"{finding.code}: {finding.message}, at {place}{because}",
        f"{wanted} on {setup.profile.title}",
        marked(finding.fixes[0]) if finding.fixes else f"see isotype explain {finding.code}",
    )
