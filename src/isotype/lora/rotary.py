"""Applies rotary positions to queries and keys by one function (https://arxiv.org/abs/2104.09864).

    (a, b) -> (a cos - b sin, b cos + a sin)

a and b are the halves of a head. The result is computed in float32 and rounded once. In transformers, a function
`apply_rotary_pos_emb` in the model's Python file applies rotary positions. A fused attention layer runs a copy of its
forward that calls isotype's function for rotary positions.
"""

from collections.abc import Callable
from functools import cache, wraps
from types import FunctionType
from typing import Any, cast

import torch
from torch.autograd.function import once_differentiable

from isotype.compat.swapped import globals_of, innermost, update_globals, with_global
from isotype.lora.kernels import kernel_of
from isotype.lora.loops import elementwise
from isotype.model.modes import is_close, result_of
from isotype.precision.devices.simulated import device_type_of

NAME = "apply_rotary_pos_emb"

_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 0.1}
"""Tolerated errors of rotated numbers up to about ten, if each product and sum is rounded."""
_first_seen: dict[FunctionType, FunctionType] = {}
"""Maps a forward to the `apply_rotary_pos_emb` that its Python module had when `rotates` was called."""


def rotates(forward: Any) -> bool:
    """Return True if `with_loops` can replace the function that applies rotary positions in the forward of a class."""
    rotate = _rotation_of(forward)
    if rotate is None:
        return False
    _first_seen[forward] = rotate
    return _copied(forward, rotate) is not None


def with_loops(forward: Any) -> Any:
    """Return a copy of `forward` that applies rotary positions by isotype's function; `forward` itself if `rotates` is False."""
    rotate = _rotation_of(forward)
    # For a model that was fused in another process, `rotates` has not been called.
    if rotate is None or _first_seen.setdefault(forward, rotate) is not rotate:
        return forward
    copied = _copied(forward, rotate)
    if copied is None:
        return forward
    update_globals(copied, forward, NAME)
    return copied


def _rotation_of(forward: Any) -> FunctionType | None:
    function = innermost(forward) if isinstance(forward, FunctionType) else None
    rotate = None if function is None else function.__globals__.get(NAME)
    return rotate if isinstance(rotate, FunctionType) else None


@cache
def _copied(forward: FunctionType, rotate: FunctionType) -> FunctionType | None:
    # DeepSeek's forward, which chooses between two rotations, is not supported.
    called = {name for name in globals_of(forward) or () if name.startswith("apply_rotary")}
    if called != {NAME} or not _is_rotation(rotate):
        return None
    return with_global(forward, NAME, _replacement(rotate))


def _is_rotation(rotate: Any) -> bool:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 3, 5, 8), (2, 1, 5, 8), (2, 5, 8), (2, 5, 8)
    numbers = [torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") for shape in shapes]
    for dtype, tolerance in _TOLERANCES.items():
        operands = [x.to(dtype) for x in numbers]
        q, k, cos, sin = (x.double() for x in operands)
        turned = result_of(rotate, *operands)
        if not isinstance(turned, tuple) or len(turned) != 2:
            return False
        for output, wanted in zip(turned, (_rotated(q, cos, sin), _rotated(k, cos, sin)), strict=True):
            if not is_close(output, wanted, rtol=tolerance, atol=tolerance) or output.dtype != dtype:
                return False
    return True


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]


def _replacement(rotate: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(rotate)
    def rotated(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 4 and (not kwargs or kwargs == {"unsqueeze_dim": 1}):
            kernel = _kernel_for(*args)
            if kernel is not None:
                q, k, cos, sin = args
                apply = _Rotate.apply
                return apply(q, cos, sin, kernel), apply(k, cos, sin, kernel)  # type: ignore[no-untyped-call]
        return rotate(*args, **kwargs)

    return rotated


def _kernel_for(q: Any, k: Any, cos: Any, sin: Any) -> Any | None:
    operands = (q, k, cos, sin)
    if not all(isinstance(x, torch.Tensor) for x in operands):
        return None
    if not (q.dim() == k.dim() == 4 and cos.dim() == 3 and q.dtype == k.dtype == cos.dtype == sin.dtype):
        return None
    differentiated = torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad)
    if cos.shape != sin.shape or cos.shape[-1] % 2 or differentiated:
        return None
    rows = cos.shape[0]
    if not all(x.shape[2:] == cos.shape[1:] and rows in (1, x.shape[0]) for x in (q, k)):
        return None
    if device_type_of(q) == "cpu":
        return elementwise if all(map(elementwise.supported, operands)) else None
    return kernel_of("rotary", *operands)


class _Rotate(torch.autograd.Function):
    # One tensor per call: otherwise a key that needs no gradient would get one if the query needs one.
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, kernel: Any) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(cos, sin)
        ctx.kernel = kernel
        return cast("torch.Tensor", kernel.rotate(x, cos, sin))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None, None]:
        cos, sin = ctx.saved_tensors
        d_x = None if grad is None else ctx.kernel.rotate(grad, cos, sin, back=True)
        return d_x, None, None, None
