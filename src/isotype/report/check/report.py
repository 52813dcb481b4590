"""The public report of a check. The report can be written as text, JSON, SARIF and HTML."""

from dataclasses import dataclass
from pathlib import Path

from isotype.core.errors import PrecisionError, Problem
from isotype.records.finding import Finding, marked
from isotype.records.request import Setup
from isotype.report.check.html import to_html
from isotype.report.check.json import to_json, to_sarif
from isotype.report.check.record import Record
from isotype.report.check.text import to_text, verdict
from isotype.report.html import write_report


@dataclass(frozen=True)
class Report(Record):
    """The report of a check of one training step. The class `Record` documents the report's data."""

    def raise_for_errors(self) -> None:
        """Raise an error if the report has findings with the severity "error".

        Raises:
            PrecisionError: the report is not `ok`. The message contains each error with its first fix.
        """
        error = self.error()
        if error is not None:
            raise error

    def error(self) -> PrecisionError | None:
        """Return the error of `raise_for_errors`, or None if the report is `ok`."""
        if not self.errors:
            return None
        problems = [_problem(finding, self.trace.setup) for finding in self.errors]
        hint = f"print(report) shows the operands; isotype explain {self.errors[0].code} describes the rule"
        return PrecisionError(verdict(self), problems, hint)

    def to_json(self) -> str:
        """Return the report as strict JSON with a `schema_version`. Bytes, FLOPs, shares and seconds are not rounded."""
        return to_json(self)

    def to_sarif(self) -> str:
        """Return the report as a SARIF 2.1.0 log, which code scanning services and editors can read."""
        return to_sarif(self)

    def to_html(self, path: str | Path) -> Path:
        """Write the report atomically as one self-contained HTML file, and return its path.

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
        wanted = "values in float16's range"
    what = f"{finding.code}: {finding.message}, at {place}{because}"
    fix = marked(finding.fixes[0]) if finding.fixes else f"see isotype explain {finding.code}"
    return Problem(what, f"{wanted} on {setup.profile.title}", fix)
