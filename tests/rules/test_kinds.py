"""A rule says what sets its findings apart, and the name of its file is its code, which stands nowhere else."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import isotype
from isotype.records.finding import Finding, Kind
from isotype.rules import all_rules
from tests.cli.test_check import report_with

SOURCES = Path(isotype.__file__).parent


def codes_in(path: Path) -> set[str]:
    """The codes that stand in a file as strings of their own."""
    text = path.read_text()
    if not re.search(r"IST\d{3}", text):
        return set()
    constants = (node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant))
    return {each for each in constants if isinstance(each, str) and re.fullmatch(r"IST\d{3}", each)}


def test_a_code_is_the_name_of_its_rules_file_and_stands_in_no_code() -> None:
    assert {str(path): codes for path in SOURCES.rglob("*.py") if (codes := codes_in(path))} == {}


def test_kinds_of_rules() -> None:
    kinds: dict[str, list[str]] = {}
    for rule in all_rules():
        kinds.setdefault(rule.kind, []).append(rule.code)
    kinds.pop("step")
    assert kinds == {
        "untraced": ["IST199"],
        "device": ["IST601", "IST602", "IST604", "IST606", "IST812"],
        "versions": ["IST603"],
        "memory": ["IST605"],
        "values": ["IST809", "IST810"],
        "wiring": ["IST901", "IST902", "IST903", "IST904", "IST905", "IST906", "IST907", "IST908", "IST909"],
    }


@pytest.mark.parametrize(("kind", "status"), [("memory", "does not fit"), ("step", "fails")])
def test_what_an_error_is_about_decides_the_verdict_not_its_code(kind: Kind, status: str) -> None:
    assert report_with(Finding("error", "a new rule's", kind=kind, code="IST299")).status == status
