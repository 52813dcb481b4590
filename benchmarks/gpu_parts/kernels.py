"""Every kernel that `isotype.lora.kernels` may take, forward and backward, against float64; and its time beside torch's own operators.

Odd shapes for the numbers, those of Llama-3-8B at 8192 tokens for the time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional

from .commands import Options
from .runner import Row

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Of the norm of a difference: one rounding to b bits is off by at most 2^-b of a value; all arithmetic is float32's.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 5e-4}
ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x).square(),
    "sigmoid": torch.sigmoid,
}
_ROWS = ((1, 1), (5, 200), (3, 4096), (17, 4099), (257, 1000))
_HEADS = ((1, 1, 1, 2), (2, 3, 5, 20), (1, 8, 129, 128), (2, 4, 33, 64))
_EPS = 1e-5


class WrongError(Exception):
    """A kernel gave other numbers than float64."""


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        operation: `rms_norm`, `rms_norm_promoted`, `gated`, `rotary`.
        shape: of the input.
        detail: the activation of a gated product.
    """

    operation: str
    shape: tuple[int, ...]
    detail: str = ""


def cases(small: bool) -> list[Case]:
    """Every operation at every shape."""
    shapes, heads = (_ROWS[:2], _HEADS[:2]) if small else (_ROWS, _HEADS)
    found = [Case(name, shape) for name in ("rms_norm", "rms_norm_promoted") for shape in shapes]
    found += [Case("gated", shape, name) for name in ACTIVATIONS for shape in shapes]
    return found + [Case("rotary", shape) for shape in heads]


def candidates(device: str) -> dict[str, Any]:
    """Name -> module of kernels that this device has; on a CPU the compiled loops."""
    if device != "cpu":
        from isotype.compat import torch_norm
        from isotype.lora.gpu import elementwise

        return {"aten": torch_norm, "triton": elementwise}
    from isotype.lora.loops import elementwise as loops

    return {
        "loops": SimpleNamespace(
            rms_norm=loops.rms_norm,
            rms_norm_backward=loops.rms_norm_backward,
            product=lambda activation, gate, up: loops.silu_product(gate, up),
            product_backward=lambda activation, *tensors: loops.silu_product_backward(*tensors),
            rotate=loops.rotate,
        )
    }


def has(name: str, case: Case, dtype: torch.dtype) -> bool:
    """Whether a candidate knows a case at all."""
    if name == "aten":
        return case.operation == "rms_norm"
    if name != "loops":
        return True
    known = case.operation in ("rms_norm", "rotary") or case.detail == "silu"
    return known and dtype != torch.float16


def rows(options: Options) -> Iterator[Row]:
    """A line for each candidate, operation and dtype: the largest error of all shapes, the time of the large one.

    Raises:
        WrongError: an error above what rounding explains.
    """
    wrong = []
    for name, module in candidates(options.device).items():
        groups: dict[tuple[str, str], list[Case]] = {}
        for case in cases(options.small):
            if any(has(name, case, dtype) for dtype in DTYPES):
                groups.setdefault((case.operation, case.detail), []).append(case)
        for (operation, detail), some in groups.items():
            for dtype in (dtype for dtype in DTYPES if has(name, some[0], dtype)):
                row, text = _row(name, module, some, dtype, options)
                if "failed" in row:
                    wrong.append(f"{operation} {detail} {dtype} by {name}: {row['failed']}")
                yield {**row, "text": text}
    if wrong:
        raise WrongError(f"other numbers than float64: {'; '.join(wrong)}")


def _row(
    name: str, module: Any, some: Sequence[Case], dtype: torch.dtype, options: Options
) -> tuple[dict[str, Any], str]:
    """The row of a candidate, operation and dtype, with its text."""
    operation, detail = some[0].operation, some[0].detail
    row: dict[str, Any] = {"kernel": name, "operation": operation, "detail": detail, "dtype": str(dtype)}
    title = f"{operation} {detail} {dtype} by {name}".replace("  ", " ")
    try:
        worst = {case.shape: max(errors(module, case, dtype, options.device)) for case in some}
        if dtype == torch.bfloat16:
            row["seconds"] = times(module, Case(operation, (), detail), options)
    except Exception as failure:  # noqa: BLE001 - a compiler, a driver or a launch raises whatever it likes; the others go on
        row["failed"] = f"{type(failure).__name__}: {str(failure).partition(chr(10))[0]}"[:300]
        return row, f"{title}: {row['failed']}"
    error = max(worst.values())
    row |= {"error": error, "shapes": [[*shape] for shape in worst]}
    if error > TOLERANCES[dtype]:
        row["failed"] = f"{error:.1e} at {max(worst, key=lambda shape: worst[shape])}"
    clock = ", ".join(f"{key} {1e6 * one:.0f} µs" for key, one in row.get("seconds", {}).items())
    return row, f"{title}: {error:.1e}" + (f"; {clock}" if clock else "")


def _numbers(device: str, dtype: torch.dtype, *shapes: Sequence[int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(map(sum, shapes)))
    return [torch.randn(tuple(shape), generator=generator).to(device, dtype) for shape in shapes]


def _distance(result: torch.Tensor, exact: torch.Tensor) -> float:
    """The error over the norm of the exact one; NaN counts as infinite."""
    error = float((result.cpu().double() - exact).norm() / exact.norm().clamp_min(1e-12))
    return error if error == error else inf


def errors(module: Any, case: Case, dtype: torch.dtype, device: str) -> list[float]:
    """Of each result of a case, forward and backward, the distance to float64's."""
    if case.operation == "gated":
        return _gated_errors(module, case, dtype, device)
    if case.operation == "rotary":
        return _rotary_errors(module, case, dtype, device)
    return _norm_errors(module, case, dtype, device)


def _norm_errors(module: Any, case: Case, dtype: torch.dtype, device: str) -> list[float]:
    offset = 1.0 if case.operation == "rms_norm_promoted" else 0.0
    x, grad = _numbers(device, dtype, case.shape, case.shape)
    (weight,) = _numbers(device, torch.float32 if offset else dtype, case.shape[-1:])
    y, inverse = module.rms_norm(x, weight, _EPS, offset)
    gradient = module.rms_norm_backward(grad, x, weight, inverse, offset)
    x64 = x.cpu().double().requires_grad_()
    exact = functional.rms_norm(x64, weight.shape, offset + weight.cpu().double(), _EPS)
    (exact_gradient,) = torch.autograd.grad(exact, x64, grad.cpu().double())
    if (
        case.shape[-1] == 1
    ):  # the exact gradient of a single number is nearly nothing: there is no direction left
        return [_distance(y, exact.detach())]
    return [_distance(y, exact.detach()), _distance(gradient, exact_gradient)]


def _gated_errors(module: Any, case: Case, dtype: torch.dtype, device: str) -> list[float]:
    gate, up, grad = _numbers(device, dtype, case.shape, case.shape, case.shape)
    gate64, up64 = (each.cpu().double().requires_grad_() for each in (gate, up))
    exact = ACTIVATIONS[case.detail](gate64) * up64
    gradients = torch.autograd.grad(exact, (gate64, up64), grad.cpu().double())
    results = [module.product(case.detail, gate, up), *module.product_backward(case.detail, grad, gate, up)]
    pairs = zip(results, (exact.detach(), exact.detach(), *gradients), strict=True)
    return [_distance(result, each) for result, each in pairs]


def _rotary_errors(module: Any, case: Case, dtype: torch.dtype, device: str) -> list[float]:
    batch, heads, tokens, dim = case.shape
    (x,) = _numbers(device, dtype, (batch, tokens, heads, dim))
    x = x.transpose(1, 2)  # as attention has it
    cos, sin = _numbers(device, dtype, (batch, tokens, dim), (batch, tokens, dim))
    x64 = x.cpu().double().requires_grad_()
    cos64, sin64 = (each.cpu().double()[:, None] for each in (cos, sin))
    first, second = x64.chunk(2, -1)
    exact = x64 * cos64 + torch.cat((-second, first), -1) * sin64
    (back,) = torch.autograd.grad(exact, x64, x.cpu().double())
    turned = module.rotate(x, cos, sin), module.rotate(x, cos, sin, back=True)
    return [_distance(turned[0], exact.detach()), _distance(turned[1], back)]


def times(module: Any, case: Case, options: Options) -> dict[str, float]:
    """Seconds of the forward at Llama-3-8B's shape: the kernel's, and torch's own operators'."""
    device, dtype, tokens = options.device, torch.bfloat16, 64 if options.small else 8192
    if case.operation == "rotary":
        x, cos, sin = _numbers(device, dtype, (1, 32, tokens, 128), (1, tokens, 128), (1, tokens, 128))

        def eager() -> torch.Tensor:
            first, second = x.chunk(2, -1)
            return x * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]

        return _clock(device, kernel=lambda: module.rotate(x, cos, sin), torch=eager)
    if case.operation == "gated":
        gate, up = _numbers(device, dtype, (tokens, 14336), (tokens, 14336))
        activation = ACTIVATIONS[case.detail]
        return _clock(
            device, kernel=lambda: module.product(case.detail, gate, up), torch=lambda: activation(gate) * up
        )
    offset = 1.0 if case.operation == "rms_norm_promoted" else 0.0
    (x,) = _numbers(device, dtype, (tokens, 4096))
    (weight,) = _numbers(device, torch.float32 if offset else dtype, (4096,))

    def eager_norm() -> torch.Tensor:
        wide = x.float()
        return (offset + weight) * (wide * (wide.square().mean(-1, keepdim=True) + _EPS).rsqrt()).to(dtype)

    return _clock(device, kernel=lambda: module.rms_norm(x, weight, _EPS, offset)[0], torch=eager_norm)


def _clock(device: str, **functions: Callable[[], torch.Tensor]) -> dict[str, float]:
    seconds = {}
    for name, function in functions.items():
        times = []
        for _ in range(12):
            if device == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter()
            function()
            if device == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        seconds[name] = sorted(times)[len(times) // 2]
    return seconds
