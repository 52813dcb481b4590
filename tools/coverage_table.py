"""The table of covered statements and branches by room that `make test` prints; `make coverage` measures it anew.

python -m tools.coverage_table COVERAGE.json    # of `coverage json`; writes tests/coverage.txt

Coverage slows every test, so the table is kept in the repository, with the commit that it was measured at. What killed processes and
compiled loops run is not counted.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.sources import PACKAGE, ROOT, SOURCE

TABLE = ROOT / "tests" / "coverage.txt"
_COUNTS = ("num_statements", "covered_lines", "num_branches", "covered_branches")


@dataclass(frozen=True)
class Counts:
    """Statements and branches of some files, and how many of them ran."""

    statements: int = 0
    run: int = 0
    branches: int = 0
    taken: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.statements + other.statements,
            self.run + other.run,
            self.branches + other.branches,
            self.taken + other.taken,
        )


def by_room(report: Mapping[str, Any]) -> dict[str, Counts]:
    """Sum the files of `coverage json` by room; files of the package itself count as `isotype`.

    Raises ValueError if the report has no branches, or no file of the package.
    """
    if not report["meta"]["branch_coverage"]:
        raise ValueError("the report has no branches: measure with `make coverage`")
    rooms: dict[str, Counts] = {}
    for place, file in report["files"].items():
        path = ROOT / place
        if not path.is_relative_to(SOURCE / PACKAGE):
            continue
        room, *inner = path.relative_to(SOURCE / PACKAGE).parts
        counts = Counts(*(file["summary"][name] for name in _COUNTS))
        key = room if inner else PACKAGE
        rooms[key] = rooms.get(key, Counts()) + counts
    if not rooms:
        raise ValueError(f"the report has no file below {SOURCE / PACKAGE}")
    return rooms


def table(rooms: Mapping[str, Counts], commit: str) -> str:
    """Return the lines of all rooms, those with the smallest share of branches first, and of their sum."""
    ordered = sorted(rooms.items(), key=lambda room: (_share(room[1].taken, room[1].branches), room[0]))
    rows = [*ordered, ("all", sum(rooms.values(), Counts()))]
    lines = [
        f"covered by `make test` at {commit} (`make coverage` measures it anew):",
        f"{'room':<12}{'statements':>12}{'run':>8}{'branches':>10}{'taken':>8}",
    ]
    for name, counts in rows:
        run, taken = _share(counts.run, counts.statements), _share(counts.taken, counts.branches)
        lines.append(f"{name:<12}{counts.statements:>12,}{run:>8.1%}{counts.branches:>10,}{taken:>8.1%}")
    return "\n".join(lines) + "\n"


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 1.0


def main() -> None:
    """Write the table of the report that the command line names, and print it."""
    (report,) = sys.argv[1:]
    described = ["git", "describe", "--always", "--dirty", "--abbrev=8"]
    commit = subprocess.run(described, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    text = table(by_room(json.loads(Path(report).read_text(encoding="utf-8"))), commit)
    TABLE.write_text(text, encoding="utf-8")
    print(text, end="")


if __name__ == "__main__":
    main()
