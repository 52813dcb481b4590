"""The predicted half: every scenario is found, its cause named, its fix proven, and the real step runs after repair."""

from __future__ import annotations

import pytest

from tests.corpus.discover import all_scenarios
from tests.corpus.judge import NOT_PREDICTED, judge_scenario


@pytest.mark.parametrize("case", sorted(set(all_scenarios()) - set(NOT_PREDICTED)))
@pytest.mark.filterwarnings("ignore")
def test_a_report_is_found_explained_and_mended(case: str) -> None:
    assert judge_scenario(all_scenarios()[case]).problems == ()


def test_what_is_not_predicted_is_said_with_a_reason() -> None:
    assert set(NOT_PREDICTED) <= set(all_scenarios())
    assert all(NOT_PREDICTED.values())
