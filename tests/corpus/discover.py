"""All executable cases of the corpus, from every module of `tests.corpus.cases` that defines them."""

from __future__ import annotations

import json
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType

from tests.corpus import cases
from tests.corpus.scenario import Scenario

ROWS = Path(__file__).parent / "corpus.json"
"""id, url, title and cause class of each report of the corpus."""


@cache
def _modules() -> tuple[ModuleType, ...]:
    names = sorted(info.name for info in iter_modules(cases.__path__))
    return tuple(import_module(f"{cases.__name__}.{name}") for name in names)


def all_scenarios() -> dict[str, Scenario]:
    """case -> its scenario. Raises ValueError where two scenarios claim one case."""
    found: dict[str, Scenario] = {}
    for module in _modules():
        for scenario in getattr(module, "SCENARIOS", ()):
            if scenario.case in found:
                raise ValueError(f"{module.__name__}: {scenario.case} has a scenario already")
            found[scenario.case] = scenario
    return found


def left_out() -> dict[str, str]:
    """case -> why it has no scenario. Raises ValueError where two modules speak for one case."""
    found: dict[str, str] = {}
    for module in _modules():
        for case, reason in getattr(module, "LEFT_OUT", {}).items():
            if case in found:
                raise ValueError(f"{module.__name__}: {case} is left out already")
            found[case] = reason
    return found


def corpus() -> dict[str, dict[str, str]]:
    """id -> its row (`id`, `url`, `title`, `cause_class`), in the corpus' order."""
    return {row["id"]: row for row in json.loads(ROWS.read_text())}
