"""4-bit weights dequantized on this CPU, whatever their rows' length, against constants and codes looked up by hand."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
import transformers
from bitsandbytes import functional
from bitsandbytes.backends.cpu import ops

import isotype
from isotype.compat import bitsandbytes as bnb_blocks
from isotype.compat.bitsandbytes import dequantize_4bit
from isotype.model.quantized import dense_weight
from tests.models import quiet
from tests.pairwise import pairwise

COLUMNS = (16, 30, 48, 64, 80, 96, 200, 4304)


def test_the_warning_about_a_missing_package_is_hidden() -> None:
    assert '"Failed to load CPU gemm_4bit_forward' in Path(ops.__file__).read_text(encoding="utf-8")
    bnb_blocks.hide_missing_kernel()
    bnb_blocks.hide_missing_kernel()
    for words, shown in (("Failed to load CPU gemm_4bit_forward: %s", False), ("another warning: %s", True)):
        record = ops.logger.makeRecord(ops.logger.name, logging.WARNING, "", 0, words, ("No module",), None)
        assert bool(ops.logger.filter(record)) is shown


def by_hand(codes: torch.Tensor, state: Any) -> torch.Tensor:
    """Code x absmax of its block, float32, from the flattened weight."""
    size = state.shape.numel()
    single = torch.stack([codes.view(-1) >> 4, codes.view(-1) & 15], dim=1).view(-1)[:size]
    absmax = state.absmax
    if state.nested:
        absmax = functional.dequantize_blockwise(absmax, state.state2) + state.offset
    scales = absmax.repeat_interleave(state.blocksize)[:size]
    return (state.code[single.long()] * scales).view(state.shape)


@pairwise(
    "rows, columns, form, blocksize, dtype",
    (1, 2, 5, 64),
    COLUMNS,
    ("nf4", "fp4"),
    (32, 64, 128),
    (torch.float32, torch.bfloat16, torch.float16),
)
def test_rows_that_end_inside_of_a_block(
    rows: int, columns: int, form: str, blocksize: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(columns)
    weight = torch.randn(rows, columns).to(dtype)
    codes, state = functional.quantize_4bit(weight, quant_type=form, blocksize=blocksize)
    # A product is rounded once to its dtype, half a step of it; the kernel may round it twice.
    torch.testing.assert_close(
        dequantize_4bit(codes, state).float(), by_hand(codes, state), rtol=torch.finfo(dtype).eps, atol=1e-7
    )


@pytest.mark.parametrize("shape", [(1, 8), (8, 1), (2, 4)])
def test_a_weight_that_is_packed_in_one_number_is_not_transposed(shape: tuple[int, int]) -> None:
    layer: Any = bitsandbytes.nn.Linear4bit(
        *reversed(shape), bias=False, quant_type="nf4", quant_storage=torch.float32
    ).to("cpu")
    assert layer.weight.shape == (1, 1)
    codes, state = layer.weight.data.view(torch.uint8).view(-1, 1), layer.weight.quant_state
    assert torch.equal(dequantize_4bit(layer.weight.data, state), by_hand(codes, state))
    assert torch.equal(dense_weight(layer, torch.float32), by_hand(codes, state))


def test_a_layer_computes_with_them_with_and_without_gradients() -> None:
    bnb_blocks.dequantize_by_blocks()
    torch.manual_seed(0)
    layer = bitsandbytes.nn.Linear4bit(80, 24, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    layer = layer.to("cpu")
    weight = by_hand(layer.weight.data, layer.weight.quant_state)
    hidden = torch.randn(3, 80, requires_grad=True)
    made = layer(hidden)
    torch.testing.assert_close(made, hidden @ weight.T)
    made.sum().backward()
    torch.testing.assert_close(hidden.grad, weight.sum(0).expand(3, 80))
    with torch.no_grad():
        torch.testing.assert_close(layer(hidden), hidden @ weight.T)


def test_a_loaded_model_has_them(tmp_path: Path) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, intermediate_size=112, num_key_value_heads=2)
    with quiet():
        transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    policy = isotype.resolve_precision(tmp_path, "float32", "nf4", device="cpu")
    layer = isotype.load(tmp_path, policy).model.layers[0].mlp.down_proj
    hidden = torch.randn(2, 112)
    weight = by_hand(layer.weight.data, layer.weight.quant_state)
    torch.testing.assert_close(layer(hidden), hidden @ weight.T, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="a CPU without AVX512 counts rightly")
def test_it_is_still_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where this fails, bitsandbytes counts rightly: `isotype.compat.bitsandbytes` can go."""
    bnb_blocks.dequantize_by_blocks()
    monkeypatch.setattr(ops, "lib", ops.lib.library)
    codes, state = functional.quantize_4bit(torch.randn(8, 96), quant_type="nf4")
    assert not torch.allclose(functional.dequantize_4bit(codes, state), by_hand(codes, state), atol=1e-3)


@pairwise(
    "form, blocksize, nested, biased, dtype",
    ("nf4", "fp4"),
    (64, 128),
    (False, True),
    (False, True),
    (torch.float32, torch.bfloat16, torch.float16),
)
def test_products_with_packed_weights_and_constants_in_float32(
    form: str, blocksize: int, nested: bool, biased: bool, dtype: torch.dtype
) -> None:
    """Tolerance, of the norm: what is multiplied is the weight rounded to the dtype, and the sum is rounded once more."""
    torch.manual_seed(0)
    weight, x, bias = torch.randn(33, 256), torch.randn(5, 256).to(dtype), torch.randn(33).to(dtype)
    codes, state = functional.quantize_4bit(
        weight, blocksize=blocksize, quant_type=form, compress_statistics=nested
    )
    state.dtype = dtype
    exact_weight = by_hand(codes, state).double()
    exact = x.double() @ exact_weight.t() + (bias.double() if biased else 0)
    y = bnb_blocks.product_4bit(x, codes, state, bias if biased else None)
    assert y.dtype == dtype
    assert (y - exact).norm() / exact.norm() < max(torch.finfo(dtype).eps, 1e-6)
    if nested:
        single = bnb_blocks.with_float32_constants(state)
        assert torch.equal(dequantize_4bit(codes, single), dequantize_4bit(codes, state))


@pytest.mark.parametrize(
    ("columns", "second", "taken"), [(256, 256, True), (96, 256, False), (256, 64, False)]
)
def test_what_bitsandbytes_would_warn_of_or_refuse_is_not_handed_to_it(
    columns: int, second: int, taken: bool
) -> None:
    _, state = functional.quantize_4bit(torch.randn(8, columns), blocksize=64, compress_statistics=True)
    state.state2.blocksize = second
    assert bnb_blocks.multiplies(state) is taken
