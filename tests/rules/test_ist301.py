from __future__ import annotations

from dataclasses import replace

from isotype.rules.finding import Action
from isotype.rules.ist301_scaler_float16 import find
from isotype.trace.record import Failure
from tests.rules.samples import FP16, FP32, adapter, trace, unscale, weight


def test_float16_adapters_fire() -> None:
    half = adapter(FP16)
    (finding,) = find(trace([weight(dtype=FP16), half], [unscale(half)], scaler=True, autocast=FP16))
    assert finding.severity == "error"
    assert finding.phase == "unscale"
    assert finding.message == "GradScaler refuses the float16 gradients of 1 of 1 trainable parameters"
    assert finding.cause == "model.layers.0.self_attn.q_proj.lora_A.default.weight is float16"
    assert finding.fixes[0].actions == (
        Action("parameter", "model.layers.*.self_attn.q_proj.lora_A.default.weight", "float32"),
    )


def test_a_step_that_ended_early_is_judged_by_its_weights() -> None:
    ended = Failure("forward", "", "", "ValueError: shapes")
    assert list(find(trace([adapter(FP16)], scaler=True, failure=ended)))


def test_masters_and_unused_parameters_are_silent() -> None:
    assert not list(find(trace([weight(dtype=FP16), adapter(FP32)], scaler=True, autocast=FP16)))
    assert not list(find(trace([replace(adapter(FP16), name="never.used")], scaler=True, autocast=FP16)))
    assert not list(find(trace([adapter(FP16)], [unscale(adapter(FP16))])))
