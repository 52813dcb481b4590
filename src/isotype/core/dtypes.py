"""Conversion between dtype names and `torch.dtype`."""

from __future__ import annotations

import torch

from isotype.core.errors import PrecisionError
from isotype.core.formats import STORED

_ALIASES: dict[str, torch.dtype] = {
    **dict.fromkeys(("float32", "fp32", "float"), torch.float32),
    **dict.fromkeys(("bfloat16", "bf16"), torch.bfloat16),
    **dict.fromkeys(("float16", "fp16", "half"), torch.float16),
    **dict.fromkeys(("float64", "double"), torch.float64),
}

_WORDS = {name: word for word, name in STORED.items()}

COMPUTE_DTYPES: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes in which the matmuls of a training step may run."""

GGUF_BLOCKS: tuple[str, ...] = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
"""GGUF block types of 32 codes and a float16 scale (`_1`: and a float16 minimum) that the `gguf` library writes."""

LLAMA_CPP_TYPES: tuple[str, ...] = (
    "q6_k", "q5_k_m", "q5_k_s", "q4_k_m", "q4_k_s", "q3_k_l", "q3_k_m", "q3_k_s", "q2_k",
)  # fmt: skip
"""GGUF mixtures that only llama.cpp's `llama-quantize` writes."""

GGUF_TYPES: dict[str, torch.dtype] = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    **dict.fromkeys((*GGUF_BLOCKS, *LLAMA_CPP_TYPES), torch.float32),
}
"""GGUF types of exported models -> dtype to which weights are rounded first; blocks are rounded from float32."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return `"bfloat16"` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def autocast_dtype(device: str) -> torch.dtype | None:
    """Return autocast's current dtype on a device type; None if it is off, and for the meta device."""
    if device == "meta":  # torch raises for the meta device
        return None
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


class NoAutocast:
    """Context manager that disables autocast, cheaper than `torch.autocast(device, enabled=False)`."""

    __slots__ = ("_device", "_was")

    def __init__(self, device: str) -> None:
        self._device, self._was = device, device != "meta" and torch.is_autocast_enabled(device)

    def __enter__(self) -> None:
        if self._was:
            torch.set_autocast_enabled(self._device, False)

    def __exit__(self, *_: object) -> None:
        if self._was:
            torch.set_autocast_enabled(self._device, True)


def parse_dtype(value: str | torch.dtype) -> torch.dtype:
    """Return a torch dtype by its name (`"bfloat16"`, `"bf16"`, `"torch.bfloat16"`); a dtype is returned as
    it is.

    Raises:
        PrecisionError: the name is not that of a float dtype.
    """
    if isinstance(value, torch.dtype):
        return value
    dtype = _ALIASES.get(str(value).removeprefix("torch.").lower())
    if dtype is None:
        expected = "one of float32 (fp32), bfloat16 (bf16), float16 (fp16) or auto"
        raise PrecisionError.of("unknown dtype", f"dtype {value!r}", expected, "give one of these names")
    return dtype


def from_safetensors_name(name: str) -> torch.dtype | None:
    """Return `torch.bfloat16` for `"BF16"`; None for a format without a torch dtype."""
    known = STORED.get(name)
    return None if known is None else getattr(torch, known)


def to_safetensors_name(dtype: torch.dtype) -> str:
    """Return `"BF16"` for `torch.bfloat16`; the torch name of a dtype unknown to safetensors."""
    return _WORDS.get(dtype_name(dtype), dtype_name(dtype))
