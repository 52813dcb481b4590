from __future__ import annotations

from isotype.records.finding import Action
from isotype.rules.ist803_positions import find
from tests.rules.samples import BF16, FP32, call, operand, trace, weight, with_modules

NAME = "model.rotary_emb.inv_freq"


def test_cast_frequencies_are_computed_again() -> None:
    (finding,) = find(trace([weight(NAME, BF16, buffer=True, module_class="LlamaRotaryEmbedding")]))
    assert finding.severity == "warning"
    assert finding.cause == "the buffer model.rotary_emb.inv_freq is bfloat16"
    assert finding.fixes[0].actions == (Action("buffer", NAME, "float32"),)


def test_a_buffer_that_no_operator_uses_is_silent() -> None:
    buffer = weight(NAME, BF16, buffer=True, module_class="LlamaRotaryEmbedding")
    used = call("aten._to_copy.default", operand(BF16, "buffer", NAME))
    assert len(list(find(trace([buffer], [used])))) == 1
    assert not list(find(trace([buffer], [call("aten.mm.default", operand(BF16, "buffer", "other"))])))


def test_frequencies_of_unknown_origin_are_the_users() -> None:
    (finding,) = find(trace([weight(NAME, BF16, buffer=True, module_class="Rotary")]))
    assert finding.fixes[0].actions[0].kind == "advice"


def test_angles_by_a_rounded_product() -> None:
    product = call("aten.bmm.default", operand(BF16), module="layer.emb", autocast=BF16)
    (finding,) = find(with_modules(trace(calls=[product]), layer__emb="OldRotaryEmbedding"))
    assert finding.message == "rotary angles are computed in bfloat16"
    assert finding.cause == "autocast in bfloat16 at model.py:1 in layer.emb"


def test_float32_positions_and_other_products_are_silent() -> None:
    wide = call("aten.bmm.default", operand(FP32), result=FP32, module="layer.rotary_emb")
    other = call("aten.bmm.default", operand(BF16))
    assert not list(find(trace([weight(NAME, FP32, buffer=True)], [wide, other])))
