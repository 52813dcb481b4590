from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import isotype
from isotype.rules.ist402_state_missing import find
from isotype.trace.dtype_history import remembered
from tests.rules.samples import BF16, packed, trace, weight


def test_a_lost_state() -> None:
    (finding,) = find(trace([packed(state=None)]))
    assert finding.severity == "error"
    assert finding.message == "1 quantized weight has lost the quantization state"
    assert finding.fixes[0].actions[0].kind == "advice"


def test_a_head_that_the_checkpoint_lacks() -> None:
    """transformers 5.23 quantizes `score` of a token classifier, and draws its weight as a float parameter."""
    heads = [
        replace(
            packed(state=None),
            dtype=BF16,
            module=f"base_model.model.score.{part}",
            name=f"base_model.model.score.{part}.weight",
        )
        for part in ("original_module", "modules_to_save.default")
    ]
    (finding,) = find(trace([packed(), *heads]))
    assert finding.message == "2 weights are not quantized, but the layer computes with packed codes"
    assert (
        finding.cause
        == "score.weight is bfloat16: the checkpoint does not contain this weight, or code replaced it"
    )
    assert (
        finding.fixes[0].description
        == "load the model with BitsAndBytesConfig(…, llm_int8_skip_modules=['score'])"
    )


@pytest.mark.parametrize("layer", ["Linear4bit", "Linear8bitLt"])
def test_layers_that_were_not_moved_to_a_device(layer: str) -> None:
    """bitsandbytes-foundation/bitsandbytes #825, #1067: .to(device) quantizes the weights."""
    import bitsandbytes.nn

    options = {"has_fp16_weights": False} if layer == "Linear8bitLt" else {}
    model = nn.Sequential(getattr(bitsandbytes.nn, layer)(64, 64, **options), nn.Linear(64, 4))
    inputs = {"input": torch.randn(3, 64)}
    errors = isotype.check(model, inputs, device="t4").errors
    assert [finding.message for finding in errors if finding.code == "IST402"] == [
        "1 weight is not quantized, because the model was not moved to a device"
    ]
    assert not isotype.check(model.to("cpu"), inputs, device="t4").errors


@pytest.mark.parametrize("assign", [False, True])
def test_codes_that_load_state_dict_combines_with_other_scales(assign: bool) -> None:
    """bitsandbytes-foundation/bitsandbytes #1946: with strict=False, the states in the file are not read."""
    from bitsandbytes.nn import Linear4bit

    saved, model = (nn.Sequential(Linear4bit(64, 64), nn.Linear(64, 4)).to("cpu") for _ in range(2))
    inputs = {"input": torch.randn(3, 64)}
    with remembered():
        model.load_state_dict(model.state_dict(), strict=False)
        assert not isotype.check(model, inputs).errors
        model.load_state_dict(saved.state_dict(), strict=False, assign=assign)
        copied = copy.deepcopy(model)
    for loaded in (model, copied):
        assert torch.equal(loaded[0].weight, saved[0].weight)
        assert not torch.allclose(loaded(**inputs), saved(**inputs), rtol=0.01)
        (finding,) = isotype.check(loaded, inputs).errors
        assert finding.message == "1 4-bit weight has new codes with the scales of the earlier codes"
        assert finding.cause.startswith("load_state_dict does not read the quantization states of 0.weight,")
        assert "loaded at test_ist402.py" in finding.cause
    model[0].weight.quant_state = model[0].quant_state = saved[0].weight.quant_state
    assert torch.allclose(model(**inputs), saved(**inputs))
    assert not isotype.check(model, inputs).errors


def test_states_at_hand_are_silent() -> None:
    assert not list(find(trace([packed(), weight()])))


def _int8(dora: bool) -> tuple[Any, dict[str, torch.Tensor]]:
    from bitsandbytes.nn import Linear8bitLt

    model = nn.Sequential(Linear8bitLt(32, 32, has_fp16_weights=False), nn.Linear(32, 4)).to("cpu")
    config = LoraConfig(r=2, target_modules=["0"], use_dora=dora)
    return get_peft_model(model, config), {"input": torch.randn(3, 32)}  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["cpu", "t4"])
@pytest.mark.parametrize("dora", [True, False])
def test_dora_copies_an_int8_weight_without_its_scales(dora: bool, device: str) -> None:
    """peft 0.19 calls `weight.to("cpu")` in the forward, after bitsandbytes has moved the scales to the layer."""
    model, inputs = _int8(dora)
    report = isotype.check(model, inputs, device=device)
    assert ["IST402"] * (dora and device == "cpu") == [finding.code for finding in report.errors]
    model(**inputs)
    if not dora:
        assert model(**inputs).shape == (3, 4)
        return
    with pytest.raises(AttributeError, match="NoneType"):
        model(**inputs)
    before = report.errors
    after = isotype.check(model, inputs, device="cpu").errors
    assert after[0].message == "1 quantized weight has lost the quantization state"
    for finding in (*before, after[0]):
        assert finding.cause == (
            "on a CPU, PEFT's DoRA replaces base_model.model.0.base_layer.weight by a copy without its scales"
        )


def test_a_boundary_of_isotype_keeps_the_scales_under_dora() -> None:
    plain, inputs = _int8(dora=False)
    base = plain.unload()
    policy = isotype.resolve_precision(base, "bfloat16", device="cpu")
    model = isotype.add_lora(base, policy, LoraConfig(r=2, target_modules=["0"], use_dora=True))
    assert not isotype.check(model, inputs, device="cpu").errors
    for _ in range(3):
        model(**inputs)
    assert not isotype.check(model, inputs, device="cpu").errors
