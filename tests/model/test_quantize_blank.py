"""Weightless quantized layers leave bitsandbytes as it was."""

from __future__ import annotations

import bitsandbytes.functional as bnb
import pytest
import torch
from bitsandbytes.nn import Linear4bit

from isotype.model.quantize import quantize_4bit, quantize_blank


def test_constants_are_quantized_after_those_of_a_weightless_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    wanted = bnb.dequantize_4bit(*quantize_4bit(weight, "nf4", double_quant=True))
    # A process that has quantized no constants yet.
    monkeypatch.setattr(bnb, "name2qmap", {})
    with torch.device("meta"):
        layer = Linear4bit(64, 64, quant_type="nf4", compress_statistics=True)
        quantize_blank(layer, torch.float32)
    assert layer.weight.is_meta
    torch.testing.assert_close(
        bnb.dequantize_4bit(*quantize_4bit(weight, "nf4", double_quant=True)), wanted, rtol=0, atol=0
    )
