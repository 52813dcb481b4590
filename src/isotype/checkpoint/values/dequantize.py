"""Convert quantized layers to dense ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from isotype.compat.torch import own_parameters
from isotype.compat.transformers import conversions, set_conversions
from isotype.model.experts.stack import QuantizedStack, quantized_stack, stacked_weights, take_stack
from isotype.model.mixed import dense_layer
from isotype.model.quantized import holds_turned
from isotype.model.walk import Place, places


@dataclass(frozen=True)
class DenseStack:
    """A stacked weight that was quantized, and becomes dense by `read`.

    Attributes:
        name: of the weight in the model.
        module: with the weight.
        codes, stack: its quantized values.
        dtype: of its dense values.
    """

    name: str
    module: nn.Module
    codes: torch.Tensor
    stack: QuantizedStack
    dtype: torch.dtype

    def read(self) -> None:
        """Set the module's weight, on the CPU, from its current codes."""
        own, codes, stack = self.name.rpartition(".")[2], self.codes, self.stack
        if quantized_stack(self.module, own) is not None:
            codes, stack = take_stack(self.module, own)
            stack.dtype = self.stack.dtype
        self._put(stack(codes).to("cpu", self.dtype))

    def drop(self) -> None:
        """Free the weight."""
        self._put(torch.empty(self.stack.shape, dtype=self.dtype, device="meta"))

    def _put(self, weight: torch.Tensor) -> None:
        own = self.name.rpartition(".")[2]
        own_parameters(self.module)[own] = nn.Parameter(weight, requires_grad=False)


def dequantize(
    model: Any,
    dtype: torch.dtype,
    later: Callable[[Place, Any], bool] = lambda *_: False,
    stack_later: Callable[[DenseStack], bool] = lambda _: False,
) -> None:
    """Replace bitsandbytes layers and stacked experts by dense ones on the CPU, with exactly the weights of their
    forward.

    Args:
        model: a transformers model, changed in place; unchanged if it is not quantized.
        dtype: of the dense weights. 4-bit layers dequantize to the dtype of their quantization state; int8 ones to
            float32 (code x constant / 127, LLM.int8, https://arxiv.org/abs/2208.07339).
        later: (quantized layer, dense one) -> True if the dense weights are filled later.
        stack_later: the same for stacked experts.
    """
    quantized = [each for each in stacked_weights(model) if quantized_stack(*each[1:]) is not None]
    for path, module, name in quantized:
        dense = DenseStack(f"{path}.{name}", module, *take_stack(module, name), dtype)
        dense.drop()
        if not stack_later(dense):
            dense.read()
    if quantized:
        set_conversions(model, None)  # saving reverses what loading does, as it does not with codes
    for place in list(places(model)):
        if place.kind not in ("linear4bit", "linear8bit"):
            continue
        linear = dense_on_cpu(place.module, dtype)
        if not later(place, linear):
            linear.weight = nn.Parameter(held_weight(place.module, dtype), requires_grad=False)
        model.set_submodule(place.name, linear)
    _forget_bnb(model)


def dense_on_cpu(layer: Any, dtype: torch.dtype) -> Any:
    """Return `isotype.model.mixed.dense_layer` with its bias on the CPU."""
    linear: Any = dense_layer(layer, dtype)
    if layer.bias is not None:
        linear.bias = nn.Parameter(layer.bias.data.to("cpu"), requires_grad=False)
    return linear


def dense_weight(layer: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight of a quantized layer in `dtype`, on the CPU."""
    from transformers.integrations.bitsandbytes import dequantize_bnb_weight

    weight: torch.Tensor = dequantize_bnb_weight(layer.weight, getattr(layer, "state", None))
    return weight.to("cpu", dtype)


def held_weight(layer: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return `dense_weight` in the layout of `dense_on_cpu` and the files: `[in, out]` for transformers' Conv1D."""
    weight = dense_weight(layer, dtype)
    return weight.T.contiguous() if holds_turned(layer) else weight


def _forget_bnb(model: Any) -> None:
    """Move a dequantized model to the CPU, without transformers' record of its quantization by bitsandbytes."""
    from transformers.integrations import bitsandbytes as integration

    if getattr(model, "hf_quantizer", None) is None:
        return
    for value in (*model.parameters(), *model.buffers()):
        if not value.is_meta:
            value.data = value.data.to("cpu")
    model.hf_quantizer.remove_quantization_config(model)
    # Saving reverses what loading did to the tensors; assembling packed weights has no reverse (transformers 5.23).
    noted = conversions(model)
    if noted is not None:
        own = integration.__name__
        modules = [
            (each, {type(step).__module__ for step in getattr(each, "operations", ())}) for each in noted
        ]
        set_conversions(model, [each for each, of_steps in modules if own not in of_steps])
