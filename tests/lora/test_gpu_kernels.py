"""The Triton kernels of `isotype.lora.gpu`, run by Triton's interpreter on a CPU, against float64.

The interpreter shows wrong indices, masks, roundings and gradients; it knows neither races nor block sizes, and no bfloat16, whose
casts it truncates (triton 3.9).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from isotype.lora import kernels
from isotype.lora.gates import GATES
from isotype.lora.gpu import elementwise

triton = pytest.importorskip("triton", reason="Triton is not installed: pip install 'isotype[gpu]'")

TOLERANCES = {torch.float32: 3e-6, torch.float16: 1e-3}
"""Relative error of a tensor's norm: float32's own arithmetic, and one rounding to 11 bits."""


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton reads the variable when a kernel is defined: `tests/conftest.py` sets it before anything can have imported them."""
    assert os.environ.get("TRITON_INTERPRET") == "1", "set before isotype.lora.gpu.kernels is imported"
    for name in ("rms_norm", "rms_norm_backward", "gated", "gated_backward", "rotate"):
        monkeypatch.setattr(elementwise, f"_{name}", getattr(elementwise, f"_{name}").__wrapped__)


def close(result: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    assert result.dtype == dtype
    assert result.shape == exact.shape
    error = (result.double() - exact).norm() / exact.norm().clamp_min(1e-30)
    assert not exact.numel() or float(error) < TOLERANCES[dtype]


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(3, 33), (1, 1), (0, 7), (2, 3, 576)], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("wide", [False, True])
def test_rms_norm(dtype: torch.dtype, shape: tuple[int, ...], offset: float, wide: bool) -> None:
    torch.manual_seed(0)
    weight = (torch.rand(shape[-1]) + 0.5).to(torch.float32 if wide else dtype)
    x, result = (3 * torch.randn(shape)).to(dtype), torch.promote_types(dtype, weight.dtype)
    grad = torch.randn(shape).to(result)
    y, inverse = elementwise.rms_norm(x, weight, 1e-5, offset)
    d_x = elementwise.rms_norm_backward(grad, x, weight, inverse, offset)
    x64 = x.double().requires_grad_()
    y64 = x64 * (x64.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * (offset + weight.double())
    close(y, y64.detach(), result)
    (d_x64,) = torch.autograd.grad(y64, x64, grad.double())
    if shape[-1] > 1:
        close(d_x, d_x64, dtype)
    else:  # a norm of one number is its sign: the gradient is a difference of equal numbers, but for eps
        assert float((d_x.double() - d_x64).abs().max()) < 1e-4


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("shape", [(5, 333), (1, 1), (0, 3), (1024,)], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_gated(dtype: torch.dtype, shape: tuple[int, ...], name: str) -> None:
    torch.manual_seed(1)
    gate, up, grad = (torch.randn(shape).to(dtype) for _ in range(3))
    product = elementwise.product(name, gate, up)
    exact = GATES[name].backward(*(x.double() for x in (grad, gate, up)))
    again, d_gate, d_up = elementwise.product_backward(name, grad, gate, up)
    for result, wanted in ((product, exact[0]), (again, exact[0]), (d_gate, exact[1]), (d_up, exact[2])):
        close(result, wanted, dtype)


@pytest.mark.parametrize("tables", [1, 2])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", [(2, 3, 5, 16), (2, 5, 1, 6), (2, 1, 4, 2), (2, 4, 0, 8)], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_rotary(dtype: torch.dtype, shape: tuple[int, int, int, int], transposed: bool, tables: int) -> None:
    torch.manual_seed(2)
    batch, heads, tokens, dim = shape
    x = (
        torch.randn(batch, tokens, heads, dim).to(dtype).transpose(1, 2)
        if transposed
        else torch.randn(shape).to(dtype)
    )
    cos, sin, grad = (
        torch.randn(size).to(dtype) for size in ((tables, tokens, dim), (tables, tokens, dim), shape)
    )
    first, second = x.double().requires_grad_().chunk(2, -1)
    x64 = x.double().requires_grad_()
    first, second = x64.chunk(2, -1)
    y64 = x64 * cos.double()[:, None] + torch.cat((-second, first), -1) * sin.double()[:, None]
    y = elementwise.rotate(x, cos, sin)
    close(y, y64.detach(), dtype)
    assert y.stride() == x.stride() or not y.numel()
    close(
        elementwise.rotate(grad, cos, sin, back=True), torch.autograd.grad(y64, x64, grad.double())[0], dtype
    )


@pytest.mark.parametrize("operation", ["rms_norm", "rms_norm_promoted", "gated", "rotary"])
def test_a_kernel_is_tried_before_it_is_taken(operation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    detail = "silu" if operation == "gated" else ""
    monkeypatch.setattr(kernels, "TABLE", {operation: ("triton",)})
    asked = operation, torch.device("cpu"), torch.float32, detail
    assert kernels.chosen.__wrapped__(*asked).name == "triton"

    def wrong(*args: Any, **kwargs: Any) -> Any:
        results = own(*args, **kwargs)
        last = results[-1] if isinstance(results, tuple) else results
        last.mul_(1.01)
        return results

    name = {"gated": "product_backward", "rotary": "rotate"}.get(operation, "rms_norm_backward")
    own = getattr(elementwise, name)
    monkeypatch.setattr(elementwise, name, wrong)
    kernel = kernels.chosen.__wrapped__(*asked)
    assert (kernel.name, kernel.functions) == ("torch", None)
    assert kernel.reasons[0].startswith("triton: results in float32 differ from float64 results by 1e-02")


def test_a_kernel_that_does_not_build_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> Any:
        raise RuntimeError("PassManager::run failed\nat line 3")

    monkeypatch.setattr(elementwise, "_gated", fails)
    kernel = kernels.chosen.__wrapped__("gated", torch.device("cpu"), torch.float32, "silu")
    assert (kernel.name, kernel.reasons) == ("torch", ("triton: RuntimeError: PassManager::run failed",))


def test_kernels_compile_for_nvidia_and_amd() -> None:
    """For GPUs that are not there: a T4, an H100 and an MI300X, in registers and shared memory that they have."""
    script = Path(__file__).parents[2] / "benchmarks" / "gpu_compile.py"
    command = [sys.executable, "-W", "ignore", str(script), "--small", "--cards", "t4", "h100", "mi300x"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.stdout.endswith(" launches, 0 wrong\n"), ended.stdout[-2000:] + ended.stderr[-2000:]
