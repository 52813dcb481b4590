"""Mixed storage: layers of a weightless quantized model replaced by layers in another format.

transformers' `BitsAndBytesConfig` has one format for all layers (4 or 8 bits) and a list of skipped ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from isotype.compat.torch import own_parameters
from isotype.core.errors import PrecisionError
from isotype.core.formats import FORMATS
from isotype.core.names import listed
from isotype.model.quantized import holds_turned
from isotype.model.walk import kind_of
from isotype.precision.policy import PrecisionPolicy

_OUTLIERS = 6.0
"""Larger inputs are multiplied in 16 bits: transformers' `llm_int8_threshold`, https://arxiv.org/abs/2208.07339."""
_BITS = {"linear4bit": 4, "linear8bit": 8}


def store_layers(model: nn.Module, policy: PrecisionPolicy) -> frozenset[str]:
    """Replace layers in place by ones in the policy's format; return the weights of those in another quantized format.

    The model has bitsandbytes' layers, their weights on the meta device and not yet quantized. Raises PrecisionError if it
    lacks layers named in the policy.
    """
    modules = dict(model.named_modules())
    unknown = [each.module for each in policy.layers if kind_of(modules.get(each.module, model)) not in _BITS]
    if unknown:
        what = f"{listed(unknown)} under a policy that stores them otherwise"
        expected = "quantized linear layers of this model"
        fix = "resolve the policy for this model: isotype.resolve_precision(model, quantization='mixed')"
        raise PrecisionError.of("the policy is for other layers", what, expected, fix)
    for each in policy.layers:
        layer: Any = modules[each.module]
        form = FORMATS.get(each.storage)
        if form is None:
            model.set_submodule(each.module, dense_layer(layer, policy.plain))
        elif form.bits != _BITS[kind_of(layer)]:
            model.set_submodule(each.module, _int8(layer))
        elif form.block:
            layer.weight.quant_type, layer.weight.blocksize = form.code, form.block
    return frozenset(f"{each.module}.weight" for each in policy.layers if each.storage == "int8")


def leave_dense(model: nn.Module, weights: Iterable[str], dtype: torch.dtype) -> None:
    """Replace quantized layers whose weights are in no file by dense ones, which are initialized and trained."""
    modules = dict(model.named_modules())
    for name in {weight.rpartition(".")[0] for weight in weights}:
        if name in modules and kind_of(modules[name]) in _BITS:
            model.set_submodule(name, dense_layer(modules[name], dtype))


def _int8(layer: Any) -> nn.Module:
    """Return bitsandbytes' int8 layer, as created by transformers, for a 4-bit one."""
    from bitsandbytes.nn import Linear8bitLt

    with torch.device("meta"):
        sizes, bias = (layer.in_features, layer.out_features), layer.bias is not None
        linear = Linear8bitLt(*sizes, bias, has_fp16_weights=False, threshold=_OUTLIERS)
    linear.source_cls = getattr(layer, "source_cls", nn.Linear)
    return _with_bias(linear.requires_grad_(False), layer)


def dense_layer(layer: Any, dtype: torch.dtype) -> nn.Module:
    """Return the dense layer that a quantized one replaced, with its bias; weight on meta, `[in, out]` for Conv1D."""
    with torch.device("meta"):
        if holds_turned(layer):
            linear = layer.source_cls(layer.out_features, layer.in_features)
        else:
            linear = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
    return _with_bias(linear.to(dtype).requires_grad_(False), layer)


def _with_bias(linear: nn.Module, layer: Any) -> nn.Module:
    if layer.bias is not None:
        own_parameters(linear)["bias"] = layer.bias
    return linear.train(layer.training)
