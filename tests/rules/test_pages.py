"""Every rule has a page of the same shape, and a test."""

from __future__ import annotations

import re
from pathlib import Path

from isotype.rules import Rule, all_rules

SECTIONS = (
    ("What it means.",),
    ("Why",),
    ("An example",),
    ("Repaired", "What to do"),  # a step that could not be traced has no repaired one
    ("How safe",),
    ("Seen in",),
)
HERE = Path(__file__).parent


def test_every_rule_has_a_page_an_example_and_a_test() -> None:
    assert {rule.code: missing for rule in all_rules() if (missing := _missing(rule))} == {}


def _missing(rule: Rule) -> list[str]:
    left = list(SECTIONS)
    for head in re.findall(r"^\*\*(.+?)\*\*", rule.page, re.MULTILINE):
        if left and head.startswith(left[0]):
            left.pop(0)
    wrong = [f"section {' or '.join(names)}, in this order" for names in left]
    if not rule.title or "\n" in rule.title or rule.title.endswith("."):
        wrong.append("a title of one line without a full stop")
    if not re.search(r"^\*\*An example.*\*\*\n\n    \S", rule.page, re.MULTILINE):
        wrong.append("an example in code")
    if not (HERE / f"test_{rule.code.lower()}.py").exists():
        wrong.append("a test")
    return wrong


def test_codes_are_unique() -> None:
    codes = [rule.code for rule in all_rules()]
    assert len(set(codes)) == len(codes)
    assert all(re.fullmatch(r"IST[1-9]\d\d", code) for code in codes)
