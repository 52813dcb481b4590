from __future__ import annotations

from isotype.rules.ist701_fsdp_uniform import find
from tests.rules.samples import BF16, FP16, FP32, adapter, norm, packed, trace, weight


def test_float32_adapters_on_a_bfloat16_base() -> None:
    (finding,) = find(trace([weight(), adapter(FP32, exact_in=BF16)], fsdp=1))
    assert finding.severity == "error"
    assert finding.message == "FSDP1 cannot flatten bfloat16 and float32 together in model.layers.0"
    assert (
        "Must flatten tensors with uniform dtype but got torch.bfloat16 and torch.float32" in finding.notes[0]
    )
    # Masters need their digits to be trained, whatever values they start with.
    assert [fix.safety for fix in finding.fixes] == ["safe", "unsafe", "safe"]


def test_frozen_norms_that_bfloat16_holds_are_cast() -> None:
    (finding,) = find(trace([weight(), norm(FP32, exact_in=BF16)], fsdp=1))
    assert finding.fixes[0].description == "cast them to bfloat16"
    assert finding.fixes[0].safety == "safe"


def test_codes_follow_the_other_weights() -> None:
    (finding,) = find(trace([packed(packed=FP16, storage=FP16), norm(BF16)], fsdp=1))
    assert finding.fixes[0].actions[0].target == "bnb_4bit_quant_storage"


def test_uniform_units_and_fsdp2_are_silent() -> None:
    assert not list(find(trace([weight(), adapter(BF16), weight("model.norm.weight", FP32)], fsdp=1)))
    assert not list(find(trace([weight(), adapter(FP32)], fsdp=2)))
    assert not list(find(trace([weight(), adapter(FP32)])))
