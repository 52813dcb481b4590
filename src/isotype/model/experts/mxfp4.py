"""Dequantizes MXFP4 weights of OCP's standard (gpt-oss's experts). 32 codes along the inputs share an exponent.

A code is an E2M1 number: a sign, two exponent bits and a mantissa bit (OCP MX specification 1.0, 5.3.3). A byte
contains two codes. The lower half is the first code.
"""

import torch

from isotype.core.operators import operator

_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float32)
E2M1 = torch.cat([_E2M1, -_E2M1])
"""The value of each code, float32 `[16]`."""

_PIECE = 1 << 19
"""Number of values that a CPU dequantizes at once: small enough for the caches, and large enough for all threads."""
_GPU_PIECE = 1 << 24


def _blank(
    blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, transposed: bool = False
) -> torch.Tensor:
    experts, outputs, groups, width = blocks.shape
    inputs = groups * width * 2
    shape = (experts, inputs, outputs) if transposed else (experts, outputs, inputs)
    return torch.empty(shape, dtype=dtype, device=blocks.device)


@operator(
    "unpack_mxfp4(Tensor blocks, Tensor scales, ScalarType dtype, bool transposed=False) -> Tensor",
    keys=("CompositeExplicitAutograd",),
    fake=_blank,
)
def unpack(
    blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, transposed: bool = False
) -> torch.Tensor:
    """Return the dense weights as a new tensor `[experts, out, in]`; `[experts, in, out]` if `transposed`.

    Args:
        blocks: uint8 `[experts, out, in / 32, 16]`.
        scales: uint8 `[experts, out, in / 32]`: exponents with a bias of 127 (E8M0).
    """
    experts, outputs, groups, width = blocks.shape
    inputs = groups * width * 2
    values = _blank(blocks, scales, dtype, transposed)
    pairs = torch.stack([E2M1.repeat(16), E2M1.repeat_interleave(16)], dim=1).to(torch.bfloat16)
    words = pairs.view(torch.int32).view(256).to(blocks.device)  # both values of a byte in one int32
    step = max(1, (_PIECE if blocks.device.type == "cpu" else _GPU_PIECE) // max(1, inputs))
    for expert in range(experts):
        target = values[expert].T if transposed else values[expert]
        for first in range(0, outputs, step):
            codes = blocks[expert, first : first + step].reshape(-1).to(torch.int32)
            piece = words.index_select(0, codes).view(torch.bfloat16).view(-1, groups, width * 2)
            piece *= powers(scales[expert, first : first + step]).to(torch.bfloat16)[..., None]
            target[first : first + step] = piece.view(-1, inputs)
    return values


def powers(exponents: torch.Tensor) -> torch.Tensor:
    """Return 2 to the power of each E8M0 exponent, in float32. `exponents` is a uint8 tensor of any shape."""
    # float32 has the same exponent bias; 2 ** -127 is a subnormal number.
    places = exponents.to(torch.int32)
    return torch.where(places == 0, 1 << 22, places << 23).to(torch.int32).view(torch.float32)
