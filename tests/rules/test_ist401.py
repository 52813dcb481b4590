from __future__ import annotations

from dataclasses import replace

from isotype.records.finding import Action
from isotype.rules.ist401_state_dtype import find
from tests.rules.samples import BF16, FP16, FP32, operand, packed, refused, trace


def test_a_stale_state_costs() -> None:
    (finding,) = find(trace([packed(BF16, FP16)]))
    assert finding.severity == "warning"
    assert finding.message == "1 4-bit weight dequantizes to float16, but the layers compute in bfloat16"
    assert finding.fixes[0].actions == (Action("state", "model.layers.*.self_attn.q_proj", "bfloat16"),)


def test_the_cause_names_the_line_that_loaded_the_weight() -> None:
    weight = replace(packed(BF16, FP16), set_at="loaded by from_pretrained at train.py:12")
    (finding,) = find(trace([weight]))
    assert finding.cause.endswith(" has the dtype float16, loaded by from_pretrained at train.py:12")


def test_a_stale_state_crashes_who_dequantizes() -> None:
    product = refused(
        "aten.mm.default", "forward", operand(BF16), operand(FP16, "operator", "dequantize_4bit")
    )
    (finding,) = find(trace([packed(BF16, FP16)], [product]))
    assert finding.severity == "error"


def test_states_that_fit_are_silent() -> None:
    assert not list(find(trace([packed(BF16, BF16)])))
    assert not list(find(trace([packed(FP32, BF16)])))  # IST404
    assert not list(find(trace([packed(BF16, None)])))  # IST402
