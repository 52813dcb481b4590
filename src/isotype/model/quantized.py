"""bitsandbytes layers: what their quantization states hold, and how they follow a policy."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from isotype.errors import PrecisionError, Problem


def quantization_state(layer: nn.Module) -> Any:
    """The quantization state of a 4-bit layer, or None where it was lost."""
    return getattr(layer.weight, "quant_state", None) or getattr(layer, "quant_state", None)


def align_4bit(name: str, layer: Any, compute: torch.dtype) -> list[str]:
    """Bring a `Linear4bit` under a compute dtype: its own, its quantization state's and the constants' dtypes.

    The state says what dtype a dequantized weight comes out in; it is saved with the checkpoint and keeps the
    checkpoint's dtype (https://github.com/unslothai/unsloth/issues/4005). The absmax constants stay float32.

    Returns what was changed. Raises PrecisionError where the state was lost.
    """
    changes = []
    state = quantization_state(layer)
    if state is None:
        raise PrecisionError(
            "a quantized layer lost its quantization state",
            [
                Problem(
                    f"{name}: packed 4-bit weight of shape {tuple(layer.weight.shape)} without a state",
                    "a weight with the absmax constants that its 4-bit codes are multiplied with",
                    "load the model again: something replaced the Params4bit by a plain Parameter",
                )
            ],
        )
    if layer.compute_dtype != compute or not layer.compute_type_is_set:
        changes.append(f"compute dtype {layer.compute_dtype} -> {compute}")
        layer.compute_dtype = compute
        layer.compute_type_is_set = True
    if state.dtype != compute:
        changes.append(f"quantization state {state.dtype} -> {compute}")
        state.dtype = compute
    for holder in (state, state.state2 if state.nested else None):
        if holder is not None and holder.absmax.is_floating_point() and holder.absmax.dtype != torch.float32:
            changes.append(f"absmax {holder.absmax.dtype} -> float32")
            holder.absmax = holder.absmax.float()
    _keep_training_layout(layer)
    return changes


def _keep_training_layout(layer: Any) -> None:
    # bitsandbytes repacks 4-bit weights in place on the first evaluation forward on CPUs with AVX512-BF16; the
    # repacked layout has no backward and rounds the absmax constants to bfloat16, so a model that generates
    # and then trains would silently stop learning. The layer's own switch keeps the layout that trains.
    # See Linear4bit.forward in bitsandbytes/nn/modules.py (0.50.2); tests/model/test_quantized.py says when
    # this can go.
    if hasattr(layer, "support_avx512bf16_for_cpu"):
        layer.support_avx512bf16_for_cpu = False
