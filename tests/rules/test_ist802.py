from __future__ import annotations

from isotype.rules.ist802_float16_range import find
from tests.rules.samples import BF16, FP16, FP32, norm, packed, trace, weight


def test_infinite_weights() -> None:
    (finding,) = find(trace([weight(largest=float("inf"))]))
    assert finding.severity == "error"
    assert finding.message == "1 weight holds values that are not finite"


def test_weights_that_float16_cannot_hold() -> None:
    (finding,) = find(trace([weight(dtype=FP32, largest=7e4)], autocast=FP16, device="a100"))
    assert finding.message == "1 weight becomes infinite in float16"
    assert finding.fixes[0].description == "compute in bfloat16"


def test_norms_that_carry_values_past_it() -> None:
    (finding,) = find(trace([norm(FP16, largest=3e4)], compute=FP16))
    assert finding.severity == "warning"
    assert finding.message == "1 norm can return values beyond float16's 65504"
    assert finding.notes == ("model.layers.0.input_layernorm.weight: up to 3e+04 x sqrt(64) = 2.4e+05",)
    assert finding.fixes[0].description.endswith("float32")  # a T4 has no bfloat16


def test_values_in_range_are_silent() -> None:
    assert not list(find(trace([norm(FP16, largest=2.0), weight(dtype=FP32, largest=6e4)], compute=FP16)))
    assert not list(find(trace([norm(BF16, largest=3e4), weight(largest=7e4)])))
    assert not list(find(trace([packed(packed=FP16, storage=FP16)], compute=FP16)))
