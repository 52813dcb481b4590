"""Computes gated products, RMSNorms and rotations by compiled loops (elementwise.cpp), in float32, and rounds results once."""

import ctypes
from functools import cache, partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from isotype.compat.torch import PLAIN, needs_operators
from isotype.core.operators import operator
from isotype.lora.loops.loading import NAMES, loops_of

_loops = cache(partial(loops_of, Path(__file__).with_suffix(".cpp"), Path(__file__).with_name("vectors.h")))

_likeness = attrgetter("device", "dtype", "shape")


class _Heads(ctypes.Structure):
    """Address and strides of a tensor `[batch, heads, tokens, dim]`, without the last stride, which is always 1."""

    _fields_ = [("at", ctypes.c_void_p), *((n, ctypes.c_int64) for n in ("batch", "head", "token"))]


def compiled() -> bool:
    return _loops().reason is None


def supported(*tensors: Any) -> bool:
    """Return True if the compiled loops support these tensors: plain CPU tensors that share a shape and a dtype."""
    if not PLAIN.issuperset(map(type, tensors)):
        return False
    first = tensors[0]
    return (
        first.is_cpu
        and first.dtype in NAMES
        and len({*map(_likeness, tensors)}) == 1
        and not needs_operators()
        and _loops().reason is None
    )


def usable(*tensors: torch.Tensor) -> bool:
    """Return True if the compiled loops can compute with these tensors. The loops have no backward for autograd."""
    return supported(*tensors) and not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors))


def silu_product_backward(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (the product, gradients of `gate` and `up`). `grad` is the gradient of the product, and is overwritten."""
    product = grad.contiguous()
    d_gate, d_up = _silu_product_backward(product, gate.contiguous(), up.contiguous())
    return product, d_gate, d_up


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (x · inverse · (offset + weight), inverse = 1 / sqrt(mean(x²) + eps)) for x `[…, n]` and weight `[n]`."""
    return _rms_norm(x.contiguous(), _factor(weight, offset), eps)


def rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, inverse: torch.Tensor, offset: float = 0.0
) -> torch.Tensor:
    """Return the gradient of x. The argument `inverse` is the second result of `rms_norm`."""
    return _rms_norm_backward(
        grad.contiguous(), x.contiguous(), _factor(weight, offset), inverse.contiguous()
    )


def _factor(weight: torch.Tensor, offset: float) -> torch.Tensor:
    factor = weight.float() + offset if offset else weight.float()
    return factor.contiguous()


@operator("silu_product(Tensor gate, Tensor up) -> Tensor")
def silu_product(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return `silu(gate) * up` of two tensors of one shape."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    _loops().run("silu_product", gate.dtype, gate.numel(), torch.get_num_threads(), gate, up, out)
    return out


@operator("silu_product_backward(Tensor(a!) grad, Tensor gate, Tensor up) -> (Tensor, Tensor)")
def _silu_product_backward(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    d_gate, d_up = torch.empty_like(gate), torch.empty_like(gate)
    threads = torch.get_num_threads()
    _loops().run("silu_product_backward", gate.dtype, gate.numel(), threads, grad, gate, up, d_gate, d_up)
    return d_gate, d_up


@operator("rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)")
def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    y, inverse = torch.empty_like(x), torch.empty(*x.shape[:-1], 1, dtype=torch.float32)
    sizes = inverse.numel(), x.shape[-1], torch.get_num_threads()
    _loops().run("rms_norm", x.dtype, *sizes, float(eps), x, weight, y, inverse)
    return y, inverse


@operator("rms_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor inverse) -> Tensor")
def _rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, inverse: torch.Tensor
) -> torch.Tensor:
    d_x = torch.empty_like(x)
    sizes = inverse.numel(), x.shape[-1], torch.get_num_threads()
    _loops().run("rms_norm_backward", x.dtype, *sizes, grad, x, weight, inverse, d_x)
    return d_x


@operator("rotate(Tensor x, Tensor cos, Tensor sin, bool back=False) -> Tensor")
def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, back: bool = False) -> torch.Tensor:
    """Apply rotary positions to x `[batch, heads, tokens, dim]`. The result has x's memory layout.

    The halves (a, b) of a head become (a cos - b sin, b cos + a sin); `cos` and `sin` are `[batch or 1, tokens, dim]` in
    x's dtype. If `back` is True, `x` is a gradient of the result of `rotate`, and is rotated back.
    """
    out, cos, sin = torch.empty_like(x), cos.contiguous(), sin.contiguous()
    if x.stride(-1) != 1 or out.stride(-1) != 1:
        x, out = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    batch, heads, tokens, dim = x.shape
    apart = 0 if len(cos) == 1 else tokens * dim
    places = [_Heads(tensor.data_ptr(), *tensor.stride()[:3]) for tensor in (x, out)]
    sources, results = map(ctypes.byref, places)
    sizes = batch, heads, tokens, dim, apart, int(back), torch.get_num_threads()
    _loops().run("rotate", x.dtype, *sizes, sources, cos, sin, results)
    return out
