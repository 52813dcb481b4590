"""The table of a model's tensors."""

from __future__ import annotations

import math
from typing import Any

import bitsandbytes
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from isotype.model.walk import STANDS_FOR
from isotype.records.trace import Quantization, Weight
from isotype.trace.fake.twin import fake_mode, twin_of
from isotype.trace.weights import weights_of
from tests.small import BF16, FP16, FP32, net


def table(model: nn.Module) -> dict[str, Weight]:
    return {weight.name: weight for weight in weights_of(model)}


def test_every_parameter_and_buffer_once() -> None:
    model = nn.ModuleDict({"proj": nn.Linear(4, 3), "norm": nn.BatchNorm1d(3)})
    model["proj"].weight.requires_grad_(False)
    rows = table(model)
    assert list(rows) == [
        "proj.weight",
        "proj.bias",
        "norm.weight",
        "norm.bias",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    ]
    weight = rows["proj.weight"]
    assert (weight.shape, weight.dtype, weight.trainable, weight.buffer) == ((3, 4), FP32, False, False)
    assert (weight.module, weight.module_class, weight.kind) == ("proj", "Linear", "linear")
    assert rows["proj.bias"].trainable
    assert rows["norm.running_mean"].buffer
    assert rows["norm.weight"].kind == "norm"


def test_tied_weights_are_one_with_two_names() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(4, 4), "head": nn.Linear(4, 4, bias=False)})
    model["head"].weight = model["embed"].weight
    (weight,) = weights_of(model)
    assert (weight.name, weight.tied, weight.kind) == ("embed.weight", ("head.weight",), "embedding")


def test_layers_that_stand_for_several() -> None:
    model = net(2)
    setattr(model.layers[1], STANDS_FOR, 7)
    rows = table(model)
    assert rows["layers.1.proj.weight"].repeats == rows["layers.1.norm.weight"].repeats == 7
    assert rows["layers.0.proj.weight"].repeats == rows["head.weight"].repeats == 1


def test_pinned_patterns_of_any_part() -> None:
    model = net(2)
    model.layers[0]._keep_in_fp32_modules_strict = ["norm"]
    rows = table(model)
    assert [name for name, weight in rows.items() if weight.pinned] == [
        "layers.0.norm.weight",
        "layers.1.norm.weight",
    ]


def test_adapters() -> None:
    peft = pytest.importorskip("peft")
    model = peft.inject_adapter_in_model(
        peft.LoraConfig(r=2, target_modules=["proj"], modules_to_save=["head"]), net(1)
    )
    rows = table(model)
    adapters = {name for name, weight in rows.items() if weight.adapter}
    assert adapters == {
        "layers.0.proj.lora_A.default.weight",
        "layers.0.proj.lora_B.default.weight",
        "head.modules_to_save.default.weight",
        "head.modules_to_save.default.bias",
    }
    assert {name for name, weight in rows.items() if weight.trainable} == adapters
    assert rows["layers.0.proj.base_layer.weight"].kind == "linear"


# ------------------------------------------------------------------------------------------------------ magnitudes


def _linear(values: torch.Tensor, trainable: bool = True) -> Weight:
    model = nn.Linear(1, 1, bias=False)
    model.weight = nn.Parameter(values, requires_grad=trainable)
    (weight,) = weights_of(model)
    return weight


def test_magnitudes() -> None:
    weight = _linear(torch.tensor([[-8.0, 0.0, 0.5, 2.0]]))
    assert (weight.largest, weight.median_magnitude) == (8.0, 2.0)
    frozen = _linear(torch.tensor([[-8.0, 0.5]]), trainable=False)
    assert (frozen.largest, frozen.median_magnitude) == (8.0, None)
    zeros = _linear(torch.zeros(2, 2))
    assert (zeros.largest, zeros.median_magnitude) == (0.0, None)


@pytest.mark.parametrize("where", ["meta", "fake"])
def test_magnitudes_of_weights_without_values_are_unknown(where: str) -> None:
    model = nn.Linear(2, 2)
    made = model.to("meta") if where == "meta" else twin_of(model, fake_mode())
    for weight in weights_of(made):
        assert (weight.largest, weight.median_magnitude, weight.exact_in) == (None, None, None)


def test_empty_weights() -> None:
    weight = _linear(torch.zeros(0, 2))
    assert (weight.largest, weight.median_magnitude, weight.exact_in) == (None, None, None)


@pytest.mark.parametrize("values", [torch.tensor([[float("nan"), 1.0]]), torch.tensor([[float("inf"), 1.0]])])
def test_values_that_are_not_numbers(values: torch.Tensor) -> None:
    weight = _linear(values)
    assert weight.largest is not None
    assert not weight.largest <= torch.finfo(FP32).max


def test_no_weight_is_too_large_to_be_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isotype.trace.weights._MOST_ELEMENTS", 8)
    values = torch.ones(4, 4)
    assert (_linear(values).largest, _linear(values).median_magnitude) == (1.0, None)
    values[3, 3] = float("nan")
    assert math.isnan(_linear(values).largest or 0.0)


def test_of_a_quantized_weight_the_constants_are_looked_at() -> None:
    layer = bitsandbytes.nn.Linear4bit(64, 64, bias=False, compute_dtype=FP32, quant_type="nf4")
    layer.load_state_dict({"weight": torch.randn(64, 64)})
    layer = layer.to("cpu")
    assert table(layer)["weight"].largest is None
    layer.weight.quant_state.state2.absmax[0] = float("inf")
    assert math.isnan(table(layer)["weight"].largest or 0.0)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=6))
def test_which_dtype_holds_the_values(values: list[float]) -> None:
    weight = _linear(torch.tensor([values]))
    back = {half: torch.tensor(values).to(half).float().tolist() == values for half in (BF16, FP16)}
    expected = BF16 if back[BF16] else FP16 if back[FP16] else None
    assert weight.exact_in == expected


def test_only_float32_weights_are_asked_for_a_narrower_dtype() -> None:
    assert _linear(torch.ones(1, 1, dtype=BF16)).exact_in is None
    assert _linear(torch.ones(1, 1)).exact_in == BF16
    assert _linear(torch.full((1, 1), 1 + 2**-10)).exact_in == FP16
    assert _linear(torch.full((1, 1), 1 + 2**-20)).exact_in is None


# ------------------------------------------------------------------------------------------------ quantized layers


@pytest.fixture(scope="module")
def bnb() -> Any:
    return pytest.importorskip("bitsandbytes")


def four_bit(bnb: Any, dtype: torch.dtype = FP16, **options: Any) -> nn.ModuleDict:
    layer = bnb.nn.Linear4bit(64, 64, bias=False, quant_type="nf4", **options)
    return nn.ModuleDict({"proj": layer.to(dtype).to("cpu").requires_grad_(False)})


def test_a_4bit_layer(bnb: Any) -> None:
    (weight,) = weights_of(four_bit(bnb, compute_dtype=BF16))
    assert weight.kind == "linear4bit"
    assert weight.quantization == Quantization(
        "nf4", BF16, FP16, True, FP32, torch.uint8, torch.uint8, repacking=""
    )
    assert weight.bytes == 64 * 64 // 2


def test_a_4bit_layer_without_a_compute_dtype(bnb: Any) -> None:
    (weight,) = weights_of(four_bit(bnb))
    assert weight.quantization is not None
    assert weight.quantization.compute is None


def test_scales_that_are_quantized_too(bnb: Any) -> None:
    (weight,) = weights_of(four_bit(bnb, compress_statistics=True))
    assert weight.quantization is not None
    assert weight.quantization.absmax == FP32


def test_a_4bit_layer_that_has_lost_its_state(bnb: Any) -> None:
    model = four_bit(bnb)
    model["proj"].weight = nn.Parameter(model["proj"].weight.data, requires_grad=False)
    model["proj"].quant_state = None
    (weight,) = weights_of(model)
    assert weight.quantization is not None
    assert (weight.quantization.present, weight.quantization.state) == (False, None)


def test_an_int8_layer(bnb: Any) -> None:
    layer = bnb.nn.Linear8bitLt(64, 64, bias=False, has_fp16_weights=False).to(FP16).to("cpu")
    (weight,) = weights_of(nn.ModuleDict({"proj": layer.requires_grad_(False)}))
    assert weight.quantization == Quantization("int8", None, None, True, FP32, torch.int8, torch.int8)


def test_the_twin_of_a_quantized_layer_says_the_same(bnb: Any) -> None:
    model = four_bit(bnb, compute_dtype=BF16)
    (real,), (fake,) = weights_of(model), weights_of(twin_of(model, fake_mode()))
    assert (real.quantization, real.kind, real.shape) == (fake.quantization, fake.kind, fake.shape)
