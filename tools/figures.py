"""Writes the figures in README and docs from benchmarks/results.jsonl: tables and single numbers between markers.

A marker `<!-- figures: NAME -->…<!-- end -->` holds what benchmarks/figures.toml says under that name:

- `text`: a template of one line, filled with the figure that `figures` names, or with least and most of several (`1.8 to 2.9`);
- `columns`: heading and template of each column; a row for each figure that `figures` names (patterns, as of a shell), or, with
  `by = "peer"`, for each of its peers; the commands, machines and commits of the rows come below it;
- `head` and `rows`: a table whose rows differ, each `{figures, machine, cells}`.

A template names measures by peer (`{trl.step:.2f}`) or, in a row of one record, alone (`{step:.2f}`, `{step.low}`), and `{name}`, `{parts[0]}`
(of the figure behind its slash, at commas), `{peer}`, `{machine}`, `{date}`, `{commit}`. `machine` is a pattern; with `any_machine`, for what no
machine changes, the newest of all counts.

python -m tools.figures [--check]
"""

from __future__ import annotations

import fnmatch
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from results import Book, Measure, Record  # noqa: E402

SPECS = ROOT / "benchmarks" / "figures.toml"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks" / "NOTES.md")
MARKER = re.compile(r"(<!-- figures: ([\w-]+) -->)(.*?)(<!-- end -->)", re.S)


class UnknownFigureError(LookupError):
    """A marker, a pattern or a template names what neither figures.toml nor results.jsonl has."""


@dataclass(frozen=True)
class Shown:
    """A measure in a template: its value by a format, or its spread where no single value is known."""

    measure: Measure

    def __format__(self, form: str) -> str:
        if self.measure.value is None:
            return f"{self.low:{form}} to {self.high:{form}}"
        return format(self.measure.value, form if not isinstance(self.measure.value, str) else "")

    @property
    def low(self) -> float:
        return self._ends[0]

    @property
    def high(self) -> float:
        return self._ends[1]

    @property
    def _ends(self) -> tuple[float, float]:
        if self.measure.spread is None:
            raise UnknownFigureError("a figure without a spread")
        return self.measure.spread


def filled(page: str, specs: Mapping[str, Any], book: Book) -> str:
    """A page with what stands between its markers written anew. Raises UnknownFigureError."""
    newest = book.newest()

    def made(match: re.Match[str]) -> str:
        begin, name, _, end = match.groups()
        try:
            return f"{begin}{rendered(specs[name], newest)}{end}"
        except (UnknownFigureError, KeyError, AttributeError) as error:
            raise UnknownFigureError(f"{name}: {error}") from error

    return MARKER.sub(made, page)


def rendered(spec: Mapping[str, Any], newest: Sequence[Record]) -> str:
    """A table with a line break before and after it, or a number."""
    if "text" in spec:
        several = [str(spec["text"]).format_map(names(row)) for row in chosen(spec, newest)]
        ends = sorted(several, key=_number) if len(several) > 1 else several
        return " to ".join(dict.fromkeys((ends[0], ends[-1])))
    shown: list[Record] = []
    table: list[list[str]] = []
    if "columns" in spec:
        head = [heading for heading, _ in spec["columns"]]
        for row in chosen(spec, newest):
            table.append([cell.format_map(names(row)) for _, cell in spec["columns"]])
            shown += row
    else:
        head = spec["head"]
        for each in spec["rows"]:
            (row,) = chosen({**spec, **each}, newest)
            table.append([cell.format_map(names(row)) for cell in each["cells"]])
            shown += row
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *table)]
    lines.insert(1, "|" + "---|" * len(head))
    below = provenance(shown) if spec.get("provenance", True) else ""
    return "\n" + "\n".join(lines) + "\n" + (f"\n{below}\n" if below else "")


def _number(text: str) -> float:
    return float(text.split()[0].replace(",", "").rstrip("%"))


def chosen(spec: Mapping[str, Any], newest: Sequence[Record]) -> list[list[Record]]:
    """The records of each row: of one figure on one machine, and of one peer with `by = "peer"`. Patterns decide the order."""
    rows: dict[tuple[str, ...], list[Record]] = {}
    last = {each.figure: each.machine for each in sorted(newest, key=lambda each: each.date)}
    for pattern in spec["figures"]:
        found = [
            each
            for each in newest
            if fnmatch.fnmatchcase(each.figure, pattern)
            and fnmatch.fnmatchcase(str(each.machine), spec.get("machine", str(last[each.figure])))
            and each.peer in spec.get("peers", [each.peer])
        ]
        if not found:
            raise UnknownFigureError(f"no figure {pattern} of {spec.get('machine', 'any machine')}")
        for each in found:
            place = str(each.machine)
            key = (each.figure, place, each.peer) if spec.get("by") == "peer" else (each.figure, place)
            if all(each is not other for other in rows.setdefault(key, [])):
                rows[key].append(each)
    return list(rows.values())


def names(row: Sequence[Record]) -> dict[str, Any]:
    """What a template of a row can name."""
    first = row[0]
    name = first.figure.partition("/")[2]
    found: dict[str, Any] = {
        "name": name, "parts": name.split(", "), "machine": str(first.machine), "date": first.date,
        "commit": first.commit, "peer": first.peer,
    }  # fmt: skip
    for record in row:
        measures = {key: Shown(measure) for key, measure in record.measures.items()}
        if record.peer:
            found[record.peer.replace(" ", "_")] = SimpleNamespace(**measures)
        if len(row) == 1:
            found |= measures
    return found


def provenance(records: Sequence[Record]) -> str:
    """A line for each command, machine and commit that figures come from."""
    lines: dict[str, None] = {}
    for each in records:
        commit = re.sub(r"\+$", " with uncommitted changes", each.commit)
        machine = str(each.machine).replace("machine not noted", "a CPU that was not recorded")
        lines[f"`{each.command}`: {machine}, {each.date}, commit {commit}"] = None
    return "Printed by " + ";\n".join(lines) + "."


def main(arguments: Sequence[str]) -> int:
    """Write the pages, or with `--check` name those that differ. Returns the exit status."""
    specs = tomllib.loads(SPECS.read_text(encoding="utf-8"))
    book = Book.read()
    stale = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        wanted = filled(text, specs, book)
        if wanted != text:
            stale.append(page.relative_to(ROOT).as_posix())
            if "--check" not in arguments:
                page.write_text(wanted, encoding="utf-8", newline="\n")
    if stale:
        print(f"{'differ from results.jsonl' if '--check' in arguments else 'written'}: {', '.join(stale)}")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
