"""Prints the output of `isotype run` to standard error: status lines, findings, failed calls and reports."""

import contextlib
from collections.abc import Sequence
from functools import partial
from typing import Any

from rich.console import Console

from isotype.core.dtypes import dtype_name
from isotype.core.names import format_bytes, named
from isotype.preflight.script.outside import Outside
from isotype.records.finding import Finding
from isotype.records.memory import Memory
from isotype.records.trace import Call
from isotype.report.check.report import Report
from isotype.report.check.text import fix_standing, render
from isotype.report.text import format_kinds, say, short_source
from isotype.rules.kit.words import evidence


class Output:
    """Prints the messages and reports of a check of a script. Lines are broken at the width of `console`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self.plain = partial(say, console)

    def say(self, text: str) -> None:
        self.plain(f"isotype: {text}")

    def working(self, text: str) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager that shows `text` on a terminal while the script waits."""
        shown = self._console.is_terminal and not self._console.quiet
        return self._console.status(f"isotype: {text} …") if shown else contextlib.nullcontext()

    def render(self, report: Report) -> None:
        self.plain("")
        render(report, self._console, in_script=True, whole=True)

    def brief(self, findings: Sequence[Finding]) -> None:
        for finding in findings:
            self.plain(f"{finding.severity}[{finding.code}]: {finding.message}")
            self._place(finding.source, named(finding.module), finding.op, finding.phase)
            if finding.cause:
                self.plain(f"   = cause  {finding.cause}")
            for fix in sorted(finding.fixes, key=lambda fix: not fix.verified)[:1]:
                self.plain(f"   = help   {fix.text}   ({fix_standing(fix)})")

    def notes(self, notes: Sequence[Finding]) -> None:
        for note in notes:
            where = f" ({note.module})" if note.module else ""
            self.say(f"note[{note.code}]: {note.message}{where}")

    def outside(self, error: Outside) -> None:
        for line in error.lines():
            self.plain(line)

    def _place(self, source: str, *parts: str) -> None:
        self.plain(f"  --> {'   '.join(filter(None, (*parts, short_source(source))))}")

    def call(self, call: Call) -> None:
        self._place(call.source, call.module, call.op, call.phase)
        for operand in call.operands:
            path = "; ".join(evidence(operand.origin))
            self.plain(f"   |   {operand.role}  {dtype_name(operand.dtype)}  {list(operand.shape)}   {path}")


def peak_of(memory: Memory) -> str:
    kinds = memory.phases[memory.peak_phase] if memory.peak_phase is not None else {}
    return f"peak {format_bytes(memory.peak)} ({format_kinds(kinds, memory.peak / 100)})"
