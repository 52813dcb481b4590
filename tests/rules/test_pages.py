"""Every rule has a page of the same shape, and a test."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: rule.code)
def test_a_page(rule: Rule) -> None:
    assert rule.title
    assert "\n" not in rule.title
    assert not rule.title.endswith(".")
    heads = re.findall(r"^\*\*(.+?)\*\*", rule.page, re.MULTILINE)
    left = list(SECTIONS)
    for head in heads:
        if left and head.startswith(left[0]):
            left.pop(0)
    assert left == [], f"{rule.code} has {heads}"


@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: rule.code)
def test_an_example_is_code(rule: Rule) -> None:
    assert re.search(r"^\*\*An example.*\*\*\n\n    \S", rule.page, re.MULTILINE)


@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: rule.code)
def test_a_test(rule: Rule) -> None:
    assert (HERE / f"test_{rule.code.lower()}.py").exists()


def test_codes_are_unique() -> None:
    codes = [rule.code for rule in all_rules()]
    assert len(set(codes)) == len(codes)
    assert all(re.fullmatch(r"IST[1-8]\d\d", code) for code in codes)
