"""README and docs show what benchmarks/results.jsonl has; a benchmark can add to it; what is wrong is named."""

from __future__ import annotations

import argparse
import ast
import json
import re
import tomllib
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
from tools.figures import MARKER, PAGES, ROOT, SPECS, UnknownFigureError, filled

from results import LIMITS, Book, Machine, Measure, Record, append, commit, parsed, written  # isort: skip - its folder is on the path by now

TABLES = tomllib.loads(SPECS.read_text(encoding="utf-8"))
BOOK = Book.read()


def _name(page: Path) -> str:
    return page.name


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_a_page_shows_what_the_results_have(page):
    text = page.read_text(encoding="utf-8")
    assert text == filled(text, TABLES, BOOK), "run `python -m tools.figures`"


def test_every_table_is_shown_and_says_where_it_was_measured():
    shown = {match[2] for page in PAGES for match in MARKER.finditer(page.read_text(encoding="utf-8"))}
    assert shown == set(TABLES)
    assert len(shown) > 5
    for name, spec in TABLES.items():
        places = [row["machine"] for row in spec.get("rows", []) if "machine" in row]
        assert "machine" in spec or spec.get("any_machine") or places, (
            f"{name}: which machine, or `any_machine`"
        )


def test_what_it_costs_has_no_figure_that_is_typed():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = readme.partition("## What it costs")[2]
    assert MARKER.search(section)
    typed = re.findall(r"\d[\d.,]*\s(?:s|MiB|GB|kernels|×)\b|\d\s×", MARKER.sub("", section))
    assert not typed


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_a_table_of_figures_stands_between_markers(page):
    """Three numbers in each of two lines one below the other are a table; published ones of others have markers of their own."""
    text = MARKER.sub("", page.read_text(encoding="utf-8"))
    text = re.sub(r"<!-- begin: .*?<!-- end", "", text, flags=re.S)
    text = re.sub(r"^```[a-z]+\n.*?^```$", "", text, flags=re.S | re.M)  # code, and what a terminal shows
    many = [len(re.findall(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?\b", line)) >= 3 for line in text.splitlines()]
    in_fence = _fenced(text)
    tables = [
        line
        for line, (first, second), shown in zip(text.splitlines(), pairwise(many), in_fence, strict=False)
        if first and second and (shown or line.startswith("|"))
    ]
    assert not tables


def _fenced(text: str) -> list[bool]:
    """Whether each line stands in a block that is shown as it is."""
    fences = accumulate(line.startswith("```") for line in text.splitlines())
    return [count % 2 == 1 for count in fences]


def _named(script: Path) -> set[str]:
    """Names in a script, and in what it imports of its folder."""
    tree = ast.parse(script.read_text(encoding="utf-8"))
    found = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found |= {alias.name for alias in node.names}
            if node.module == "records":
                found |= _named(script.parent / "records.py")
    return found


@pytest.mark.parametrize("script", sorted({record.script for record in BOOK.records}))
def test_the_script_of_a_figure_can_measure_it_again(script):
    assert {"parsed", "append"} <= _named(ROOT / script)


RECORD = Record(
    figure="step/small",
    measures={"step": Measure(2.0, "s", (1.5, 2.5)), "kernels": Measure(0)},
    machine=Machine("CPU", 2),
    versions={"torch": "2.13.0"},
    commit="abc",
    date="2026-11-01",
    script="benchmarks/train.py",
    peer="isotype",
)
SPEC = {
    "step": {
        "machine": "CPU*",
        "figures": ["step/*"],
        "columns": [["row", "{name}"], ["s", "{isotype.step:.1f}"]],
    }
}
PAGE = "before <!-- figures: step -->old<!-- end --> after"


def test_the_newest_of_each_machine_counts():
    newer = replace(RECORD, measures={"step": Measure(3.0, "s")}, date="2026-11-02")
    elsewhere = replace(
        newer, measures={"step": Measure(9.0, "s")}, machine=Machine("Other", 2), date="2026-11-03"
    )
    for order in ([RECORD, newer, elsewhere], [elsewhere, newer, RECORD]):
        page = filled(PAGE, SPEC, Book(order))
        assert "| small | 3.0 |" in page
        assert page.startswith("before <!-- figures: step -->\n| row | s |")
        assert "`python benchmarks/train.py`: CPU, 2 cores, 2026-11-02, commit abc" in page


def test_without_a_machine_the_newest_of_any_counts():
    elsewhere = replace(
        RECORD, measures={"step": Measure(9.0)}, machine=Machine("Other", 2), date="2026-11-03"
    )
    spec = {"step": {"figures": ["step/small"], "text": "{isotype.step:.0f}"}}
    assert filled(PAGE, spec, Book([elsewhere, RECORD])) == PAGE.replace("old", "9")


def test_of_several_figures_least_and_most_are_named():
    other = replace(RECORD, figure="step/large", measures={"step": Measure(12.0)})
    spec = {"step": {**SPEC["step"], "text": "{isotype.step:.0f} s"}}
    assert filled(PAGE, spec, Book([other, RECORD])) == PAGE.replace("old", "2 s to 12 s")


def test_what_is_no_number_is_a_word_in_the_file():
    record = replace(RECORD, measures={"step": Measure(float("nan"))})
    assert json.loads(written(record))["measures"] == {"step": {"value": "nan"}}


def test_a_spread_stands_where_no_single_value_is_known():
    ranged = replace(RECORD, measures={"step": Measure(None, "×", (2.17, 2.4))})
    assert "| small | 2.2 to 2.4 |" in filled(PAGE, SPEC, Book([ranged]))


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ({}, "step"),
        ({"step": {"figures": ["load/*"], "columns": []}}, "no figure load/"),
        ({"step": {"figures": ["step/*"], "text": "{isotype.memory}"}}, "memory"),
        ({"step": {"figures": ["step/*"], "text": "{trl.step}"}}, "trl"),
        ({"step": {"figures": ["step/*"], "text": "{isotype.kernels.low}"}}, "without a spread"),
    ],
    ids=["table", "figure", "measure", "peer", "spread"],
)
def test_what_is_unknown_is_named(spec, told):
    with pytest.raises(UnknownFigureError, match=told):
        filled(PAGE, spec, Book([RECORD]))


def test_a_record_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "results.jsonl"
    taken = replace(RECORD, taken_over=True, source="a page")
    path.write_text(f"{written(RECORD)}\n{written(taken)}\n", encoding="utf-8")
    assert Book.read(path).records == [RECORD, taken]


@pytest.mark.parametrize(
    "line",
    [
        "{}",
        written(RECORD).replace("2026-11-01", "today"),
        written(replace(RECORD, taken_over=True)),
        "no json",
    ],
    ids=["empty", "date", "source", "json"],
)
def test_a_line_that_is_no_record_is_named(tmp_path, line):
    path = tmp_path / "results.jsonl"
    path.write_text(f"{written(RECORD)}\n{line}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"results\.jsonl:2"):
        Book.read(path)


@pytest.mark.parametrize(
    ("load", "note"), [(0.1, ""), (1e4, " other programs running")], ids=["quiet", "busy"]
)
def test_a_benchmark_adds_a_line(tmp_path, monkeypatch, load, note):
    path = tmp_path / "results.jsonl"
    monkeypatch.setattr("sys.argv", [str(ROOT / "benchmarks" / "train.py"), "--rows", "2", "--record"])
    for variable in LIMITS:  # the suite also runs under limits
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0, 0))
    made = append("step/small", {"step": Measure(1 / 3, "s")}, "isotype", path=path)
    (read,) = Book.read(path).records
    assert read.measures["step"].value == 0.333333
    assert (read.script, read.arguments) == ("benchmarks/train.py", "--rows 2")
    assert read.machine == made.machine
    assert read.machine.note == f"ATEN_CPU_CAPABILITY=avx2{note}"
    assert read.versions.keys() >= {"python", "torch", "transformers", "isotype"}
    assert re.fullmatch(r"[0-9a-f]{7,}\+?", read.commit)


def _parsed(*typed: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--every", type=int, default=5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["benchmark", *typed])
        return parsed(parser, "cases", "every")


def test_a_part_of_the_figures_is_not_recorded(capsys):
    assert _parsed("--record", "--every", "5").record
    assert not _parsed("llama", "--every", "3").record
    for typed in (["llama"], ["--every", "3"]):
        with pytest.raises(SystemExit):
            _parsed("--record", *typed)
        assert "leave out" in capsys.readouterr().err


def test_the_commit_is_that_of_the_beginning():
    commit.cache_clear()
    _parsed()
    assert commit.cache_info().currsize == 0
    _parsed("--record")
    assert commit.cache_info().currsize == 1
