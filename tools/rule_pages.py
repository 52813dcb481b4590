"""Writes docs/rules from the docstrings of the rules, and deletes the pages of rules that are no more.

python -m tools.rule_pages
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from isotype.rules import Rule, all_rules, by_family, page

DOCS = Path(__file__).parents[1] / "docs" / "rules"


def pages(rules: Sequence[Rule]) -> dict[str, str]:
    """File name -> content of every page under docs/rules."""
    return {"README.md": _index(rules)} | {f"{rule.code}.md": page(rule) for rule in rules}


def _index(rules: Sequence[Rule]) -> str:
    lines = [
        "# Rules",
        "",
        "Each page describes a problem that `isotype check` reports. `isotype explain CODE` prints a page in the terminal.",
    ]
    for family, about, some in by_family(rules):
        lines += ["", f"## {family}xx: {about}", ""]
        lines += [f"- [{rule.code}]({rule.code}.md) {rule.title}" for rule in some]
    return "\n".join(lines) + "\n"


def write_pages(directory: Path, rules: Sequence[Rule]) -> None:
    """Write every page into `directory`; pages of other rules go."""
    wanted = pages(rules)
    for stale in directory.glob("IST*.md"):
        if stale.name not in wanted:
            stale.unlink()
    for name, text in wanted.items():
        (directory / name).write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    write_pages(DOCS, all_rules())
