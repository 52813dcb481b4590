from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import isotype
from isotype.compat.torch_fsdp import fake_process_group
from isotype.rules.ist701_fsdp_uniform import find
from tests.rules.samples import BF16, FP16, FP32, POLICY, adapter, norm, packed, trace, weight
from tests.zoo import ARCHITECTURES


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
    assert finding.fixes[0].description == "cast the other parameters to bfloat16"
    assert finding.fixes[0].safety == "safe"


def test_codes_follow_the_other_weights() -> None:
    (finding,) = find(trace([packed(packed=FP16, storage=FP16), norm(BF16)], fsdp=1))
    assert finding.fixes[0].actions[0].target == "bnb_4bit_quant_storage"


def test_trained_norms_of_another_dtype_under_fsdp2() -> None:
    trained_norm = norm(FP32, trainable=True)
    (finding,) = find(trace([weight(trainable=True), trained_norm], fsdp=2))
    assert finding.message.startswith(
        "FSDP2 cannot reduce the gradients of bfloat16 and float32 together in "
    )
    assert finding.fixes[0].safety == "safe"
    # isotype itself gives a trained dtype its own group.
    assert not list(find(trace([weight(trainable=True), trained_norm], fsdp=2, policy=POLICY)))


@pytest.mark.parametrize(("unit", "errors"), [("model.layers.0", 1), ("model.layers.0.input_layernorm", 0)])
def test_the_units_of_a_sharded_model_decide(unit: str, errors: int) -> None:
    weights = [weight(trainable=True, unit="model.layers.0"), norm(FP32, trainable=True, unit=unit)]
    assert len(list(find(trace(weights)))) == errors


@pytest.mark.parametrize(
    ("module", "advised"), [("model.layers.0.norm", True), ("model.layers.0.self_attn.q_proj", False)]
)
def test_only_a_whole_module_can_be_sharded_separately(module: str, advised: bool) -> None:
    weights = [weight(trainable=True), weight(f"{module}.decay", FP32, trainable=True, module=module)]
    (finding,) = find(trace(weights, fsdp=2))
    assert any("fully_shard(layer.norm)" in fix.description for fix in finding.fixes) == advised


@pytest.mark.parametrize("mixed", [True, False])
def test_fsdp2_itself_raises_where_the_rule_finds_one(mixed: bool) -> None:
    llama = ARCHITECTURES["llama"]
    model, batch = llama.build(torch.bfloat16), llama.batch()
    if mixed:
        model.model.layers[0].input_layernorm.float()
    report = isotype.check(
        model, batch, fsdp=2, devices=2, autocast="bfloat16", phases=("forward", "backward"), wiring=False
    )
    codes = {finding.code for finding in report.errors}
    assert ("IST701" in codes) == mixed
    if mixed:
        (finding,) = (each for each in report.errors if each.code == "IST701")
        assert finding.fixes[0].verified
    expected = (
        pytest.raises(AssertionError, match="uniform original parameter dtype") if mixed else nullcontext()
    )
    with fake_process_group(2) as mesh:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        with expected, torch.autocast("cpu", torch.bfloat16):
            model(**batch).loss.backward()


def test_uniform_units_and_fsdp2_are_silent() -> None:
    assert not list(find(trace([weight(), adapter(BF16), weight("model.norm.weight", FP32)], fsdp=1)))
    assert not list(find(trace([weight(), adapter(FP32)], fsdp=2)))
    assert not list(find(trace([weight(), adapter(FP32)])))
