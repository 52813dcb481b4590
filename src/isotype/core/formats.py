"""Quantization formats that a frozen weight can be stored in, one record each (bitsandbytes computes them)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Format:
    """One format.

    Attributes:
        name: as `--quantization` and a policy's layers name it.
        bits: of one weight, without its constants.
        whole: whether a model can be stored in it as a whole; else only layers of a mixed base.
    """

    name: str
    bits: int
    whole: bool = True


FORMATS: Mapping[str, Format] = {
    each.name: each
    for each in (
        Format("nf4", 4),
        Format(
            "nf4-32", 4, whole=False
        ),  # transformers' `BitsAndBytesConfig` has no word for the size of blocks
        Format("fp4", 4),
        Format("int8", 8),
    )
}
"""Every format by its name."""

QUANTIZATIONS: tuple[str, ...] = tuple(name for name, each in FORMATS.items() if each.whole)
"""Formats of a whole model: what `--quantization` takes, beside `mixed`."""

FOUR_BITS: tuple[str, ...] = tuple(name for name, each in FORMATS.items() if each.bits == 4)
"""Formats in blocks of 4-bit codes: whose constants can be quantized, too, and whose codes can lie under another dtype."""
