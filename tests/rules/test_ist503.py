from __future__ import annotations

import copy
import re
from typing import Any

import bitsandbytes as bnb
import peft
import pytest
import torch
from torch import nn

import isotype
from isotype.model.quantized import dense_weight
from tests.adapters import adapted
from tests.models import one_layer, tiny_batch
from tests.rules.samples import BF16, FP16, FP32, adapter, call, operand, trace, weight
from tests.rules.traces import batch, found, llama, of_llama, traced, verified

RULE = "ist503_rounded_updates"


class Averaged(nn.Module):
    """A layer and its exponential moving average, which each forward brings up to date."""

    def __init__(self, dtype: torch.dtype, together: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8, dtype=dtype)
        self.average = copy.deepcopy(self.layer).requires_grad_(False)
        self.together = together

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = list(zip(self.average.parameters(), self.layer.parameters(), strict=True))
        with torch.no_grad():
            if self.together:
                torch._foreach_lerp_([kept for kept, _ in pairs], [new for _, new in pairs], 1e-3)
            else:
                for kept, new in pairs:
                    kept.mul_(0.999).add_(new, alpha=1e-3)
        out: torch.Tensor = self.layer(x)
        return out


class Counting(nn.Module):
    """A layer that counts, in a buffer, how often each of its outputs is positive."""

    used: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("used", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        with torch.no_grad():
            self.used += (out > 0).sum(0).to(self.used.dtype)
        return out


def given(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {"x": torch.ones(2, 8, dtype=dtype)}


def merge(model: Any) -> torch.Tensor:
    model.merge_adapter()
    return model(**batch()).loss  # type: ignore[no-any-return]


@pytest.mark.parametrize("together", [False, True])
def test_a_moving_average_in_bfloat16(together: bool) -> None:
    (finding,) = found(RULE, traced(Averaged(BF16, together), given(BF16)))
    assert finding.severity == "warning"
    assert finding.message == (
        "2 bfloat16 tensors are changed in place outside of the optimizer: an update below half of a rounding step is lost"
    )
    assert finding.cause.startswith("average.weight is bfloat16, so the in-place addition at test_ist503.py:")
    assert finding.notes == (
        "bfloat16 loses every update below 1/512 of the weight's value, and below 1/256 for values just above a power of two",
    )


def test_the_rounding_is_real() -> None:
    for dtype, moves in ((BF16, False), (FP32, True)):
        model = Averaged(dtype)
        with torch.no_grad():
            model.layer.weight.mul_(1.25)
        before = model.average.weight.clone()
        for _ in range(3):
            model(torch.ones(2, 8, dtype=dtype))
        assert (model.average.weight != before).any().item() is moves


def test_an_average_in_float32_clears_it() -> None:
    (finding,) = verified(Averaged(BF16), given(BF16), "IST503")
    assert finding.fixes[0].description == "keep average.weight and others in float32"
    assert finding.fixes[0].verified
    assert found(RULE, traced(Averaged(FP32), given(FP32))) == []


def test_a_count_in_float16() -> None:
    (finding,) = found(RULE, traced(Counting().to(FP16), given(FP16)))
    assert finding.message.startswith("a float16 tensor is changed in place")
    assert [(a.kind, a.target) for a in finding.fixes[0].actions] == [("buffer", "used")]
    assert found(RULE, traced(Counting(), given(FP32))) == []


def test_a_merge_into_bfloat16() -> None:
    (finding,) = found(RULE, traced(llama(), merge, phases=("forward",)))
    assert finding.message == (
        "adapters are merged into 7 bfloat16 weights: an update below half of a rounding step is lost"
    )
    assert "q_proj.base_layer.weight is bfloat16" in finding.cause
    assert [fix.actions[0].kind for fix in finding.fixes] == ["advice", "advice"]


@pytest.mark.filterwarnings("ignore:One of the base layers adapted with ShiRA")
def test_an_adapter_that_peft_adds_to_a_copy_of_the_weight_in_every_forward() -> None:
    """SHiRA's delta is a sparse tensor, whose dtype does not come from the adapter's parameter."""
    config = peft.ShiraConfig(r=2, target_modules=["0"])
    model = peft.get_peft_model(nn.Sequential(nn.Linear(8, 8, dtype=BF16)), config)  # type: ignore[arg-type]
    (finding,) = found(RULE, traced(model, {"input": torch.ones(2, 8, dtype=BF16)}))
    assert finding.message.startswith("adapters are added to a bfloat16 weight in every forward: an update")
    assert finding.fixes[0].description == "keep base_model.model.*.base_layer.weight in float32"


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_peft_s_deltas_of_experts(dtype: torch.dtype) -> None:
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = one_layer(adapted("qwen3-moe", dtype, target_parameters=targets, target_modules=["q_proj"]))
    results = found(RULE, traced(model, tiny_batch("qwen3-moe"), phases=("forward", "backward")))
    assert len(results) == (dtype == BF16)
    for finding in results:
        assert finding.message == (
            "adapters are multiplied out (B times A) and added to 2 bfloat16 stacked weights: "
            "an update below half of a rounding step is lost"
        )
        assert finding.cause.startswith(
            "base_model.model.model.layers.0.mlp.experts.base_layer.base_layer.down_proj is bfloat16, so the addition at"
        )
        share = re.search(
            r"the deltas of all experts and their gradients take (\d+) % of the step's FLOPs",
            finding.notes[1],
        )
        assert share is not None
        assert 20 < int(share[1]) < 40
    isotype.fuse(model)
    assert found(RULE, traced(model, tiny_batch("qwen3-moe"), phases=("forward", "backward"))) == []


def test_a_merge_into_float32_and_a_plain_step_are_silent() -> None:
    assert found(RULE, traced(llama(FP32), merge, phases=("forward",))) == []
    assert found(RULE, of_llama()) == []
    assert found(RULE, of_llama(lora=False)) == []


def test_the_optimizer_and_what_only_comes_of_a_weight_are_silent() -> None:
    base, delta = weight(), adapter(FP32)
    itself = operand(BF16, "parameter", base.name, base.shape)
    stepped = call("aten.add_.Tensor", itself, itself, phase="optimizer")
    activation = call("aten.add_.Tensor", operand(BF16, "parameter", base.name, (2, 16, 64)))
    again = call("aten.add.Tensor", itself, operand(FP32, "parameter", delta.name, delta.shape))
    assert found(RULE, trace([base, delta], [stepped, activation, again])) == []


@pytest.mark.filterwarnings("ignore:.*erge lora module to 4-bit")
def test_a_merge_into_nf4_applies_little_and_changes_the_base() -> None:
    torch.manual_seed(0)
    layer = bnb.nn.Linear4bit(256, 256, bias=False, quant_type="nf4", compute_dtype=BF16)
    layer.weight = bnb.nn.Params4bit(torch.randn(256, 256) * 0.03, quant_type="nf4", requires_grad=False)
    net: Any = nn.Sequential(layer).to("cpu")
    net.is_loaded_in_4bit = True
    model: Any = peft.get_peft_model(net, peft.LoraConfig(r=8, target_modules=["0"], init_lora_weights=False))
    tuned = model.base_model.model[0]
    before, delta = dense_weight(tuned.base_layer).float(), tuned.get_delta_weight("default").detach()
    with torch.no_grad():
        tuned.lora_B["default"].weight *= 0.01 * before.norm() / delta.norm()
    update = tuned.get_delta_weight("default").detach()
    model.merge_adapter()
    merged = dense_weight(tuned.base_layer).float() - before
    assert (merged * update).sum() / update.square().sum() < 0.1
    model.unmerge_adapter()
    for _ in range(30):
        model.merge_adapter()
        model.unmerge_adapter()
    assert 0.1 < (dense_weight(tuned.base_layer).float() - before).norm() / before.norm() < 0.3
