from __future__ import annotations

from isotype.rules.ist404_compute_dtype import find
from tests.rules.samples import BF16, FP16, FP32, LAYER, POLICY, call, norm, operand, packed, trace


def test_the_default_compute_dtype() -> None:
    product = call("aten.mm.default", operand(FP32), result=FP32, flops=300, module=LAYER)
    other = call("aten.mm.default", operand(BF16), flops=100, module="lm_head")
    (finding,) = find(trace([packed(FP32, BF16), norm(BF16)], [product, other]))
    assert finding.severity == "warning"
    assert finding.message == "1 4-bit layer computes in float32, but the model runs in bfloat16"
    assert finding.cost is not None
    assert finding.cost.flops_share == 0.75
    assert [action.kind for action in finding.fixes[0].actions] == ["compute"]


def test_the_state_goes_with_it() -> None:
    (finding,) = find(trace([packed(FP32, FP32), norm(FP16)]))
    assert [(action.kind, action.value) for action in finding.fixes[0].actions] == [
        ("compute", "float16"),
        ("state", "float16"),
    ]


def test_an_unset_compute_dtype_takes_its_first_input() -> None:
    (finding,) = find(trace([packed(None, BF16), norm(FP32)], policy=POLICY))
    assert finding.cause.endswith("the compute dtype is unset, and the layer's first input is float32")


def test_float16_without_loss_scaling_is_said_to_lose_small_gradients() -> None:
    (finding,) = find(trace([packed(FP16, FP16), norm(BF16)], scaler=False))
    assert "gradients below 6e-8 become zero" in finding.notes[0]
    (finding,) = find(trace([packed(FP16, FP16), norm(BF16)], scaler=True))
    assert not finding.notes


def test_layers_that_compute_in_16_bit_or_a_float32_model_are_silent() -> None:
    assert not list(find(trace([packed(BF16), norm(BF16)])))
    assert not list(find(trace([packed(None), norm(BF16)])))
    assert not list(find(trace([packed(FP32), norm(FP32)])))
