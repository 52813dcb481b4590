"""bitsandbytes (0.50): what its quantized weights do without a public name. It is not imported."""

from __future__ import annotations

from typing import Any, Final

REPACK: Final = "_convert_weight_packed_for_cpu"
"""The function of `bitsandbytes.nn.modules` that repacks a 4-bit weight for a CPU's own kernels."""


def quantized_on(parameter: Any, device: str) -> Any:
    """A dense `Params4bit` or `Int8Params` with the shapes of its quantized form, on a device; "meta" computes nothing."""
    return parameter._quantize(device)
