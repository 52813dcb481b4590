"""`isotype explain` and the pages under docs/rules."""

from __future__ import annotations

import pytest
from tools.rule_pages import DOCS, pages, write_pages

from isotype.cli.commands import find_rule
from isotype.cli.main import main
from isotype.core.errors import UsageError
from isotype.rules import FAMILIES, Rule, all_rules
from isotype.rules.kit.groups import rule_modules

REWRITE = "python -m tools.rule_pages"


@pytest.fixture
def rules(monkeypatch) -> tuple[Rule, ...]:
    made = (
        Rule("IST101", "First", "What it is about.", lambda trace: ()),
        Rule("IST301", "Third", "More.", lambda trace: ()),
    )
    monkeypatch.setattr("isotype.rules.all_rules", lambda: made)
    return made


@pytest.mark.skipif(not all_rules(), reason="there are no rules yet")
def test_the_committed_pages_are_the_docstrings():
    committed = {path.name: path.read_text(encoding="utf-8") for path in DOCS.glob("*.md")}
    wanted = pages(all_rules())
    assert committed.keys() == wanted.keys(), f"run {REWRITE}"
    stale = [name for name in wanted if committed[name] != wanted[name]]
    assert not stale, f"run {REWRITE}"


def test_rules_have_titles_and_pages_under_optimized_python(monkeypatch):
    """`python -OO` removes docstrings."""
    before = [(rule.title, rule.page) for rule in all_rules()]
    for module in rule_modules().values():
        monkeypatch.setattr(module, "__doc__", None)
    all_rules.cache_clear()
    assert [(rule.title, rule.page) for rule in all_rules()] == before
    all_rules.cache_clear()


def test_every_rule_belongs_to_a_family():
    assert {rule.code[:4] for rule in all_rules()} <= set(FAMILIES)


@pytest.mark.parametrize("written", ["IST301", "ist301", "301"])
def test_a_code_however_it_is_written(rules, written):
    assert find_rule(written) is rules[1]


def test_the_beginning_of_codes_names_all_of_them(rules):
    with pytest.raises(UsageError) as caught:
        find_rule("IST10")
    tens = [rule.code for rule in rules if rule.code.startswith("IST10")]
    assert caught.value.problems[0].fix == f"give one of {', '.join(tens)}"


def test_an_unknown_code_names_the_nearest(rules, capsys):
    with pytest.raises(UsageError) as caught:
        find_rule("IST102")
    assert caught.value.problems[0].fix == "did you mean IST101 or IST301?"
    assert main(["explain", "IST102"]) == 2
    assert capsys.readouterr().err.startswith("error: unknown code\n  - IST102\n")


def test_without_a_code_it_lists_all(rules, capsys):
    assert main(["explain"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["IST101", "First"] in lines
    assert ["IST301", "Third"] in lines


def test_a_page_in_the_terminal(rules, capsys):
    assert main(["explain", "101"]) == 0
    out = capsys.readouterr().out
    assert "IST101: First" in out
    assert "What it is about." in out


def test_pages_are_written_and_stale_ones_deleted(rules, tmp_path):
    (tmp_path / "IST999.md").write_text("gone")
    (tmp_path / "guide.md").write_text("by hand")
    write_pages(tmp_path, rules)
    assert (tmp_path / "IST101.md").read_text() == "# IST101: First\n\nWhat it is about.\n"
    assert {path.name for path in tmp_path.iterdir()} == {"README.md", "IST101.md", "IST301.md", "guide.md"}
    assert "- [IST301](IST301.md) Third" in (tmp_path / "README.md").read_text()
