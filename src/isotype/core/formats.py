"""Quantization formats that a frozen weight can be stored in, one record each. bitsandbytes has the code books of all but mxfp4."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Format:
    """One format.

    Attributes:
        name: as `--quantization` and a policy's layers name it.
        code: bitsandbytes' name of its code book (`quant_type`), which files name it by as well.
        bits: of one weight, without its constants.
        block: weights that share a constant; 0 where those of a row do.
        whole: whether a model can be stored in it as a whole; else only layers of a mixed base can.
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


# transformers' `BitsAndBytesConfig` has no word for the size of blocks, nor for constants: those are for layers of a mixed base.
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
"""Every format by its name."""

QUANTIZATIONS: tuple[str, ...] = tuple(each.name for each in _RECORDS if each.whole)
"""Formats of a whole model: what `--quantization` takes, beside `mixed`."""

FOUR_BITS: tuple[str, ...] = tuple(each.name for each in _RECORDS if each.whole and each.bits == 4)
"""Those in blocks of 4-bit codes: their constants can be quantized, too, and their codes can lie under another dtype."""

FITTED: tuple[str, ...] = tuple(each.name for each in _RECORDS if each.fitted)
"""Formats whose constants are fitted to the layer's inputs."""

MXFP4 = "mxfp4"
"""The format of experts in a checkpoint that stores them in it (gpt-oss): OCP's blocks of 32 E2M1 codes with an exponent of two."""

MIXED = "mixed"
"""The quantization of a base each of whose layers has a format of its own, by what it does to the model's output."""

ASKED: tuple[str, ...] = (*QUANTIZATIONS, MXFP4)
"""The formats that a base can be stored in, beside `mixed`."""
