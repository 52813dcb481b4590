"""The language-model head of a transformers model, as data."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from isotype.lora.loss.logits import Head
from isotype.lora.weights import dense
from isotype.model.quantized import quantization_state
from isotype.model.walk import kind_of


def head_of(model: Any, temperature: float = 1.0) -> Head:
    """The head of a causal language model, tied or not, trained beside adapters (`modules_to_save`) or quantized.

    A quantized weight is dequantized, once a call. A sharded one is gathered.

    Args:
        model: a transformers model with output embeddings; below PEFT's wrapper.
        temperature: what the logits are divided by.

    Raises:
        ValueError: a LoRA adapter is on the head, which the product with its base weight alone would leave out.
    """
    config, module = model.config.get_text_config(), model.get_output_embeddings()
    if hasattr(module, "lora_A"):
        raise ValueError(
            "a LoRA adapter on the language-model head is not supported; train it with modules_to_save"
        )
    weight, bias = _dense(module), getattr(module, "bias", None)
    if isinstance(weight, DTensor):
        weight = weight.full_tensor()
        bias = bias.full_tensor() if isinstance(bias, DTensor) else bias
    softcap = getattr(config, "final_logit_softcapping", None)
    return Head(weight, bias, _scale(config), softcap, temperature)


def _scale(config: Any) -> float:
    """What the model multiplies its logits by: each family has a name of its own for it."""
    # Cohere, MPT (where it may be None); Muse Glimmer; Falcon-H1.
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        scale = getattr(config, name, None)
        if scale is not None:
            return float(scale)
    scaling = getattr(config, "logits_scaling", None)
    if scaling is None:
        return 1.0
    # Granite and MiniCPM3 divide by it; HyperCLOVA X multiplies.
    return float(scaling) if config.model_type == "hyperclovax" else 1 / float(scaling)


def _dense(module: Any) -> torch.Tensor:
    kind = kind_of(module)
    if kind == "linear4bit":
        return dense(module, quantization_state(module).dtype)
    if kind == "linear8bit":
        return dense(module, torch.float32)
    weight: torch.Tensor = module.weight
    return weight
