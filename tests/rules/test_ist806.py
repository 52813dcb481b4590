from __future__ import annotations

from dataclasses import replace

import torch

from isotype.records.trace import Breach, Call, Trace
from isotype.rules.ist806_router import find
from tests.rules.samples import BF16, FP32, call, operand, trace, weight

GATE = "model.layers.0.mlp.gate"
BIAS = weight(f"{GATE}.bias", shape=(8,))


def routed(
    scores: torch.dtype, chosen: torch.dtype, experts: int = 8, choice: str = "model.layers.0.mlp"
) -> Trace:
    """Tokens `[32, 64]` times a gate `[8, 64]`; the largest of `experts` scores are taken in the module `choice`."""
    product = Call(
        "aten.mm.default",
        "forward",
        GATE,
        "moe.py:7",
        (operand(scores), operand(scores, "parameter", f"{GATE}.weight", (64, 8))),
        ((scores, (32, 8)),),
    )
    taken = call("aten.topk.default", operand(chosen, "cast", "to", (32, experts)), module=choice)
    return trace([weight(f"{GATE}.weight", scores, shape=(8, 64)), BIAS], [product, taken])


def test_a_float32_softmax_behind_a_rounded_product_comes_too_late() -> None:
    (finding,) = find(routed(BF16, FP32))
    assert finding.severity == "note"
    assert finding.message == "experts are chosen from bfloat16 scores"
    assert finding.module == GATE
    assert finding.cause == f"{GATE}.weight and the router's input are bfloat16"
    wide, narrow, by_hand = finding.fixes
    assert [(each.kind, each.target, each.value) for each in wide.actions] == [
        ("parameter", "model.layers.*.mlp.gate.bias", "float32"),
        ("parameter", "model.layers.*.mlp.gate.weight", "float32"),
        ("input", "model.layers.*.mlp.gate", "float32"),
    ]
    assert narrow.actions[-1].kind == "output"
    assert by_hand.actions[0].target == "moe.py:7"


def test_a_float32_weight_that_is_cast_before_the_product() -> None:
    step = routed(BF16, FP32)
    product = step.calls[0]
    weight_of = product.operands[1].origin
    by_cast = operand(BF16, "cast", "to", (64, 8))
    by_cast = replace(by_cast, origin=replace(by_cast.origin, before=replace(weight_of, dtype=FP32)))
    product = replace(product, operands=(product.operands[0], by_cast))
    step = replace(step, calls=(product, *step.calls[1:]))
    assert len(list(find(step))) == 1


def test_float32_scores_that_are_rounded_before_the_choice() -> None:
    (finding,) = find(routed(FP32, BF16))  # ViperEkura/AstrAI #57
    assert finding.cause == (
        f"{GATE} multiplies in float32, but its scores are rounded to 16 bits before experts are chosen"
    )
    assert [fix.scope for fix in finding.fixes] == ["advice"]


def test_a_product_of_two_dtypes_fails_and_chooses_nothing() -> None:
    step = routed(BF16, FP32)
    failed = replace(step.calls[0], breach=Breach("", True, BF16))
    assert not list(find(replace(step, calls=(failed, *step.calls[1:]))))


def test_a_float32_router_is_silent() -> None:
    assert not list(find(routed(FP32, FP32)))


def test_the_largest_of_other_scores_is_silent() -> None:
    assert not list(find(routed(BF16, BF16, experts=16)))
    assert not list(find(routed(BF16, BF16, choice="model.layers.1.self_attn.indexer")))


def test_a_predicted_class_is_no_expert() -> None:
    """The queries of RT-DETR are chosen by their highest score of a class; Switch Transformers choose one expert."""
    predicted = routed(BF16, BF16)
    predicted = replace(predicted, calls=(predicted.calls[0], replace(predicted.calls[1], op="aten.max.dim")))
    assert list(find(predicted)) == []
    experts = weight("model.layers.0.mlp.experts.expert_0.wi.weight")
    assert len(list(find(replace(predicted, weights=(*predicted.weights, experts))))) == 1
