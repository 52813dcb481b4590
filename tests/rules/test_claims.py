"""A rule on broken contracts says in its own file which of them are its own."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import nn

from isotype.rules import all_rules
from isotype.rules.kit import contract_rule, groups
from isotype.rules.kit.groups import Claim, Stage
from tests.rules.traces import BF16, found, traced

X = {"input": torch.ones(2, 8, dtype=BF16)}
LAYERS = {"matmul": (nn.Linear(8, 8), "IST101"), "norm": (nn.LayerNorm(8), "IST110")}


@pytest.mark.parametrize(("layer", "code"), LAYERS.values(), ids=LAYERS)
def test_a_new_rule_is_given_what_it_claims_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, layer: nn.Linear | nn.LayerNorm, code: str
) -> None:
    before = groups.all_claims()
    headline = "{given} instead of {expected} in a norm of the test's own"
    claim = Claim("step", lambda broken: broken.runs("layer_norm"), headline)
    monkeypatch.setattr(groups, "all_claims", lambda: (("IST199", claim), *before))
    layer.to(BF16).bias.data = torch.ones(8)
    trace = traced(layer, X, phases=("forward",))
    messages = [finding.message for finding in contract_rule.find("isotype.rules.ist199_new", trace)]
    assert messages == (
        ["float32 instead of bfloat16 in a norm of the test's own"] if code == "IST110" else []
    )
    old = next(rule for rule in all_rules() if rule.code == code)
    assert len(list(old.find(trace))) == (code != "IST110")


def test_claims_are_asked_by_stage_then_by_code() -> None:
    order = [(get_args(Stage).index(claim.stage), code) for code, claim in groups.all_claims()]
    assert order == sorted(order)
    assert order[-1] == (len(get_args(Stage)) - 1, "IST101")  # whatever nobody else takes


def test_each_rule_that_claims_has_a_page() -> None:
    assert {code for code, _ in groups.all_claims()} <= {rule.code for rule in all_rules()}
    assert found("ist101_operands", traced(nn.Linear(8, 8, dtype=BF16), X, phases=("forward",))) == []


def test_findings_that_no_later_phase_changes() -> None:
    """Those of a training's first step are told before the step has ended."""
    settled = {code for code, claim in groups.all_claims() if claim.headline and claim.settled}
    assert settled == {"IST101", "IST102", "IST103", "IST104", "IST105", "IST106", "IST110"}
