"""Quantized layers back to dense ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from isotype.model.walk import places


def dequantize(model: Any, dtype: torch.dtype) -> None:
    """Replace every bitsandbytes layer by a dense one on the CPU with the very weights its forward computes with.

    Args:
        model: a transformers model; changed in place. One that is not quantized is left alone.
        dtype: dtype of the dense weights. 4-bit layers dequantize to the dtype of their quantization state; int8
            ones to float32 (code x constant / 127, LLM.int8, https://arxiv.org/abs/2208.07339).
    """
    quantized = [place for place in places(model) if place.kind in ("linear4bit", "linear8bit")]
    if not quantized:
        return
    from transformers.integrations import bitsandbytes as integration

    for place in quantized:
        layer: Any = place.module
        with torch.device("meta"):
            linear = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
        weight = integration.dequantize_bnb_weight(layer.weight, getattr(layer, "state", None))
        linear.weight = nn.Parameter(weight.to("cpu", dtype), requires_grad=False)
        if layer.bias is not None:
            linear.bias = nn.Parameter(layer.bias.data, requires_grad=False)
        model.set_submodule(place.name, linear)
    model.hf_quantizer.remove_quantization_config(model)
    # Saving reverses what loading did to the tensors; assembling packed weights has no reverse (transformers 5.23).
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is not None:
        model._weight_conversions = [
            conversion
            for conversion in conversions
            if not any(
                type(step).__module__ == integration.__name__
                for step in getattr(conversion, "operations", ())
            )
        ]
    model.to("cpu")
