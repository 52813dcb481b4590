from __future__ import annotations

from dataclasses import replace

from isotype.rules.ist304_masters import find
from tests.rules.samples import BF16, FP16, FP32, POLICY, adapter, trace


def test_a_trainers_cast_of_masters() -> None:
    (finding,) = find(trace([adapter(BF16)], policy=POLICY, autocast=BF16))
    assert finding.message == "1 of 1 trainable parameters are not in the master dtype float32: bfloat16"
    assert finding.fixes[0].safety == "safe"


def test_a_cast_down_is_safe_where_the_values_fit() -> None:
    low = replace(POLICY, master=BF16)
    (fits,) = find(trace([adapter(FP32, exact_in=BF16)], policy=low))
    (does_not,) = find(trace([adapter(FP32)], policy=low))
    assert (fits.fixes[0].safety, does_not.fixes[0].safety) == ("safe", "unsafe")


def test_bfloat16_masters_under_float16_autocast() -> None:
    assert list(find(trace([adapter(BF16)], autocast=FP16)))


def test_masters_of_the_policy_are_silent() -> None:
    assert not list(find(trace([adapter(FP32)], policy=POLICY)))
    assert not list(find(trace([adapter(BF16)], autocast=BF16)))
