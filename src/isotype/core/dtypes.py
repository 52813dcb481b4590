"""Conversion between dtype names and `torch.dtype`."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from isotype.core.arguments import usual_value
from isotype.core.errors import PrecisionError, Problem
from isotype.core.formats import QUANTIZATIONS, STORED

_ALIASES: dict[str, torch.dtype] = {
    **dict.fromkeys(("float32", "fp32", "float"), torch.float32),
    **dict.fromkeys(("bfloat16", "bf16"), torch.bfloat16),
    **dict.fromkeys(("float16", "fp16", "half"), torch.float16),
    **dict.fromkeys(("float64", "double"), torch.float64),
}

_WORDS = {name: word for word, name in STORED.items()}

EXACT_INTEGERS = {torch.bfloat16: 256, torch.float16: 2048}
"""Maps a dtype to the largest n for which the dtype represents all integers from 0 to n."""

HALVES = (torch.bfloat16, torch.float16)
COMPUTE_DTYPES: tuple[torch.dtype, ...] = (torch.float32, *HALVES)
FLOATS = frozenset({torch.float64, *COMPUTE_DTYPES, torch.float8_e4m3fn, torch.float8_e5m2})
"""Float dtypes that a step may have."""

GGUF_BLOCKS: tuple[str, ...] = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
"""Block types of the `gguf` library. A block has 32 codes and a float16 scale. Types with `_1` also have a float16 minimum."""

LLAMA_CPP_TYPES: tuple[str, ...] = (
    "q6_k", "q5_k_m", "q5_k_s", "q4_k_m", "q4_k_s", "q3_k_l", "q3_k_m", "q3_k_s", "q2_k",
)  # fmt: skip
"""GGUF types with several formats in one file, which only llama.cpp's `llama-quantize` writes."""

GGUF_TYPES: dict[str, torch.dtype] = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    **dict.fromkeys((*GGUF_BLOCKS, *LLAMA_CPP_TYPES), torch.float32),
}
"""Maps the GGUF type of an exported model to the dtype to which the weights are cast before the conversion."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return `"bfloat16"` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def dtypes_named(config: Mapping[str, Any]) -> list[str]:
    """Return the dtype names in config.json, for the model and for its text config, except `auto`."""
    holders = [holder for holder in (config, config.get("text_config")) if isinstance(holder, Mapping)]
    names = [holder.get("dtype") or holder.get("torch_dtype") for holder in holders]
    return [name.removeprefix("torch.") for name in names if isinstance(name, str) and name != "auto"]


def autocast_dtype(device: str) -> torch.dtype | None:
    """Return the dtype of autocast on a device type; None if autocast is off or the device type is meta."""
    # For the meta device, `torch.is_autocast_enabled` raises an error.
    enabled = device != "meta" and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if enabled else None


_INTEGERS = {
    torch.int64: r"\b[Ll]ong\b",
    torch.int32: r"(?<!long )\b[Ii]nt\b",
    torch.bool: r"\b[Bb]ool\b",
    torch.int16: "'Short'",
    torch.int8: "'Char'",
    torch.uint8: "'Byte'",
}
"""Patterns of dtype names in torch's errors about labels, indices, masks and products."""


def named_integer(message: str, dtypes: Iterable[torch.dtype] = tuple(_INTEGERS)) -> torch.dtype | None:
    """Return the first of `dtypes` that occurs in the message of a torch error; None if there is none."""
    return next((d for d in dtypes if d in _INTEGERS and re.search(_INTEGERS[d], message)), None)


class NoAutocast:
    """Context manager that turns autocast off. It is faster than `torch.autocast(device, enabled=False)`."""

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
    """Return the torch dtype of a name (`"bfloat16"`, `"bf16"`, `"torch.bfloat16"`), or a dtype unchanged.

    Raises:
        PrecisionError: no float dtype has this name.
    """
    if isinstance(value, torch.dtype):
        return value
    dtype = _ALIASES.get(str(value).removeprefix("torch.").lower())
    if dtype is None:
        expected = "one of float32 (fp32), bfloat16 (bf16), float16 (fp16) or auto"
        stored = ("--quantization", usual_value(str(value)))
        swap = (("--dtype", str(value)), stored) if stored[1] in QUANTIZATIONS else None
        fix = " ".join(stored) if swap else "use one of these names"
        raise PrecisionError("unknown dtype", [Problem(f"dtype {value!r}", expected, fix, swap)])
    return dtype


def from_safetensors_name(name: str) -> torch.dtype | None:
    """Return the torch dtype for a name in safetensors (`"BF16"`); None if torch has no such dtype."""
    torch_name = STORED.get(name)
    return None if torch_name is None else getattr(torch, torch_name)


def to_safetensors_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in safetensors (`"BF16"` for `torch.bfloat16`), or torch's name if there is none."""
    return _WORDS.get(dtype_name(dtype), dtype_name(dtype))
