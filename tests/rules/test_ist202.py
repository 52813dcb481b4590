from __future__ import annotations

from tests.rules.traces import BF16, FP32, batch, found, llama, of_llama, traced, verified

RULE = "ist202_cast_traffic"


def test_frozen_float32_weights_under_autocast() -> None:
    model = llama(FP32)
    linear = [p for n, p in model.named_parameters() if "base_layer" in n or "lm_head" in n]
    elements = sum(parameter.numel() for parameter in linear)
    (finding,) = verified(model, batch(), "IST202", autocast=BF16)
    assert finding.severity == "warning"
    assert finding.message == "frozen float32 weights are cast to bfloat16 at every step: 228 KiB"
    assert finding.cause == "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight is float32"
    assert finding.cost is not None
    assert finding.cost.cast_bytes == elements * 6
    assert finding.cost.memory_bytes == elements * 2
    first, second = finding.fixes
    # Random float32 digits are not what bfloat16 holds.
    assert (first.description, first.safety, first.verified) == (
        "store the frozen weights in bfloat16",
        "unsafe",
        True,
    )
    assert second.actions[0].kind == "advice"


def test_the_cast_is_safe_where_bfloat16_holds_every_value() -> None:
    (finding,) = found(RULE, traced(llama(BF16).float(), batch(), autocast=BF16))
    assert finding.fixes[0].safety == "safe"


def test_adapter_inputs_that_autocast_casts_back() -> None:
    (finding,) = found(RULE, of_llama(BF16, autocast=BF16))
    assert finding.severity == "note"
    assert finding.message.startswith(
        "PEFT casts adapter inputs to float32, and autocast casts them back to bfloat16: "
    )
    assert (
        "lora_A.default.weight is float32, so its layer casts the adapter's input to float32 at"
        in finding.cause
    )
    assert finding.notes[0] == "7 casts to float32 in a step, and the same number of casts back"
    assert finding.cost is not None
    # Seven layers twice: an input of 32 x 64 or, for down_proj, 32 x 96; up and down, 6 bytes each.
    assert finding.cost.cast_bytes == 2 * 6 * 32 * (6 * 64 + 96)


def test_trainable_masters_are_not_reported() -> None:
    assert found(RULE, of_llama(FP32, lora=False, autocast=BF16)) == []


def test_float32_adapters_without_autocast() -> None:
    assert found(RULE, of_llama(BF16)) == []
