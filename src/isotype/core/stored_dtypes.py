"""Dtype names in weight files, without importing torch, which takes longer than reading a thousand headers."""

from __future__ import annotations

from collections.abc import Mapping

STORED: Mapping[str, str] = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "BOOL": "bool",
}
"""Dtype name in safetensors and GGUF headers -> name of torch's dtype."""


def is_float(stored: str) -> bool:
    """Return whether a stored name is that of a float dtype of torch."""
    return "float" in STORED.get(stored, "")
