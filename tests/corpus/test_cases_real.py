"""Each broken set-up of the corpus really fails, or really costs, on this machine, and the check predicts it.

That its fix is proven and the repaired step runs is test_cases.py, for one report of each class.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest

from tests.corpus.discover import all_scenarios, corpus, left_out
from tests.corpus.judge import check_broken, prediction
from tests.corpus.scenario import Broken, Scenario
from tests.corpus.test_cases import CASES as JUDGED
from tests.corpus.test_cases import LONG
from tests.reality import Outcome, real_step

SCENARIOS = all_scenarios()
CRASHES = [scenario for scenario in SCENARIOS.values() if scenario.crashes]
SILENT = [scenario for scenario in SCENARIOS.values() if not scenario.crashes]


def run(broken: Broken) -> Outcome:
    """The real step of a set-up."""
    return real_step(
        broken.model,
        broken.inputs,
        broken.autocast,
        broken.scaler,
        broken.optimizer,
        broken.learning_rate,
        broken.phases,
        broken.generate,
    )


@pytest.mark.real_cpu
@pytest.mark.parametrize("scenario", CRASHES, ids=lambda scenario: scenario.case)
def test_really_crashes(scenario: Scenario) -> None:
    outcome = run(scenario.build())
    assert outcome.error is not None, "the step ran"
    assert re.search(scenario.crashes, str(outcome.error)), repr(outcome.error)
    assert outcome.phase == scenario.phase


def _first_of_each_kind(scenarios: list[Scenario]) -> list[Any]:
    """Every report; those after the first of their rule and class are `exhaustive`."""
    seen: set[tuple[str, str]] = set()
    cases = []
    for scenario in scenarios:
        kind = scenario.codes[0], corpus()[scenario.case]["cause_class"]
        cases.append(
            pytest.param(scenario, id=scenario.case, marks=pytest.mark.exhaustive if kind in seen else ())
        )
        seen.add(kind)
    return cases


@pytest.mark.real_cpu
@pytest.mark.parametrize("scenario", _first_of_each_kind(SILENT))
def test_really_costs_or_is_refused_elsewhere(scenario: Scenario) -> None:
    broken = scenario.build()
    if scenario.cost is not None:
        assert scenario.cost(broken)
        return
    assert scenario.notes, "neither a crash nor a cost on this machine, and not a word about why"
    outcome = run(broken)
    assert outcome.error is None, "what this machine refuses has `crashes`"


# First rules of the reports of test_four_reports.py that are judged every time.
IN_FOUR_REPORTS = {"IST101", "IST105", "IST302", "IST401", "IST406"}

# What a merge rounds away is no step's, a cast that changes no matmul has no cost, and a recomputation in another 16-bit
# dtype breaks no operator.
UNSEEN = ("pytorch-188955", "pytorch-71124", "torchtune-1101")


def _one_of_each_class() -> list[Any]:
    """Every report; those after the first of their class or of their first rule are `exhaustive`, as in `benchmarks/corpus.py`.

    Those of test_cases.py and test_four_reports.py are before all.
    """
    seen = Counter(corpus()[case]["cause_class"] for case in JUDGED)
    rules = {*(SCENARIOS[case].codes[0] for case in JUDGED), *IN_FOUR_REPORTS}
    cases = []
    for case in sorted(SCENARIOS, key=lambda each: each in LONG):
        seen[kind := corpus()[case]["cause_class"]] += 1
        rule = SCENARIOS[case].codes[0]
        later = (seen[kind] > 1 or rule in rules) and case not in UNSEEN
        rules |= {rule} if not later else set()
        cases.append(pytest.param(SCENARIOS[case], id=case, marks=pytest.mark.exhaustive if later else ()))
    return cases


@pytest.mark.real_cpu
@pytest.mark.parametrize("scenario", _one_of_each_class())
@pytest.mark.filterwarnings("ignore")
def test_is_predicted_with_its_cause(scenario: Scenario) -> None:
    finding, wrong = prediction(scenario, check_broken(scenario.build(), verify=False))
    assert (finding is None) == (scenario.case in UNSEEN), wrong
    assert finding is None or not wrong


@pytest.mark.real_cpu
@pytest.mark.parametrize(
    "scenario", [s for s in SCENARIOS.values() if s.advice is not None], ids=lambda scenario: scenario.case
)
def test_advice_really_cures(scenario: Scenario) -> None:
    assert scenario.advice is not None
    fixed = scenario.advice()
    if scenario.cost is not None:
        assert scenario.cost(fixed) is None
    else:
        assert run(fixed).error is None


def test_left_out_is_not_built_too() -> None:
    assert not left_out().keys() & SCENARIOS.keys()
    assert left_out().keys() <= corpus().keys()
    assert all(len(reason) > 20 for reason in left_out().values())


def test_every_case_is_built_or_left_out() -> None:
    missing = corpus().keys() - SCENARIOS.keys() - left_out().keys()
    assert not missing, f"neither a scenario nor a reason: {sorted(missing)}"
