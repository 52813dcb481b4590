"""Chooses the GPU kernel of each operation between matrix products, by trials on this machine.

A trial compares a candidate's forward and backward with float64 results, once per device and dtype. A candidate is not
used if it raises an error or differs too much. The reports of `isotype.fuse` and of a run name the reason.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from math import inf
from typing import Any, Literal

import torch
from torch.nn import functional

from isotype.compat import torch_norm
from isotype.compat.torch import PLAIN, FakeTensor, has_kernel
from isotype.core.dtypes import COMPUTE_DTYPES, dtype_name
from isotype.lora.gpu import elementwise
from isotype.precision.devices.simulated import device_type_of, is_native

Operation = Literal["rms_norm", "rms_norm_promoted", "gated", "rotary", "float32_product"]
"""`rms_norm_promoted`: weight and input have two dtypes, or the norm multiplies by 1 + weight as in Gemma."""

TABLE: Mapping[Operation, tuple[str, ...]] = {
    "rms_norm": ("aten", "triton"),
    "rms_norm_promoted": ("triton",),
    "gated": ("triton",),
    "rotary": ("triton",),
    "float32_product": ("addmm", "mm"),
}
"""The candidates of each operation, beginning with the first choice. If no candidate works, several torch operators compute the operation."""

DEVICES = ("cuda", "xpu")
"""Device types that have candidate kernels. ROCm devices have the type cuda."""


@dataclass(frozen=True)
class Products:
    """Products of 16-bit matrices, added to a float32 tensor by torch's GPU operators.

    cuBLAS multiplies bfloat16 from compute capability 8.0 on (see `_mm_dtype_out_cuda` in
    aten/src/ATen/native/cuda/Blas.cpp).

    Attributes:
        scales: True if torch's `addmm`, which also scales, has a float32 result.
    """

    scales: bool

    def write(
        self, out: torch.Tensor, left: torch.Tensor, right: torch.Tensor, factor: float, *, add: bool = False
    ) -> None:
        """Write factor · left @ right, a product of 16-bit matrices, into the float32 tensor `out`, or add it to `out`."""
        if self.scales and (add or factor != 1):
            torch.addmm(out, left, right, out_dtype=out.dtype, beta=int(add), alpha=factor, out=out)
        elif add:
            out.add_(torch.mm(left, right, out_dtype=out.dtype), alpha=factor)
        else:
            torch.mm(left, right, out_dtype=out.dtype, out=out)
            if factor != 1:
                out.mul_(factor)


# Name of a candidate -> (object with its functions, required torch operator, description of the operator).
_CANDIDATES: Mapping[str, tuple[Any, str, str]] = {
    "aten": (torch_norm, "aten::_fused_rms_norm", "fused RMSNorm"),
    "triton": (elementwise, "", ""),
    "addmm": (Products(scales=True), "aten::addmm.dtype_out", "product with a float32 result"),
    "mm": (Products(scales=False), "aten::mm.dtype_out", "product with a float32 result"),
}
# Errors relative to the norm: the arithmetic is float32, and a rounding to b bits has an error of at most 2^-b.
_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@dataclass(frozen=True)
class Kernel:
    """The kernel of an operation for a device and dtype.

    Attributes:
        name: the candidate's name in `TABLE`, or `torch` for several torch operators.
        functions: object whose functions call the kernel; None for torch's operators.
        reasons: why each earlier candidate in `TABLE` is not used.
    """

    name: str
    functions: Any
    reasons: tuple[str, ...] = ()


def kernel_of(operation: Operation, *tensors: torch.Tensor, detail: str = "") -> Any | None:
    """Return the functions of the GPU kernel for these tensors; None for torch's operators. `detail`: the activation."""
    first = tensors[0]
    if device_type_of(first) not in DEVICES or first.dtype not in COMPUTE_DTYPES:
        return None
    if torch.compiler.is_compiling() or any(x.device != first.device for x in tensors):
        return None
    if all(type(x) in PLAIN for x in tensors):
        return chosen(operation, first.device, first.dtype, detail).functions
    # Fake tensors have no values for a trial, and other subclasses have their own semantics.
    fakes = all(isinstance(x, FakeTensor) for x in tensors)
    if not fakes or (operation == "float32_product" and not is_native(first)):
        return None
    return foreseen(operation).functions


@cache
def chosen(operation: Operation, device: torch.device, dtype: torch.dtype, detail: str = "") -> Kernel:
    """Return the first kernel that passes its trial. Each process runs the trials once."""
    reasons: list[str] = []
    for name in TABLE[operation]:
        functions = _CANDIDATES[name][0]
        reason = _why_not(name, device.type) or _failure(operation, functions, device, dtype, detail)
        if reason is None:
            return Kernel(name, functions, tuple(reasons))
        reasons.append(f"{name}: {reason}")
    return Kernel("torch", None, tuple(reasons))


def foreseen(operation: Operation) -> Kernel:
    """Return the kernel that an operation is assumed to have on the GPU of another machine: Triton's kernel, or else the first choice."""
    name = next((name for name in TABLE[operation] if name == "triton"), TABLE[operation][0])
    return Kernel(name, _CANDIDATES[name][0])


def _why_not(name: str, kind: str) -> str | None:
    _, operator, description = _CANDIDATES[name]
    if name == "triton":
        return None if find_spec("triton") else "Triton is not installed"
    return None if has_kernel(operator, kind) else f"this torch has no {description} on {kind}"


def _failure(
    operation: Operation, functions: Any, device: torch.device, dtype: torch.dtype, detail: str
) -> str | None:
    try:
        with torch.no_grad(), torch.inference_mode(False):
            error = max(_TRIALS[operation](functions, device, dtype, detail))
    except Exception as failure:  # noqa: BLE001 - compilers, drivers and launches may raise anything
        return f"{type(failure).__name__}: {str(failure).partition(chr(10))[0]}"
    result = torch.float32 if operation == "float32_product" else dtype
    if error <= _TOLERANCES[result]:
        return None
    return f"results in {dtype_name(result)} differ from float64 results by {error:.0e}"


def _numbers(count: int, device: torch.device, dtype: torch.dtype, *shape: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(device, dtype) for _ in range(count)]


def _errors(results: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> list[float]:
    pairs = zip(results, exact, strict=True)
    errors = (float((x.cpu().double() - y).norm() / y.norm()) for x, y in pairs)
    return [error if error == error else inf for error in errors]


def _try_norm(
    functions: Any, device: torch.device, dtype: torch.dtype, _: str, *, offset: float = 0.0
) -> list[float]:
    x, grad = _numbers(2, device, dtype, 5, 200)
    (weight,) = _numbers(1, device, torch.float32 if offset else dtype, 200)
    y, inverse = functions.rms_norm(x, weight, 1e-5, offset)
    d_x = functions.rms_norm_backward(grad, x, weight, inverse, offset)
    x64, grad64, weight64 = (tensor.cpu().double() for tensor in (x, grad, weight))
    length = (x64.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    inner, normed = grad64 * (offset + weight64), x64 * length
    exact = length * (inner - normed * (inner * normed).mean(-1, keepdim=True))
    return _errors((y, d_x), (normed * (offset + weight64), exact))


def _try_gated(functions: Any, device: torch.device, dtype: torch.dtype, activation: str) -> list[float]:
    gate, up, grad = _numbers(3, device, dtype, 7, 333)
    grad64 = grad.cpu().double()  # the kernel overwrites grad
    results = functions.product(activation, gate, up), *functions.product_backward(activation, grad, gate, up)
    with torch.enable_grad():
        gate64, up64 = (tensor.cpu().double().requires_grad_() for tensor in (gate, up))
        exact = ACTIVATIONS[activation](gate64) * up64
        gradients = torch.autograd.grad(exact, (gate64, up64), grad64)
    return _errors(results, (exact.detach(), exact.detach(), *gradients))


def _try_rotary(functions: Any, device: torch.device, dtype: torch.dtype, _: str) -> list[float]:
    (x,) = _numbers(1, device, dtype, 2, 5, 3, 20)
    x = x.transpose(1, 2)  # the layout of attention
    cos, sin = _numbers(2, device, dtype, 2, 5, 20)
    results = [functions.rotate(x, cos, sin, back=back) for back in (False, True)]
    first, second = x.cpu().double().chunk(2, -1)
    (cos1, cos2), (sin1, sin2) = (tensor.cpu().double()[:, None].chunk(2, -1) for tensor in (cos, sin))
    forward = torch.cat((first * cos1 - second * sin1, second * cos2 + first * sin2), -1)
    backward = torch.cat((first * cos1 + second * sin2, second * cos2 - first * sin1), -1)
    return _errors(results, (forward, backward))


def _try_product(functions: Any, device: torch.device, dtype: torch.dtype, _: str) -> list[float]:
    # Rounding the result to the factors' 16 bits would give a hundred times the error of float32 sums.
    left, right = (matrix.t() for matrix in _numbers(2, device, dtype, 65, 33))
    exact = left.cpu().double() @ right.cpu().double().t()
    out = torch.empty(exact.shape, dtype=torch.float32, device=device)
    functions.write(out, left, right.t(), 0.3)
    written = out.clone()
    functions.write(out, left, right.t(), 0.3, add=True)
    return _errors((written, out), (0.3 * exact, 0.6 * exact))


ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x).square(),
    "sigmoid": torch.sigmoid,
}
_TRIALS: Mapping[Operation, Callable[[Any, torch.device, torch.dtype, str], list[float]]] = {
    "rms_norm": _try_norm,
    "rms_norm_promoted": partial(_try_norm, offset=1.0),
    "gated": _try_gated,
    "rotary": _try_rotary,
    "float32_product": _try_product,
}


_SWITCHES = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")


@contextmanager
def float32_reductions() -> Iterator[None]:
    """In the `with` block, keep cuBLAS from summing in lower precision, in every thread of this process."""
    matmul: Any = torch.backends.cuda.matmul
    before = {name: _allowed(matmul, name) for name in _SWITCHES}
    for name, allowed in before.items():
        setattr(matmul, name, (False, allowed[1]) if isinstance(allowed, tuple) else False)
    try:
        yield
    finally:
        for name, allowed in before.items():
            setattr(matmul, name, allowed)


def _allowed(matmul: Any, name: str) -> bool | tuple[bool, bool]:
    """Return whether torch allows reduced precision, and whether it allows split-k. torch 2.10 has no setting for split-k."""
    reduced = bool(getattr(matmul, name))
    try:
        return reduced, bool(getattr(matmul, f"{name}_split_k"))
    except AttributeError:
        return reduced
