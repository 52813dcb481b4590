from __future__ import annotations

from tests.rules.traces import BF16, FP16, batch, cast, found, llama, of_llama, traced, verified

RULE = "ist502_mixed_adapters"


def test_magnitudes_in_float32_beside_bfloat16_adapters() -> None:
    model = cast(llama(use_dora=True), BF16, ("lora_A", "lora_B"))
    (finding,) = verified(model, batch(), "IST502", autocast=BF16)
    assert finding.severity == "note"
    assert finding.message == "the trained adapters have different dtypes: 14 in bfloat16, 7 in float32"
    assert finding.cause.endswith("lora_A.default.weight is bfloat16")
    (fix,) = finding.fixes
    assert (fix.description, fix.safety, fix.verified) == ("cast every adapter to float32", "safe", True)


def test_two_16_bit_dtypes_meet_in_float32() -> None:
    model = cast(cast(llama(), BF16, ("lora_A",)), FP16, ("lora_B",))
    (finding,) = found(RULE, traced(model, batch(), autocast=BF16))
    assert {action.value for action in finding.fixes[0].actions} == {"float32"}
    assert len(finding.fixes[0].actions) == 14  # seven layers' A and B, whatever the number of the layer


def test_one_dtype() -> None:
    assert found(RULE, of_llama()) == []
    assert found(RULE, traced(cast(llama(), BF16, ("lora_",)), batch())) == []
