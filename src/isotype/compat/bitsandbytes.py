"""bitsandbytes (0.50): access to private attributes of quantized weights, and a fix for its CPU kernels. Imported on use."""

import copy
import ctypes
import logging
import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

import torch

from isotype.compat.replaced import replaced
from isotype.compat.torch import give_class

QUANTIZED_LAYERS: Final = "bitsandbytes.nn.modules"
REPACK: Final = "_convert_weight_packed_for_cpu"
"""Function in `bitsandbytes.nn.modules` that repacks 4-bit weights for CPU kernels."""


def hide_missing_kernel() -> None:
    """Hide bitsandbytes' warning, at its import, that the package kernels is missing. isotype computes without it."""
    logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(
        lambda record: "gemm_4bit_forward" not in record.getMessage()
    )


def quantized_on(parameter: Any, device: str) -> Any:
    """Return a `Params4bit` or `Int8Params`, quantized on `device`. Weights on the meta device have no values."""
    from bitsandbytes import functional

    # bitsandbytes caches its map of 8-bit codes on the device of the first use. A map on the meta device has no values.
    if "dynamic" not in functional.name2qmap:
        with torch.device("cpu"):
            functional.quantize_blockwise(torch.zeros(1), blocksize=256)
    return parameter._quantize(device)


def nothing_repacked() -> AbstractContextManager[None]:
    """Return a context for simulating another device: bitsandbytes does not repack 4-bit weights for this CPU."""
    modules = sys.modules.get(QUANTIZED_LAYERS)
    return replaced(modules, REPACK, lambda weight, state: (weight, state))


def plain_casts() -> AbstractContextManager[None]:
    """Return a context for fake tensors, which cannot become a `Params4bit`: `weight.to(dtype)` returns a plain tensor."""
    modules = sys.modules.get(QUANTIZED_LAYERS)
    return replaced(getattr(modules, "Params4bit", None), "to", torch.Tensor.to)


# ------------------------------------------------------------- 4-bit weights whose rows end inside a block
# bitsandbytes quantizes blocks of the flat weight. Its AVX512 kernel (0.50.2, `dequantizeBlockwise4bitCpu` in
# csrc/cpu_ops.cpp; other kernels: https://github.com/bitsandbytes-foundation/bitsandbytes/pull/2072) reads constants as
# if each row began a new block. If a row is no whole number of blocks, like the 4,304 columns of SigLIP in Gemma 3,
# PaliGemma and Idefics, nearly every weight is silently multiplied by another block's constant. isotype passes the same
# bytes as rows of one block. tests/compat/test_bitsandbytes.py fails when this fix can go.

_KERNEL = re.compile(r"cdequantize_blockwise_cpu_(nf4|fp4)_(fp32|bf16|fp16)")


def dequantize_4bit(weight: torch.Tensor, state: Any) -> torch.Tensor:
    """Dequantize a weight by `bitsandbytes.functional.dequantize_4bit`, with correct results for all shapes."""
    from bitsandbytes import functional

    dequantize_by_blocks()
    weights: torch.Tensor = functional.dequantize_4bit(weight, state)
    # bitsandbytes takes packed bytes of shape `[1, n]` as those of a transposed weight, so `[1, 1]`, too.
    return weights.t() if weight.shape == (1, 1) else weights


def with_float32_constants(state: Any) -> Any:
    """Return a copy of a double-quantized state whose block constants are dequantized to float32."""
    from bitsandbytes import functional

    single = copy.copy(state)
    constants = functional.dequantize_blockwise(state.absmax, state.state2) + state.offset
    single.absmax, single.nested, single.state2, single.offset = constants.float(), False, None, None
    return single


def multiplies(state: Any) -> bool:
    """Return whether `gemm_4bit` can multiply by a packed weight that has the quantization state `state`."""
    return state.shape[1] % state.blocksize == 0 and (not state.nested or state.state2.blocksize == 256)


def product_4bit(
    x: torch.Tensor, weight: torch.Tensor, state: Any, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return x Wᵀ + b, `[rows, out]` in x's dtype, by `bitsandbytes::gemm_4bit`. No gradient flows through it.

    Args:
        x: `[rows, in]` in float32, bfloat16 or float16.
        state: the quantization state of W; `multiplies(state)` must be True.
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
    """Fix bitsandbytes' CPU kernels for weights whose rows end inside a block. A second call has no effect."""
    from bitsandbytes.backends.cpu import ops

    if not isinstance(ops.lib, _ByBlocks):
        ops.lib = _ByBlocks(ops.lib)


class _ByBlocks:
    """Wraps bitsandbytes' native library, and passes each block as one row to its 4-bit CPU kernels."""

    def __init__(self, library: Any) -> None:
        self.library = library

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.library, name)
        return _by_blocks(attribute) if _KERNEL.fullmatch(name) else attribute


def _by_blocks(kernel: Callable[..., object]) -> Callable[..., None]:
    def run(codes: Any, absmax: Any, out: Any, blocksize: Any, rows: Any, columns: Any) -> None:
        size, total = blocksize.value, rows.value * columns.value
        if columns.value % size:
            # A kernel's threads share the rows. If the last block is incomplete, all codes are one row.
            columns = ctypes.c_longlong(total if total % size else size)
            rows = ctypes.c_longlong(total // columns.value)
        kernel(codes, absmax, out, blocksize, rows, columns)

    return run


def has_plain_codes(layer: Any) -> bool:
    """Return whether a 4-bit layer's weight has packed codes, but the quantization state is only on the layer."""
    packed = layer.weight.dim() == 2 and layer.weight.shape[1] == 1
    return (
        packed
        and getattr(layer, "quant_state", None) is not None
        and not hasattr(layer.weight, "quant_state")
    )


def give_quantized_class(layer: Any) -> None:
    """Change the class and attributes of a quantized layer's fake weight to those of bitsandbytes' weights."""
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
        quant_state=state,
        quant_type=state.quant_type,
        blocksize=state.blocksize,
        compress_statistics=state.nested,
        quant_storage=weight.dtype,
        bnb_quantized=True,
        module=layer,
    )
