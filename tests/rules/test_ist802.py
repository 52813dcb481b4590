from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from isotype.preflight.check import check
from isotype.rules.ist802_float16_range import find
from tests.reality import real_step
from tests.rules.samples import BF16, FP16, FP32, norm, packed, trace, weight


def test_infinite_weights() -> None:
    (finding,) = find(trace([weight(largest=float("inf"))]))
    assert finding.severity == "error"
    assert finding.message == "1 weight holds values that are not finite"
    assert (
        "a cast to float16" not in finding.fixes[0].description
    )  # huggingface/transformers #47842: log(0), rounded


def test_weights_that_float16_cannot_hold() -> None:
    (finding,) = find(trace([weight(dtype=FP32, largest=7e4)], autocast=FP16, device="a100"))
    assert finding.message == "1 weight becomes infinite in float16"
    assert finding.fixes[0].description == "compute in bfloat16"


def test_norms_that_carry_values_past_it() -> None:
    (finding,) = find(trace([norm(FP16, largest=3e4)], compute=FP16))
    assert finding.severity == "warning"
    assert finding.message == "1 norm can return values beyond 65504, the largest number of float16"
    assert finding.notes == ("model.layers.0.input_layernorm.weight: up to 3e+04 x sqrt(64) = 2.4e+05",)
    assert finding.fixes[0].description.endswith("float32")  # a T4 has no bfloat16


def test_values_in_range_are_silent() -> None:
    assert not list(find(trace([norm(FP16, largest=2.0), weight(dtype=FP32, largest=6e4)], compute=FP16)))
    assert not list(find(trace([norm(BF16, largest=3e4), weight(largest=7e4)])))
    assert not list(find(trace([packed(packed=FP16, storage=FP16)], compute=FP16)))


class _Masked(nn.Module):
    """Attention weights under a mask that is made in float32 and cast; or filled after the cast."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.late = late
        self.keys = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        scores = self.keys(x) @ x.mT
        dtype = scores.dtype if self.late else torch.float32
        mask = torch.zeros(kept.shape, dtype=dtype).masked_fill(~kept, torch.finfo(dtype).min)
        return torch.softmax(scores + mask.to(scores.dtype), -1).sum()


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_masks_whose_fill_becomes_infinite(late: bool, padded: bool) -> None:
    """Compared with the real step: NaN exactly where a whole row is masked by what was cast."""
    model = _Masked(late).half()
    kept = torch.ones(3, 3, dtype=torch.bool).tril()
    if padded:
        kept[:, 0] = False
    inputs = {"x": torch.ones(3, 4, dtype=torch.float16), "kept": kept}
    report = check(model, inputs, device="cpu", verify=False)
    found = [finding for finding in report.findings if finding.code == "IST802"]
    assert bool(found) == bool(torch.isnan(model(**inputs))) == (padded and not late)
    if found:
        assert found[0].message == (
            "a cast to float16 fills 1 whole row of a mask with minus infinity: softmax returns NaN"
        )


class _Filled(nn.Module):
    """Scores that are masked with a number which float16 does not hold."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        scores = (self.keys(x) @ x.mT).masked_fill(~kept, -1e9)
        return (scores.softmax(-1) @ x).sum()


@pytest.mark.real_cpu
def test_a_fill_value_beyond_float16_is_one_finding_with_a_proven_fix() -> None:
    """Measured, the fill value is no value of the model (IST809)."""
    inputs = {"x": torch.ones(3, 4), "kept": torch.ones(3, 3, dtype=torch.bool).tril()}
    error = real_step(_Filled(), inputs, FP16, scaler=True).error
    report = check(_Filled(), inputs, device="cpu", autocast=FP16, scaler=True)
    (finding,) = report.errors
    assert finding.code == "IST802"
    assert f"the device raises: {error}" in finding.notes
    assert re.fullmatch(
        r"the number -1e\+09 at \S+:\d+ is beyond 65504, the largest number of float16", finding.cause
    )
    fixes = [
        ("fill a float32 tensor", True),
        ("write torch.finfo(tensor.dtype).min, where `tensor` is the filled tensor", False),
    ]
    assert [(fix.description.partition(" at ")[0], fix.verified) for fix in finding.fixes] == fixes


def test_no_fix_casts_float16_to_float16() -> None:
    """`isotype run` prints fixes before it tries them."""
    inputs = {"x": torch.ones(3, 4), "kept": torch.ones(3, 3, dtype=torch.bool).tril()}
    report = check(_Filled(), inputs, device="t4", autocast=FP16, scaler=True, verify=False)
    (finding,) = report.errors
    assert [fix.description.partition(" ")[0] for fix in finding.fixes] == ["fill", "write"]
