from __future__ import annotations

from isotype.rules.ist306_autocast import find
from tests.rules.samples import BF16, FP16, POLICY, trace


def test_another_autocast_than_the_policys() -> None:
    (finding,) = find(trace(policy=POLICY, autocast=FP16, scaler=True))
    assert finding.message == "autocast is set to float16, but the policy computes in bfloat16"
    assert [(a.target, a.value) for a in finding.fixes[0].actions] == [
        ("autocast", "bfloat16"),
        ("scaler", "False"),
    ]


def test_the_policys_autocast_is_silent() -> None:
    assert not list(find(trace(policy=POLICY, autocast=BF16)))
    assert not list(find(trace(policy=POLICY)))
    assert not list(find(trace(autocast=FP16)))
