"""bitsandbytes (0.50): what its quantized weights do without a public name. It is not imported."""

from __future__ import annotations

from typing import Any, Final

import torch

REPACK: Final = "_convert_weight_packed_for_cpu"
"""The function of `bitsandbytes.nn.modules` that repacks a 4-bit weight for a CPU's own kernels."""


def quantized_on(parameter: Any, device: str) -> Any:
    """A dense `Params4bit` or `Int8Params` with the shapes of its quantized form, on a device; "meta" computes nothing."""
    _make_dynamic_map()
    return parameter._quantize(device)


def _make_dynamic_map() -> None:
    """Have the library make its map of 8-bit codes on the CPU.

    It keeps the first one that it makes, on whatever device: one on the meta device, of a weightless model whose constants are
    quantized, would be that of every model from then on.
    """
    from bitsandbytes import functional

    if "dynamic" not in functional.name2qmap:
        with torch.device("cpu"):
            functional.quantize_blockwise(torch.zeros(1), blocksize=256)
