"""Quantization formats of frozen weights, and quantization methods whose checkpoints isotype reads.

bitsandbytes has the code books of all formats except mxfp4.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from isotype.core.names import EXPERT


@dataclass(frozen=True, slots=True)
class Format:
    """A quantization format.

    Attributes:
        name: name in `--quantization` and in a policy's layers.
        code: bitsandbytes' name of the code book (`quant_type`), also in files.
        bits: bits per weight, without the quantization constants.
        block: number of weights that share a constant; 0 if all weights of a row share a constant.
        whole: True if a whole model can have this format, and False if only some layers of a model can have it.
        fitted: True if the constants are fitted to the inputs of the layer (`isotype.model.fitted`).
        measured: True if `isotype quality` measures layers in the format.
    """

    name: str
    code: str
    bits: int
    block: int = 0
    whole: bool = True
    fitted: bool = False
    measured: bool = True


# A whole model cannot have other block sizes or fitted constants, because transformers' `BitsAndBytesConfig` has no
# fields for them. Only single layers of a mixed base model can.
_RECORDS = (
    Format("nf4", "nf4", 4, block=64),
    Format("nf4-32", "nf4", 4, block=32, whole=False, measured=False),
    Format("fp4", "fp4", 4, block=64),
    Format("nf4-fitted", "nf4", 4, block=64, whole=False, fitted=True),
    Format("nf4-32-fitted", "nf4", 4, block=32, whole=False, fitted=True),
    Format("int8", "int8", 8),
    Format("mxfp4", "mxfp4", 4, block=32, whole=False, measured=False),
)
FORMATS: Mapping[str, Format] = {form.name: form for form in _RECORDS}

QUANTIZATIONS: tuple[str, ...] = tuple(form.name for form in _RECORDS if form.whole)
"""Formats in which bitsandbytes can store a whole model."""

FOUR_BITS: tuple[str, ...] = tuple(form.name for form in _RECORDS if form.whole and form.bits == 4)
"""4-bit formats that can have double quantization and a `quant_storage` dtype."""

FITTED: tuple[str, ...] = tuple(form.name for form in _RECORDS if form.fitted)
"""Formats whose constants are fitted to the layer's inputs."""

MXFP4 = "mxfp4"
"""Format of the experts in gpt-oss (an OCP standard). A block has 32 E2M1 codes and a power of two as the scale."""

MIXED = "mixed"
"""Quantization that chooses a format for each layer by the measured change of the model's output."""

REQUESTABLE: tuple[str, ...] = (*QUANTIZATIONS, MXFP4)
"""Values of `--quantization` except `mixed`."""

MEASURED = (*(name for name, form in FORMATS.items() if form.measured), "bfloat16", "float16")
"""Formats that `isotype quality` measures for a linear layer."""


@dataclass(frozen=True, slots=True)
class Method:
    """A quantization method (a library or scheme) whose checkpoints isotype reads.

    Attributes:
        name: `quant_method` in config.json.
        dequantized: True if loading dequantizes the weights.
        in_memory: True if weights can also be dequantized after the load.
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
METHODS: Mapping[str, Method] = {method.name: method for method in _METHODS}

DEQUANTIZED: tuple[str, ...] = tuple(method.name for method in _METHODS if method.dequantized)
"""Names of the methods whose weights are dequantized at loading."""


def why_dense(shape: Iterable[int], storage: str) -> str | None:
    """Return the reason why an expert weight [experts, d1, d2] cannot have a quantization format; None if it can."""
    _, *matrix = shape
    block, values = FORMATS[storage].block, math.prod(matrix)
    if block and values % block:
        return f"an expert has {values:,} values, which is not a multiple of the block size {block}"
    return None


def why_kept(weights: Iterable[tuple[str, Iterable[int]]], storage: str) -> str:
    """Return the reason why 3-D weights stay in a float dtype in a model that is quantized to `storage`."""
    form = storage if storage in FORMATS else "int8"
    other = f"{storage} quantizes only linear layers and experts"
    reasons = {why_dense(shape, form) if EXPERT.search(name) else other for name, shape in weights}
    return BY_TOOL if None in reasons else "; ".join(sorted(filter(None, reasons)))


BY_TOOL = "the tool that quantized the model did not quantize them (isotype.load quantizes experts)"


STORED: Mapping[str, str] = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "I64": "int64", "I32": "int32", "I16": "int16",
    "I8": "int8", "U8": "uint8", "U16": "uint16", "U32": "uint32", "U64": "uint64", "BOOL": "bool",
}  # fmt: skip
"""Maps dtype names in headers of safetensors and GGUF to names of torch dtypes."""


def is_float(stored: str) -> bool:
    """Return True if a dtype name in a header is the name of a float dtype."""
    return "float" in STORED.get(stored, "")
