"""RMSNorm in one function: https://arxiv.org/abs/1910.07467.

    y = x / sqrt(mean(x²) + eps) ⊙ (offset + w)

The norm is computed in float32 and rounded once. The backward needs only x and one number per row. With torch's
operators, autograd would save four float32 tensors as large as x.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from isotype.compat.torch import own_modules, own_parameters
from isotype.core.dtypes import HALVES
from isotype.lora.kernels import kernel_of
from isotype.lora.loops import elementwise
from isotype.model.boundary import boundary_of, sharing
from isotype.model.boundary_choice import output_of
from isotype.model.modes import is_close, result_of
from isotype.model.shard import is_sharded
from isotype.precision.devices.simulated import device_type_of


@dataclass(frozen=True)
class NormParts:
    """Settings of an RMSNorm. `offset` is added to the weight: 1 in Gemma (which stores the weight minus one), else 0."""

    eps: float
    offset: float


def norm_parts(module: Any) -> NormParts | None:
    """Return the settings of an RMSNorm. They are found by running the module on a few numbers. Return None for other
    modules.

    Also return None for an RMSNorm that returns float32 for 16-bit inputs, because `rms_norm` would return 16 bits.
    """
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    alone = list(own_parameters(module)) == ["weight"] and not own_modules(module)
    if not alone or weight is None or weight.dim() != 1 or not isinstance(eps, float):
        return None
    widens = weight.dtype in HALVES and output_of(module, weight.dtype) == "cast"
    if boundary_of(module) is not None or widens:
        return None
    generator = torch.Generator().manual_seed(0)
    if weight.is_meta or is_sharded(weight):  # random numbers replace the weight
        weight = torch.rand(weight.shape, dtype=weight.dtype, generator=generator)
        module = sharing(module, {"weight": nn.Parameter(weight, requires_grad=False)})
    x = torch.randn(3, weight.shape[0], generator=generator, dtype=torch.float32)
    output = result_of(module, x.to(weight.device))
    normed = x.double() * (x.double().square().mean(-1, keepdim=True) + eps).rsqrt()
    for offset in (0.0, 1.0):
        wanted = normed * (offset + weight.detach().cpu().double())
        # The tolerance allows a module to round the weight once more. No other formula comes as close.
        if is_close(output, wanted, rtol=1e-4, atol=1e-6):
            return NormParts(eps, offset)
    return None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, parts: NormParts) -> torch.Tensor:
    """Return the RMSNorm of `x` `[…, n]` with `weight` `[n]`, in the dtype to which both promote."""
    output: torch.Tensor = _RmsNorm.apply(x, weight, parts)  # type: ignore[no-untyped-call]
    return output


class _RmsNorm(torch.autograd.Function):
    # Float32 tensors are multiplied in place: for mixed dtypes torch makes copies on a CPU.
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, parts: NormParts) -> torch.Tensor:
        ctx.parts = parts
        kernel = _kernel(x, weight, parts)
        if kernel is not None:
            normed, inverse = kernel.rms_norm(x, weight, parts.eps, parts.offset)
            ctx.save_for_backward(x, weight, inverse)
            return cast("torch.Tensor", normed)
        y = x.to(torch.float32, copy=True)
        length = torch.linalg.vector_norm(y, dim=-1, keepdim=True)
        inverse = (length.square() / x.shape[-1] + parts.eps).rsqrt()
        ctx.save_for_backward(x, weight, inverse)
        y.mul_(inverse).mul_(_factor(weight, parts))
        return y.to(torch.promote_types(x.dtype, weight.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        x, weight, inverse = ctx.saved_tensors
        promoted = torch.promote_types(x.dtype, weight.dtype)
        kernel = None if ctx.needs_input_grad[1] or grad.dtype != promoted else _kernel(x, weight, ctx.parts)
        if kernel is not None:
            return kernel.rms_norm_backward(grad, x, weight, inverse, ctx.parts.offset), None, None
        normed = x.to(torch.float32, copy=True).mul_(inverse)
        inner = grad.to(torch.float32, copy=True)
        d_weight = None
        if ctx.needs_input_grad[1]:
            d_weight = (inner * normed).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)
        if not ctx.needs_input_grad[0]:
            return None, d_weight, None
        inner.mul_(_factor(weight, ctx.parts))
        along = torch.linalg.vecdot(inner, normed)[..., None] / x.shape[-1]
        d_x = inner.sub_(normed.mul_(along)).mul_(inverse)
        return d_x.to(x.dtype), d_weight, None


def _kernel(x: torch.Tensor, weight: torch.Tensor, parts: NormParts) -> Any | None:
    if weight.shape != x.shape[-1:]:
        return None
    if device_type_of(x) == "cpu":
        fits = torch.promote_types(x.dtype, weight.dtype) == x.dtype and elementwise.usable(x)
        return elementwise if fits else None
    plain = weight.dtype == x.dtype and not parts.offset
    return kernel_of("rms_norm" if plain else "rms_norm_promoted", x, weight)


def _factor(weight: torch.Tensor, parts: NormParts) -> torch.Tensor:
    factor = weight.float()
    return factor + parts.offset if parts.offset else factor


def is_norm(module: nn.Module) -> bool:
    return "rmsnorm" in type(module).__name__.lower()
