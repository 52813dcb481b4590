from __future__ import annotations

import pytest
import torch
from torch import nn

import isotype
from tests.reality import real_step
from tests.rules.traces import BF16, found, traced, verified
from tests.small import ids, net, wide_norms

RULE = "ist108_generate"
PHASES = ("forward", "backward", "optimizer", "generate")


@pytest.mark.real_cpu
def test_generation_outside_of_the_autocast_that_training_relies_on() -> None:
    (finding,) = verified(wide_norms(), ids(), "IST108", autocast=BF16, phases=PHASES)
    outcome = real_step(wide_norms(), ids(), autocast=BF16, generate=lambda model: model(**ids()))
    assert (outcome.phase, outcome.module) == (finding.phase, finding.module) == ("generate", "layers.0.proj")
    assert finding.message == (
        "float32 instead of bfloat16 in evaluation or generation, where autocast is off"
    )
    assert finding.cause == "layers.0.norm.weight is float32"
    assert finding.notes == (
        "1 more operator in 2 modules fails for the same cause",
        f"the device raises: {outcome.error}",
    )
    assert finding.fixes[0].description == "return each ScaledNorm's output in bfloat16"


def test_autocast_in_evaluation_too() -> None:
    assert verified(wide_norms(), ids(), "IST108", autocast=BF16, phases=PHASES, autocast_eval=True) == []


def test_a_model_of_one_dtype() -> None:
    assert found(RULE, traced(net(), ids(), autocast=BF16, phases=PHASES)) == []


def test_generation_under_an_autocast_of_its_own() -> None:
    def generate(model: nn.Module) -> torch.Tensor:
        with torch.autocast("cpu", dtype=BF16):
            cache = torch.zeros(4, 8)
            return cache.index_copy_(0, torch.arange(2), model(**ids())[0, :2, :8])

    report = isotype.check(net(), ids(), device="cpu", autocast=BF16, phases=PHASES, generate=generate)
    assert [finding.code for finding in report.errors] == ["IST103"]
