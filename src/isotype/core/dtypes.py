"""Names of dtypes: the one place where text becomes a `torch.dtype` and back."""

from __future__ import annotations

import torch

from isotype.core.errors import PrecisionError
from isotype.core.stored_dtypes import STORED

_ALIASES: dict[str, torch.dtype] = {
    **dict.fromkeys(("float32", "fp32", "float"), torch.float32),
    **dict.fromkeys(("bfloat16", "bf16"), torch.bfloat16),
    **dict.fromkeys(("float16", "fp16", "half"), torch.float16),
    **dict.fromkeys(("float64", "double"), torch.float64),
}

_WORDS = {name: word for word, name in STORED.items()}

COMPUTE_DTYPES: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes a matmul of a training step may run in."""

GGUF_BLOCKS: tuple[str, ...] = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
"""Types of GGUF in blocks of 32 codes and a float16 scale (`_1`: and a float16 minimum), which the `gguf` library can write."""

LLAMA_CPP_TYPES: tuple[str, ...] = (
    "q6_k", "q5_k_m", "q5_k_s", "q4_k_m", "q4_k_s", "q3_k_l", "q3_k_m", "q3_k_s", "q2_k",
)  # fmt: skip
"""Mixtures of types of GGUF that llama.cpp's own `llama-quantize` alone writes."""

GGUF_TYPES: dict[str, torch.dtype] = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    **dict.fromkeys((*GGUF_BLOCKS, *LLAMA_CPP_TYPES), torch.float32),
}
"""Types of GGUF that a merged model is exported in, and the dtype that its weights are rounded to before: blocks are rounded
from float32 itself."""


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> `"bfloat16"`."""
    return str(dtype).removeprefix("torch.")


def autocast_dtype(device: str) -> torch.dtype | None:
    """The dtype that autocast casts to on a device type just now; None where it is off, and on the meta device, where nothing runs."""
    if device == "meta":  # torch refuses to be asked
        return None
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


class NoAutocast:
    """Autocast off on a device type within a `with` block: `torch.autocast(device, enabled=False)` for what is called often."""

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
    """A torch dtype from itself or from its name (`"bfloat16"`, `"bf16"`, `"torch.bfloat16"`).

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
    """`"BF16"` -> `torch.bfloat16`; None for a format torch has no dtype for."""
    known = STORED.get(name)
    return None if known is None else getattr(torch, known)


def to_safetensors_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> `"BF16"`; the name itself of a dtype that safetensors has no word for."""
    return _WORDS.get(dtype_name(dtype), dtype_name(dtype))
