"""The tests that a run of the whole suite leaves out: which can be spared, and that their list names tests that there are."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from pathlib import Path

from tools.sources import ROOT
from tools.thorough import CHEAP, LIST, Measured, read, shortened, spare


def reaching(seconds: float, *lines: int, of_processes: float = 0.0) -> Measured:
    return Measured(seconds, of_processes, frozenset(("core/lock.py", line, line + 1) for line in lines))


def test_costly_tests_are_spared_whose_branches_others_reach() -> None:
    tests = {
        "tests/a.py::test_cheap": reaching(CHEAP / 2, 1, 2),
        "tests/a.py::test_spare": reaching(2.0, 1, 2),
        "tests/a.py::test_needed": reaching(2.0, 2, 3),
        "tests/a.py::test_starts_a_process": reaching(2.0, of_processes=0.5),
        "tests/values/test_b.py::test_numbers": reaching(2.0, 1),
    }
    assert spare(tests, always=("tests/values/",), least=0) == ["tests/a.py::test_spare"]


def test_of_two_tests_with_the_same_branches_the_cheaper_one_runs() -> None:
    tests = {
        "tests/a.py::test_long": reaching(2.0, 1, 2, 3),
        "tests/a.py::test_short": reaching(1.0, 1, 2, 3),
    }
    assert spare(tests, least=0) == ["tests/a.py::test_long"]


def test_a_costly_test_of_few_new_branches_is_spared() -> None:
    tests = {
        "tests/a.py::test_few": reaching(1.0, 1, 2),
        "tests/a.py::test_many": reaching(1.0, *range(3, 9)),
    }
    assert spare(tests, least=4) == ["tests/a.py::test_few"]


def test_no_branch_is_lost() -> None:
    tests = {f"tests/a.py::test_{i}": reaching(0.1 * i, *range(i, 3 * i, i % 3 + 1)) for i in range(1, 30)}
    left_out = spare(tests, least=0)
    every = frozenset[tuple[str, int, int]]().union(*(test.branches for test in tests.values()))
    assert left_out
    assert every == frozenset[tuple[str, int, int]]().union(
        *(tests[name].branches for name in tests.keys() - left_out)
    )


def test_a_function_that_is_left_out_with_all_its_parameters_is_one_line() -> None:
    tests = ["t.py::test_a[1]", "t.py::test_a[2]", "t.py::test_b[1]", "t.py::test_b[2]", "t.py::test_c"]
    left_out = ["t.py::test_a[1]", "t.py::test_a[2]", "t.py::test_b[2]", "t.py::test_c"]
    assert shortened(left_out, tests) == ["t.py::test_a", "t.py::test_b[2]", "t.py::test_c"]


def test_a_measured_run_is_read(tmp_path: Path) -> None:
    (tmp_path / "seconds.1").write_text('["t.py::test_a", 1.5, 0.25]\n["t.py::test_b", 0.5, 0.0]\n')
    with closing(sqlite3.connect(tmp_path / "coverage.vm.pid1")) as data, data:
        data.executescript(
            """create table context (id integer, context text); create table file (id integer, path text);
            create table arc (file_id integer, context_id integer, fromno integer, tono integer);
            insert into context values (1, 't.py::test_a'), (2, ''); insert into file values (1, 'lock.py');
            insert into arc values (1, 1, 3, 4), (1, 2, 5, 6);"""
        )
    assert read(tmp_path) == {
        "t.py::test_a": Measured(1.5, 0.25, frozenset({("lock.py", 3, 4)})),
        "t.py::test_b": Measured(0.5, 0.0),
    }


def test_the_list_names_functions_that_there_are() -> None:
    """A function that was renamed would run again, and nothing would say so."""
    names = {line.partition("[")[0] for line in LIST.read_text().splitlines() if not line.startswith("#")}
    texts = {
        path: (ROOT / path).read_text()
        for path in {name.split("::")[0] for name in names}
        if (ROOT / path).is_file()
    }
    gone = [
        name
        for name in names
        if not re.search(
            rf"^\s*def {name.split('::')[-1]}\(", texts.get(name.split("::")[0], ""), re.MULTILINE
        )
    ]
    assert not gone, "run `make thorough`, or take these lines out of tests/thorough.txt"
