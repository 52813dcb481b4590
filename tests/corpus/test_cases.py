"""The predicted half: a scenario is found, its cause named, its fix proven, and the real step runs after repair.

One report of each class runs here that test_four_reports.py does not stand for, those that take many traces where every test does;
`benchmarks/corpus.py` runs all reports. That they are predicted is test_cases_real.py.
"""

from __future__ import annotations

import pytest

from tests.corpus.discover import all_scenarios, corpus
from tests.corpus.judge import NOT_PREDICTED, judge_scenario
from tests.pairwise import few

# Findings enough for dozens of traces; another report of their classes shows the same.
LONG = {
    *("unsloth-zoo-706", "llamafactory-pr5480", "llava-785", "axolotl-2250"),
    *("llamafactory-3991", "unsloth-5313", "peft-2421", "verl-omni-73"),
}

# Each of their fixes is traced on its own.
_MANY_FIXES = {
    *("qalora-10", "gemma-pytorch-24", "peft-3265", "peft-874", "peft-341", "miles-2764", "torchtitan-2389"),
    *("peft-1052", "loraNext-161", "unsloth-5766"),
}

_IN_FOUR_REPORTS = {
    "adapter_vs_base_dtype",
    "gradscaler_half_params",
    "norm_fp32_promotion",
    "quant_compute_dtype_default",
    "quant_state_dtype_stale",
    "trainer_casts_trainable_or_overrides_precision",
    "unsupported_hardware",
}


def _one_of_each_class() -> list[str]:
    first: dict[str, str] = {}
    for case in all_scenarios():
        if case not in NOT_PREDICTED and case not in LONG:
            first.setdefault(corpus()[case]["cause_class"], case)
    return [case for kind, case in first.items() if kind not in _IN_FOUR_REPORTS]


CASES = [case for case in _one_of_each_class() if case not in _MANY_FIXES]


@pytest.mark.real_cpu
@few("case", [*_one_of_each_class(), "llava-1712"], *CASES)
@pytest.mark.filterwarnings("ignore")
def test_a_report_is_found_explained_and_fixed(case: str) -> None:
    assert judge_scenario(all_scenarios()[case]).problems == ()


def test_what_is_not_predicted_is_said_with_a_reason() -> None:
    assert set(NOT_PREDICTED) <= set(all_scenarios())
    assert all(NOT_PREDICTED.values())
