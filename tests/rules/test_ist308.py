from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from isotype.records.trace import Call, Failure
from tests.rules.samples import call, operand, trace
from tests.rules.traces import FP32, found

RULE = "ist308_clipped_scaled"
GRADIENT = operand(FP32, "gradient", "layer.weight")


def of_gradient(op: str, **fields: Any) -> Call:
    fields = {"by_script": True, **fields}
    return call(op, GRADIENT, result=FP32, phase="backward", module="", **fields)


BACKWARD = call("aten.mm.default", GRADIENT, result=FP32, phase="backward")
NORM = of_gradient("aten._foreach_norm.Scalar")
SCALED = of_gradient("aten._foreach_mul_.Tensor")
CLAMPED = of_gradient("aten._foreach_clamp_min_.Scalar")
UNSCALED = call("aten._amp_foreach_non_finite_check_and_unscale_.default", GRADIENT, phase="unscale")


def test_a_norm_and_a_clamp_before_the_unscale() -> None:
    for calls in ((BACKWARD, NORM, SCALED, UNSCALED), (BACKWARD, CLAMPED, UNSCALED)):
        (finding,) = found(RULE, trace(calls=calls, scaler=True))
        assert finding.severity == "warning"
        assert finding.message == "gradients are clipped while they are still multiplied by the loss scale"
        assert finding.fixes[0].description == "call scaler.unscale_(optimizer) before model.py:1"


def test_clipping_by_a_library_that_unscales_in_its_step() -> None:
    """Lightning-AI/pytorch-lightning #18089: a second unscale_() is an error, but a scaled limit is right."""
    place = "/venv/site-packages/lightning/pytorch/plugins/precision/precision.py:166"
    clip = replace(SCALED, source=place)
    (finding,) = found(RULE, trace(calls=(BACKWARD, NORM, clip, UNSCALED), scaler=True))
    assert finding.fixes[0].description == "multiply the limit of the clipping by scaler.get_scale()"


def test_clipping_after_the_unscale_or_without_one() -> None:
    assert found(RULE, trace(calls=(BACKWARD, UNSCALED, NORM, SCALED), scaler=True)) == []
    assert found(RULE, trace(calls=(BACKWARD, NORM, SCALED))) == []


def test_a_clamp_of_a_gradient_that_backward_computes() -> None:
    for op in ("aten.clamp_min.default", "aten.clamp.default", "aten._foreach_clamp_min.Scalar"):
        assert found(RULE, trace(calls=(BACKWARD, of_gradient(op), UNSCALED), scaler=True)) == []
    scaled = of_gradient("aten.mul_.Tensor", by_script=False)
    assert found(RULE, trace(calls=(NORM, scaled, UNSCALED), scaler=True)) == []


def test_a_product_of_a_gradient_in_a_backward_of_the_user() -> None:
    assert found(RULE, trace(calls=(of_gradient("aten.mul_.Tensor"), NORM, UNSCALED), scaler=True)) == []
    other = call("aten.mul_.Tensor", operand(torch.float32), phase="backward")
    assert found(RULE, trace(calls=(NORM, other, UNSCALED), scaler=True)) == []


def test_gradients_that_are_divided_but_not_multiplied() -> None:
    (finding,) = found(RULE, replace(trace(calls=(BACKWARD, UNSCALED), scaler=True), unscaled=True))
    assert finding.message == (
        "adamw steps with gradients that are divided by the loss scale, but the loss was not multiplied by it"
    )
    assert finding.fixes[0].text.startswith("replace loss.backward() by scaler.scale(loss).backward()")


def test_a_call_that_the_gradscaler_refuses() -> None:
    error = "AssertionError: Attempted step but _scale is None.  This may indicate"
    (finding,) = found(RULE, replace(trace(), failure=Failure("optimizer", "", "train.py:9", error)))
    assert finding.severity == "error"
    assert finding.cause == "no loss was multiplied by the loss scale"
    assert finding.source == "train.py:9"
