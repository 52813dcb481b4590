"""bitsandbytes layers under a policy."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import bitsandbytes
import pytest
import torch
from torch import nn

import isotype
from isotype.model.boundary import BoundarySettings, set_boundary
from isotype.model.enforce import enforce_model
from isotype.model.quantized import keep_training_layout, repacking, restore_layout
from isotype.precision.policy import PrecisionPolicy
from tests.pairwise import pairwise
from tests.refusals import refused

LOW = (torch.bfloat16, torch.float16)
EPSILON = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def linear(
    storage: str, double_quant: bool = False, packed: torch.dtype = torch.uint8, bias: bool = True
) -> Any:
    """A quantized layer of 64 inputs and 48 outputs inside a model, as transformers leaves it."""
    torch.manual_seed(0)
    dense = nn.Linear(64, 48, bias=bias)
    if storage == "int8":
        layer: Any = bitsandbytes.nn.Linear8bitLt(64, 48, bias=bias, has_fp16_weights=False)
    else:
        layer = bitsandbytes.nn.Linear4bit(
            64, 48, bias=bias, compress_statistics=double_quant, quant_type=storage, quant_storage=packed
        )
    layer.load_state_dict(dense.state_dict())
    return nn.Sequential(layer.to("cpu").requires_grad_(False))


def policy(compute: torch.dtype, storage: str, packed: torch.dtype = torch.uint8) -> PrecisionPolicy:
    return PrecisionPolicy(compute=compute, storage=storage, quant_storage=packed)


def dense_weight(layer: Any) -> torch.Tensor:
    if isinstance(layer, bitsandbytes.nn.Linear8bitLt):
        return layer.weight.data.double() * layer.state.SCB.double().unsqueeze(1) / 127
    state = copy.deepcopy(layer.weight.quant_state)
    state.dtype = torch.float32
    return bitsandbytes.functional.dequantize_4bit(layer.weight.data, state).double()


@pairwise(
    "bias, storage, compute", ["none", "frozen", "trained"], ["nf4", "fp4", "int8"], [torch.float32, *LOW]
)
def test_output_and_gradients_against_float64(compute: torch.dtype, storage: str, bias: str) -> None:
    model = linear(storage, bias=bias != "none")
    if bias == "trained":
        model[0].bias.requires_grad_(True)
    enforce_model(model, policy(compute, storage))
    layer = model.train()[0]
    before = None if bias == "none" else layer.bias.detach().clone()
    x = torch.randn(2, 3, 5, 64).to(compute).requires_grad_(True)  # four dimensions, as deepseek_v3 has them
    out = model(x)
    grad = torch.randn_like(out)
    out.backward(grad)

    weight = dense_weight(layer)
    expected = x.double() @ weight.T + (0 if before is None else before.double())
    # Weight, activations and result are rounded to the compute dtype: each of 64 products has three half units.
    tolerance = 8 * EPSILON[compute]
    assert out.dtype == compute
    assert (out - expected).abs().max() <= tolerance * expected.abs().max()
    assert x.grad is not None
    expected_x = grad.double() @ weight
    assert (x.grad - expected_x).abs().max() <= tolerance * expected_x.abs().max()
    if bias == "trained":
        assert (layer.bias.dtype, layer.bias.grad.dtype) == (torch.float32, torch.float32)
        assert torch.equal(layer.bias, before)  # not rounded in place
        expected_bias = grad.double().sum((0, 1, 2))
        assert (layer.bias.grad - expected_bias).abs().max() <= tolerance * expected_bias.abs().max()
    elif bias == "frozen":
        assert layer.bias.dtype == compute


def test_bitsandbytes_still_rounds_a_trained_bias_in_place() -> None:
    # When this fails, the "bias" boundary is no longer needed for 4-bit layers.
    layer = linear("nf4")[0]
    layer.compute_dtype, layer.compute_type_is_set = torch.bfloat16, True
    layer(torch.randn(2, 64, dtype=torch.bfloat16))
    assert layer.bias.dtype == torch.bfloat16


def test_bitsandbytes_still_loses_the_row_scales_of_a_copied_weight() -> None:
    # When this fails, `_init_8bit_state` is no longer needed.
    layer = linear("int8")[0].train()
    layer(torch.randn(2, 64))
    layer.weight = layer.weight.to("cpu")  # as PEFT's dequantize_module_weight does
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'unsqueeze'"):
        layer(torch.randn(2, 64))


@pytest.mark.parametrize("trained", [False, True])
def test_int8_row_scales_survive_copies_and_casts(trained: bool) -> None:
    model = linear("int8")
    enforce_model(model, policy(torch.bfloat16, "int8"))
    model.train(trained)
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    expected = model(x)
    model[0].weight = model[0].weight.to("cpu")
    assert torch.equal(model(x), expected)
    assert torch.equal(copy.deepcopy(model)(x), expected)
    model.to(torch.float16)
    enforce_model(model, policy(torch.bfloat16, "int8"))
    # The bias was rounded to float16 and back: eight digits of bfloat16 fit into float16's eleven.
    assert torch.equal(model(x), expected)


def test_int8_row_scales_are_float32() -> None:
    model = linear("int8", bias=False)
    model[0].weight.SCB = model[0].weight.SCB.to(torch.bfloat16)
    changes = enforce_model(model, policy(torch.float16, "int8"))
    assert [str(change) for change in changes] == [
        "0: row scales bfloat16 -> float32",
        "0: int8 boundary set",
    ]
    assert model[0].state.SCB.dtype == torch.float32
    assert enforce_model(model, policy(torch.float16, "int8")) == ()


def test_int8_without_row_scales_is_refused() -> None:
    model = linear("int8")
    model[0].weight = bitsandbytes.nn.Int8Params(model[0].weight.data, requires_grad=False)
    assert refused(isotype.PrecisionError, enforce_model, model, policy(torch.bfloat16, "int8")) == (
        "a quantized layer lost its quantization state\n"
        "  - 0: int8 weight of shape (48, 64) without a state\n"
        "    expected  a weight with codes and row scales\n"
        "    fix       load the model again, because other code has replaced or cast the quantized parameter"
    )


def test_4bit_without_a_state_is_refused() -> None:
    model = linear("nf4")
    model[0].weight, model[0].quant_state = nn.Parameter(model[0].weight.data, requires_grad=False), None
    assert refused(isotype.PrecisionError, enforce_model, model, policy(torch.bfloat16, "nf4")) == (
        "a quantized layer lost its quantization state\n"
        "  - 0: packed 4-bit weight of shape (1536, 1) without a state\n"
        "    expected  a weight with codes and absmax constants\n"
        "    fix       load the model again, because other code has replaced or cast the quantized parameter"
    )


def test_packed_codes_that_were_cast_are_refused() -> None:
    model = linear("nf4", packed=torch.bfloat16)
    enforce_model(model, policy(torch.bfloat16, "nf4", torch.bfloat16))
    model.to(torch.float16)
    assert refused(
        isotype.PrecisionError, enforce_model, model, policy(torch.float16, "nf4", torch.bfloat16)
    ) == (
        "packed 4-bit codes were cast\n"
        "  - 0: codes packed as bfloat16 are now float16\n"
        "    expected  the bytes as they were packed, because casting them changes the codes\n"
        "    fix       load the model again, and do not cast it with .to(dtype), .half() or .bfloat16()"
    )


@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("storage", ["nf4", "fp4"])
def test_states_follow_the_policy(storage: str, double_quant: bool) -> None:
    model = linear(storage, double_quant)
    layer = model[0]
    state = layer.weight.quant_state
    holder = state.state2 if double_quant else state
    holder.absmax = holder.absmax.to(torch.bfloat16)
    state.dtype = torch.bfloat16
    layer.quant_state = copy.deepcopy(state)  # FSDP and deepcopy leave two of them
    changes = {str(change) for change in enforce_model(model, policy(torch.float16, storage))}
    assert changes == {
        "0: compute dtype unset -> float16",
        "0: quantization state bfloat16 -> float16",
        "0: absmax bfloat16 -> float32",
        "0.bias: float32 -> float16",
    }
    for kept in (layer.weight.quant_state, layer.quant_state):
        assert kept.dtype == torch.float16
        assert (kept.state2 if double_quant else kept).absmax.dtype == torch.float32
    assert enforce_model(model, policy(torch.float16, storage)) == ()


def test_evaluation_keeps_the_layout_that_trains() -> None:
    model = linear("nf4")
    model[0].support_avx512bf16_for_cpu = True
    enforce_model(model, policy(torch.bfloat16, "nf4"))
    before = model[0].weight.data.clone()
    model.eval()(torch.randn(2, 64, dtype=torch.bfloat16))
    assert torch.equal(model[0].weight.data, before)
    assert model[0].weight.quant_state.absmax.dtype == torch.float32
    x = torch.randn(2, 64, dtype=torch.bfloat16, requires_grad=True)
    model.train()(x).sum().backward()
    expected = dense_weight(model[0]).sum(0)
    assert x.grad is not None
    assert (x.grad - expected).abs().max() <= 8 * EPSILON[torch.bfloat16] * expected.abs().max()


def test_bitsandbytes_still_repacks_weights_into_a_layout_without_a_backward() -> None:
    # What CPUs with AVX512-BF16 do by themselves. When this fails, `_keep_training_layout` is no longer needed.
    layer = bitsandbytes.nn.Linear4bit(64, 64, bias=False, quant_type="nf4", compute_dtype=torch.bfloat16).to(
        "cpu"
    )
    assert hasattr(layer, "support_avx512bf16_for_cpu")
    layer.support_avx512bf16_for_cpu = True
    layer.eval()(torch.randn(2, 64, dtype=torch.bfloat16))
    assert layer.weight.quant_state.absmax.dtype == torch.bfloat16
    x = torch.randn(2, 64, dtype=torch.bfloat16, requires_grad=True)
    out = layer.train()(x)
    with pytest.warns(UserWarning, match="gemv_4bit: an autograd kernel was not registered"):
        out.sum().backward()


@pytest.mark.parametrize(
    ("rows", "columns", "why"),
    [
        (64, 96, "96 columns are not a multiple of the block size 64"),
        (48, 64, "48 rows are not a multiple of 32"),
        (64, 128, ""),
    ],
)
def test_what_an_evaluation_repacks_and_what_it_raises_for(rows: int, columns: int, why: str) -> None:
    def layer() -> Any:
        made = bitsandbytes.nn.Linear4bit(
            columns, rows, bias=False, quant_type="nf4", compute_dtype=torch.bfloat16
        ).to("cpu")
        made.support_avx512bf16_for_cpu = True  # what a CPU with AVX512-BF16 sets
        return made

    x = torch.randn(2, columns, dtype=torch.bfloat16)
    raw = layer()
    assert repacking(raw) == why
    with pytest.raises((AssertionError, RuntimeError)) if why else contextlib.nullcontext():
        raw.eval()(x)
    kept = layer()
    before = keep_training_layout(kept)
    assert repacking(kept) is None
    assert kept.eval()(x).shape == (2, rows)
    restore_layout(kept, before)
    assert repacking(kept) == why


def test_a_trained_bias_is_safe_under_threads() -> None:
    from concurrent.futures import ThreadPoolExecutor

    model = linear("nf4")
    model[0].bias.requires_grad_(True)
    enforce_model(model, policy(torch.bfloat16, "nf4"))
    inputs = [torch.randn(8, 64, dtype=torch.bfloat16) for _ in range(64)]
    expected = [model(x) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(a, b) for a, b in zip(pool.map(model, inputs), expected, strict=True))


def test_a_boundary_can_be_taken_off_a_quantized_layer() -> None:
    layer = linear("int8")[0]
    before = type(layer)
    set_boundary(layer, BoundarySettings("int8", torch.bfloat16))
    assert type(layer).__name__ == "Linear8bitLt"
    set_boundary(layer, None)
    assert type(layer) is before
