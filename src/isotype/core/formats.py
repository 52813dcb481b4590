"""Quantization formats of frozen weights, and the methods of stored ones that can be read.

bitsandbytes has the code books of all formats but mxfp4.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from isotype.core.names import EXPERT


@dataclass(frozen=True, slots=True)
class Format:
    """A quantization format.

    Attributes:
        name: as in `--quantization` and in a policy's layers.
        code: bitsandbytes' name of its code book (`quant_type`), also used in files.
        bits: per weight, without constants.
        block: weights that share a constant; 0 if the weights of a row do.
        whole: whether a whole model can be stored in it; else only layers of a mixed base.
        fitted: whether its constants are fitted to the layer's inputs (`isotype.model.fitted`).
        measured: whether `isotype quality` measures layers in it.
    """

    name: str
    code: str
    bits: int
    block: int = 0
    whole: bool = True
    fitted: bool = False
    measured: bool = True


# transformers' `BitsAndBytesConfig` has no block sizes and no constants: those formats are for layers of a
# mixed base.
_RECORDS = (
    Format("nf4", "nf4", 4, block=64),
    Format("nf4-32", "nf4", 4, block=32, whole=False, measured=False),
    Format("fp4", "fp4", 4, block=64),
    Format("nf4-fitted", "nf4", 4, block=64, whole=False, fitted=True),
    Format("nf4-32-fitted", "nf4", 4, block=32, whole=False, fitted=True),
    Format("int8", "int8", 8),
    Format("mxfp4", "mxfp4", 4, block=32, whole=False, measured=False),
)
FORMATS: Mapping[str, Format] = {each.name: each for each in _RECORDS}
"""All formats by name."""

QUANTIZATIONS: tuple[str, ...] = tuple(each.name for each in _RECORDS if each.whole)
"""Formats of a whole model: values of `--quantization`, besides `mixed`."""

FOUR_BITS: tuple[str, ...] = tuple(each.name for each in _RECORDS if each.whole and each.bits == 4)
"""Formats in blocks of 4-bit codes, which support double quantization and a `quant_storage` dtype."""

FITTED: tuple[str, ...] = tuple(each.name for each in _RECORDS if each.fitted)
"""Formats whose constants are fitted to the layer's inputs."""

MXFP4 = "mxfp4"
"""Format of gpt-oss' experts: OCP blocks of 32 E2M1 codes with a power-of-two exponent."""

MIXED = "mixed"
"""Quantization of a base with one format per layer, chosen by the damage to the model's output."""

ASKED: tuple[str, ...] = (*QUANTIZATIONS, MXFP4)
"""Formats in which a base can be stored, besides `mixed`."""


@dataclass(frozen=True, slots=True)
class Method:
    """A library or scheme of quantized checkpoints whose weights can be read.

    Attributes:
        name: `quant_method` in config.json.
        dequantized: whether loading dequantizes its weights; else they stay as they are stored.
        in_memory: whether a model in memory counts as dequantized, too.
    """

    name: str
    dequantized: bool = True
    in_memory: bool = False


_METHODS = (
    Method("bitsandbytes", dequantized=False),
    Method(MXFP4, in_memory=True),
    Method("fp8"),
    Method("compressed-tensors"),
    Method("modelopt"),
    Method("awq"),
)
METHODS: Mapping[str, Method] = {each.name: each for each in _METHODS}
"""Methods that can be read, by name."""

DEQUANTIZED: tuple[str, ...] = tuple(each.name for each in _METHODS if each.dequantized)
"""Methods whose weights loading dequantizes."""


def why_dense(shape: Iterable[int], storage: str) -> str | None:
    """Return why a stacked weight `[experts, d1, d2]` is not quantized; None if it is."""
    _, *matrix = shape
    block, values = FORMATS[storage].block, math.prod(matrix)
    if block and values % block:
        return f"{values:,} values of an expert are no whole blocks of {block}"
    return None


def why_kept(weights: Iterable[tuple[str, Iterable[int]]], storage: str) -> str:
    """Return why 3-D weights of a quantized model are in a float dtype; `storage` may name several formats."""
    form = storage if storage in FORMATS else "int8"
    reasons = {why_dense(shape, form) if EXPERT.search(name) else _OTHER for name, shape in weights}
    (reason,) = reasons if len(reasons) == 1 else (None,)
    if reason == _OTHER:
        return f"{storage} {_OTHER}"
    return reason or "the tool that quantized the model left them out (isotype.load quantizes experts)"


_OTHER = "reaches linear layers and experts only"


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
