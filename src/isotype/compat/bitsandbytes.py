"""bitsandbytes (0.50): what its quantized weights do without a public name, and what is wrong in its kernels. It is imported when it is used."""

from __future__ import annotations

import copy
import ctypes
import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

import torch

from isotype.compat.replaced import replaced
from isotype.compat.torch import give_class

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


def nothing_repacked() -> AbstractContextManager[None]:
    """Within it bitsandbytes repacks no 4-bit weight, whatever this CPU has: IST407 says what happens on the device."""
    modules = sys.modules.get("bitsandbytes.nn.modules")
    return replaced(modules, REPACK, lambda weight, state: (weight, state))


# ----------------------------------------------------------------- 4-bit weights whose rows end inside of a block
# bitsandbytes quantizes blocks of the flattened weight. Its AVX512 kernel (0.50.2, `dequantizeBlockwise4bitCpu` in
# csrc/cpu_ops.cpp; https://github.com/bitsandbytes-foundation/bitsandbytes/pull/2072 says how the others count) takes a row's
# constants as if every row began a block. Where rows have another length, such as the 4,304 columns of SigLIP in Gemma 3, PaliGemma
# and Idefics, nearly every weight comes out with another's constant, without a word. The kernel is given the same bytes as
# rows of one block each. tests/compat/test_bitsandbytes.py says when this can go.

_KERNEL = re.compile(r"cdequantize_blockwise_cpu_(nf4|fp4)_(fp32|bf16|fp16)")


def dequantize_4bit(weight: torch.Tensor, state: Any, out: torch.Tensor | None = None) -> torch.Tensor:
    """`bitsandbytes.functional.dequantize_4bit`, right for every shape."""
    from bitsandbytes import functional

    dequantize_by_blocks()
    weights: torch.Tensor = functional.dequantize_4bit(weight, state, out=out)
    return weights


def with_float32_constants(state: Any) -> Any:
    """A double-quantized state as one whose blocks' constants are in float32: the same values, four bytes a block."""
    from bitsandbytes import functional

    single = copy.copy(state)
    constants = functional.dequantize_blockwise(state.absmax, state.state2) + state.offset
    single.absmax, single.nested, single.state2, single.offset = constants.float(), False, None, None
    return single


def multiplies(state: Any) -> bool:
    """Whether bitsandbytes' `gemm_4bit` has a kernel for weights of a state, and would not warn and dequantize them."""
    return state.shape[1] % state.blocksize == 0 and (not state.nested or state.state2.blocksize == 256)


def product_4bit(
    x: torch.Tensor, weight: torch.Tensor, state: Any, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """X Wᵀ + b by `bitsandbytes::gemm_4bit`, `[rows, out]` in x's dtype; no derivatives.

    Args:
        x: `[rows, in]` in float32, bfloat16 or float16.
        weight: the packed codes.
        state: of a weight that `multiplies`.
        bias: `[out]` in x's dtype.
    """
    nested: dict[str, torch.Tensor] = {}
    constants = state.absmax
    if state.nested:
        constants = state.state2.absmax
        nested = {
            "absmax_8bit": state.absmax,
            "absmax_code": state.state2.code,
            "absmax_offset": state.offset,
        }
    product: torch.Tensor = torch.ops.bitsandbytes.gemm_4bit.default(
        x, weight.view(-1, 1), state.shape, constants, state.blocksize, state.quant_type, bias=bias, **nested
    )
    return product


def dequantize_by_blocks() -> None:
    """Give bitsandbytes' CPU kernels rows of one block from now on, in this process; a second call changes nothing."""
    from bitsandbytes.backends.cpu import ops

    if not isinstance(ops.lib, _ByBlocks):
        ops.lib = _ByBlocks(ops.lib)


class _ByBlocks:
    """bitsandbytes' native library, with other rows for its 4-bit kernels."""

    def __init__(self, library: Any) -> None:
        self.library = library

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.library, name)
        return _by_blocks(attribute) if _KERNEL.fullmatch(name) else attribute


def _by_blocks(kernel: Callable[..., object]) -> Callable[..., None]:
    def run(codes: Any, absmax: Any, out: Any, blocksize: Any, rows: Any, columns: Any) -> None:
        size, total = blocksize.value, rows.value * columns.value
        if columns.value % size:
            # A kernel's threads share rows; a last block that is not full ends the only row there is.
            columns = ctypes.c_longlong(total if total % size else size)
            rows = ctypes.c_longlong(total // columns.value)
        kernel(codes, absmax, out, blocksize, rows, columns)

    return run


def give_quantized_class(layer: Any) -> None:
    """Give a quantized layer's codes, fakes of plain parameters, bitsandbytes' class and what it has beside them."""
    from bitsandbytes.nn import Int8Params, Linear8bitLt, Params4bit

    weight = layer.weight
    if isinstance(layer, Linear8bitLt):
        layer.state.CB = weight.detach()
        give_class(weight, Int8Params)
        vars(weight).update(CB=None, SCB=None, has_fp16_weights=False)
        return
    state = layer.quant_state
    give_class(weight, Params4bit)
    vars(weight).update(
        quant_state=state, quant_type=state.quant_type, blocksize=state.blocksize, module=layer
    )
    vars(weight).update(quant_storage=weight.dtype, compress_statistics=state.nested, bnb_quantized=True)
