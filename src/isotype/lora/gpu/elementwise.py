"""Torch operators that call the Triton kernels of gated products, RMSNorms and rotary embeddings.

The operators also accept fake tensors. `isotype.lora.loops.elementwise` has the same functions for a CPU.
"""

from contextlib import nullcontext
from typing import Any

import torch

from isotype.core.operators import operator

_NAMES = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid")
ACTIVATIONS = {name: number for number, name in enumerate(_NAMES)}
"""Maps a name in `isotype.lora.gates.GATES` to the number by which the kernels know this activation."""

_KEYS = ("CUDA", "XPU")  # ROCm devices have the dispatch key CUDA
_BLOCK = 1024  # elements per program


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the RMSNorm of x `[…, n]` in the dtype of `x * weight`, and the float32 inverse RMS of each row."""
    return _rms_norm(x.contiguous(), weight.contiguous(), eps, offset)


def rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, inverse: torch.Tensor, offset: float = 0.0
) -> torch.Tensor:
    """Return the gradient of x, in x's dtype. The argument `inverse` is the inverse RMS that `rms_norm` returned."""
    return _rms_norm_backward(grad.contiguous(), x.contiguous(), weight.contiguous(), inverse, offset)


def product(activation: str, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return `act(gate) * up` of two tensors of one shape and dtype."""
    return _gated(gate.contiguous(), up.contiguous(), ACTIVATIONS[activation])


def product_backward(
    activation: str, grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (the product, gradients of `gate` and `up`). `grad` is the gradient of the product, and is overwritten."""
    written = grad.contiguous()
    d_gate, d_up = _gated_backward(written, gate.contiguous(), up.contiguous(), ACTIVATIONS[activation])
    return written, d_gate, d_up


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, back: bool = False) -> torch.Tensor:
    """Return the same result as `isotype.lora.loops.elementwise.rotate`."""
    return _rotate(x if x.stride(-1) == 1 else x.contiguous(), cos.contiguous(), sin.contiguous(), back)


def _launch(name: str, x: torch.Tensor, programs: int, *arguments: Any, **constants: Any) -> None:
    from isotype.lora.gpu import kernels

    if not x.numel():
        return
    # Triton launches on the current device. With `TRITON_INTERPRET=1` kernels run on a CPU, which has no index.
    index = x.device.index
    with nullcontext() if index is None else torch.accelerator.device_index(index):
        getattr(kernels, name)[(programs,)](*arguments, **constants)


def _power_of_two(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()


def _warps(block: int) -> int:
    """Return the number of warps for a program of `block` elements. Each thread has 16 elements in its registers."""
    return min(16, max(1, block // 512))  # at most 1024 threads, with AMD's warps of 64 threads, too


def _rms_norm_shapes(
    x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float
) -> tuple[torch.Tensor, torch.Tensor]:
    y = torch.empty_like(x, dtype=torch.promote_types(x.dtype, weight.dtype))
    return y, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


@operator(
    "gpu_rms_norm(Tensor x, Tensor weight, float eps, float offset) -> (Tensor, Tensor)",
    _KEYS,
    _rms_norm_shapes,
)
def _rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float
) -> tuple[torch.Tensor, torch.Tensor]:
    y, inverse = _rms_norm_shapes(x, weight, eps, offset)
    width, block = x.shape[-1], _power_of_two(x.shape[-1])
    arguments = x, weight, y, inverse, width, eps, offset
    _launch("rms_norm", x, inverse.numel(), *arguments, block=block, num_warps=_warps(block))
    return y, inverse


@operator(
    "gpu_rms_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor inverse, float offset) -> Tensor",
    _KEYS,
    lambda grad, x, *_: torch.empty_like(x),
)
def _rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, inverse: torch.Tensor, offset: float
) -> torch.Tensor:
    d_x = torch.empty_like(x)
    width, block = x.shape[-1], _power_of_two(x.shape[-1])
    arguments = grad, x, weight, inverse, d_x, width, offset
    _launch("rms_norm_backward", x, inverse.numel(), *arguments, block=block, num_warps=_warps(block))
    return d_x


@operator(
    "gpu_gated(Tensor gate, Tensor up, int activation) -> Tensor",
    _KEYS,
    lambda gate, *_: torch.empty_like(gate),
)
def _gated(gate: torch.Tensor, up: torch.Tensor, activation: int) -> torch.Tensor:
    y, count = torch.empty_like(gate), gate.numel()
    _launch("gated", gate, -(-count // _BLOCK), gate, up, y, count, activation=activation, block=_BLOCK)
    return y


@operator(
    "gpu_gated_backward(Tensor(a!) grad, Tensor gate, Tensor up, int activation) -> (Tensor, Tensor)",
    _KEYS,
    lambda grad, gate, up, _: (torch.empty_like(gate), torch.empty_like(up)),
)
def _gated_backward(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: int
) -> tuple[torch.Tensor, torch.Tensor]:
    d_gate, d_up, count = torch.empty_like(gate), torch.empty_like(up), gate.numel()
    arguments = grad, gate, up, d_gate, d_up, count
    _launch("gated_backward", gate, -(-count // _BLOCK), *arguments, activation=activation, block=_BLOCK)
    return d_gate, d_up


def _rotated_shape(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, back: bool) -> torch.Tensor:
    out = torch.empty_like(x)
    return out if out.stride(-1) == 1 else torch.empty_like(x, memory_format=torch.contiguous_format)


@operator("gpu_rotate(Tensor x, Tensor cos, Tensor sin, bool back) -> Tensor", _KEYS, _rotated_shape)
def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, back: bool) -> torch.Tensor:
    out = _rotated_shape(x, cos, sin, back)
    batch, heads, tokens, dim = x.shape
    table_batch = 0 if len(cos) == 1 else tokens * dim
    strides = *x.stride()[:3], *out.stride()[:3], table_batch
    blocks = {"heads_block": _power_of_two(heads), "pairs_block": _power_of_two(dim // 2)}
    warps = _warps(2 * blocks["heads_block"] * blocks["pairs_block"])
    arguments = x, cos, sin, out, tokens, heads, dim // 2, *strides
    _launch("rotary", x, batch * tokens, *arguments, **blocks, back=back, num_warps=warps)
    return out
