"""transformers' configuration of bitsandbytes for a policy."""

from __future__ import annotations

from typing import Any

from isotype.precision.policy import PrecisionPolicy


def wanted_quantization(policy: PrecisionPolicy, saved: str | None) -> Any:
    """transformers' quantization config for `policy`; `saved`: the format that the checkpoint comes in, or None."""
    if saved is not None or not policy.quantized:
        return None
    from transformers import BitsAndBytesConfig

    if policy.storage == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=policy.storage,
        bnb_4bit_compute_dtype=policy.compute,
        bnb_4bit_use_double_quant=policy.double_quant,
        bnb_4bit_quant_storage=policy.quant_storage,
    )
