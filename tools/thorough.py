"""The list of costly tests that reach few branches of their own: `tests/thorough.txt`. A run of the whole suite leaves them out, a run of named
files or folders does not.

python -m coverage run -m pytest -p tools.thorough tests    # writes build/coverage.* and build/seconds.*
python -m tools.thorough                                    # reads them, writes tests/thorough.txt; `make thorough` does both

These tests always run: those below `CHEAP` seconds of processor time, those that start a process (coverage does not say which test a process
belongs to), and `ALWAYS`, which compare numbers with a reference. The others are taken in the order of the new branches of `src` that they reach a
second (Chvátal, 1979: A greedy heuristic for the set-covering problem), and run down to `LEAST` branches a second.
"""

from __future__ import annotations

import heapq
import json
import os
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import coverage
import pytest

from tools.sources import ROOT

LIST = ROOT / "tests" / "thorough.txt"
CHEAP = 0.07
LEAST = 10
ALWAYS = (
    "tests/checkpoint/test_values.py",
    "tests/corpus/test_four_reports.py",
    "tests/lora/test_fuse.py",
    "tests/preflight/test_memory.py",
    "tests/test_docs.py",
    "tests/test_peers.py",
    "tests/train/test_matrix.py",
)

Branch = tuple[str, int, int]


@dataclass(frozen=True)
class Measured:
    """A test: seconds of processor time, those of processes that it started, and the branches that it reaches."""

    seconds: float
    of_processes: float
    branches: frozenset[Branch] = frozenset()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Coverage names the test with each branch that it reaches; its processor time is written down."""
    measured = coverage.Coverage.current()
    if measured is None:
        raise pytest.UsageError(
            "expected a run under coverage: python -m coverage run -m pytest -p tools.thorough"
        )
    before = os.times()
    measured.switch_context(item.nodeid)
    yield
    measured.switch_context("")
    user, system, user_of_processes, system_of_processes = (
        after - first for after, first in zip(os.times()[:4], before[:4], strict=True)
    )
    of_processes = user_of_processes + system_of_processes
    with (ROOT / "build" / f"seconds.{os.getpid()}").open("a") as file:
        file.write(json.dumps([item.nodeid, user + system + of_processes, of_processes]) + "\n")


def spare(tests: Mapping[str, Measured], always: tuple[str, ...] = ALWAYS, least: float = LEAST) -> list[str]:
    """Return the names of the tests that can be left out, sorted."""
    costly = {}
    missing = {branch for test in tests.values() for branch in test.branches}
    for name, test in tests.items():
        if test.seconds < CHEAP or test.of_processes or name.startswith(always):
            missing -= test.branches
        else:
            costly[name] = test
    # What a test adds only falls, so that its last figure is an upper bound.
    queue = [(-len(test.branches) / test.seconds, name) for name, test in sorted(costly.items())]
    heapq.heapify(queue)
    while queue:
        _, name = heapq.heappop(queue)
        worth = len(missing & costly[name].branches) / costly[name].seconds
        if queue and worth < -queue[0][0]:
            heapq.heappush(queue, (-worth, name))
        elif worth > least:
            missing -= costly.pop(name).branches
    return sorted(costly)


def read(folder: Path) -> dict[str, Measured]:
    """Return the tests that a run has measured, by name."""
    seconds: dict[str, tuple[float, float]] = {}
    for path in folder.glob("seconds.*"):
        seconds |= {
            name: (whole, part) for name, whole, part in map(json.loads, path.read_text().splitlines())
        }
    branches: defaultdict[str, set[Branch]] = defaultdict(set)
    for written in folder.glob("coverage.*.*"):
        # https://coverage.readthedocs.io/en/latest/dbschema.html: the API gives the contexts of lines, not those of branches.
        with closing(sqlite3.connect(f"file:{written}?mode=ro", uri=True)) as data:
            if not data.execute("select 1 from sqlite_master where name = 'arc'").fetchone():
                continue  # of a process that a test killed before it wrote
            query = "select context, path, fromno, tono from arc join context on context.id = context_id join file on file.id = file_id"
            for name, path, first, then in data.execute(f"{query} where context != ''"):
                branches[name].add((path, first, then))
    return {name: Measured(*taken, frozenset(branches[name])) for name, taken in seconds.items()}


def shortened(names: Iterable[str], tests: Iterable[str]) -> list[str]:
    """Return the names with one line for a function of which all parameters are left out."""
    names = set(names)
    kept = {name.partition("[")[0] for name in tests if name not in names}
    return sorted({name if name.partition("[")[0] in kept else name.partition("[")[0] for name in names})


def main() -> None:
    tests = read(ROOT / "build")
    names = spare(tests)
    left = [tests[name] for name in tests.keys() - {*names}]
    every, runs = (sum(test.seconds for test in some) for some in (tests.values(), left))
    reached, still = (
        {branch for test in some for branch in test.branches} for some in (tests.values(), left)
    )
    head = f"# Written by `make thorough`: {len(names)} of {len(tests)} tests, {1 - runs / every:.0%} of the processor time; "
    head += f"the others reach {len(still) / len(reached):.1%} of the branches.\n"
    partial = LIST.with_suffix(".partial")
    partial.write_text(head + "".join(f"{line}\n" for line in shortened(names, tests)))
    partial.replace(LIST)
    print(head.removeprefix("# "), end="")


if __name__ == "__main__":
    main()
