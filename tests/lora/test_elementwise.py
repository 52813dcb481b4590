"""Compiled gated products and norms against float64, and that their callers do without them.

Tolerance: one rounding to b digits is off by at most 2^-b of a value (b: 8 in bfloat16); the arithmetic is float32's, whose sums
over a row, and half a dozen roundings where products are not fused with sums (SSE2), lose a few digits more.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from isotype.lora.gates import GATES
from isotype.lora.loops import elementwise
from isotype.lora.loops.loading import Loops
from isotype.lora.norms import NormParts, rms_norm
from tests.cpus import no_compiler
from tests.pairwise import pairwise

TOLERANCES = {torch.float32: 4e-6, torch.bfloat16: 2.0**-8}
SHAPES = [(1,), (7,), (16,), (3, 33), (5, 1536), (33, 1000), (0, 8)]


needs_compiler = pytest.mark.lacking(no_compiler())


def close(found: torch.Tensor, exact: torch.Tensor, tolerance: float) -> None:
    assert found.shape == exact.shape
    excess = (found.double() - exact).abs() - tolerance * exact.abs()
    assert not excess.numel() or float(excess.max()) <= tolerance / 10


@needs_compiler
@pytest.mark.usefixtures("threads")
@pairwise("threads, shape, dtype", [1, 3], SHAPES, TOLERANCES, indirect=["threads"])
def test_gated_products(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    gate, up, grad = ((4 * torch.randn(shape)).to(dtype) for _ in range(3))
    exact = [x.double().requires_grad_() for x in (gate, up)]
    product = torch.nn.functional.silu(exact[0]) * exact[1]
    wanted = (product.detach(), *torch.autograd.grad(product, exact, grad.double()))
    found = elementwise.silu_product_backward(grad, gate, up)
    close(elementwise.silu_product(gate, up), wanted[0], TOLERANCES[dtype])
    for one, other in zip(found, wanted, strict=True):
        # Near zero (1 + x (1 - sigmoid x) at x = -1.28) an error is relative to what cancels: hence the tenth in `close`.
        close(one, other, 2 * TOLERANCES[dtype])
    assert torch.equal(found[0], elementwise.silu_product(gate, up))


@needs_compiler
@pytest.mark.usefixtures("threads")
@pairwise("threads, shape, dtype", [1, 3], SHAPES, TOLERANCES, indirect=["threads"])
def test_norms(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, grad = ((3 * torch.randn(shape)).to(dtype) for _ in range(2))
    weight = torch.rand(shape[-1]) + 0.5
    x64 = x.double().requires_grad_()
    y64 = x64 * (x64.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    (d_x64,) = torch.autograd.grad(y64, x64, grad.double())
    y, inverse = elementwise.rms_norm(x, weight, 1e-5)
    close(y, y64.detach(), TOLERANCES[dtype])
    d_x = elementwise.rms_norm_backward(grad, x, weight, inverse)
    # Two terms of the gradient cancel: an error relative to the row's largest.
    assert (
        float((d_x.double() - d_x64).abs().max()) <= 4 * TOLERANCES[dtype] * float(d_x64.abs().max()) + 1e-5
        if x.numel()
        else True
    )


SPECIAL = [
    0.0,
    -0.0,
    1.0,
    -1.2784645,
    88.0,
    -88.0,
    126.5,
    -126.5,
    1e4,
    -1e4,
    3e38,
    -3e38,
    math.inf,
    -math.inf,
    math.nan,
]


@needs_compiler
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_what_is_not_finite_stays_so(dtype: torch.dtype) -> None:
    gate, up = (
        torch.tensor(each).to(dtype) for each in zip(*itertools.product(SPECIAL, SPECIAL), strict=True)
    )
    found, exact = elementwise.silu_product(gate, up), torch.nn.functional.silu(gate.double()) * up.double()
    finite = exact.isfinite() & (exact.abs() < 0.99 * torch.finfo(dtype).max)
    close(found[finite], exact[finite].masked_fill(exact[finite].abs() < 1e-36, 0), 2 * TOLERANCES[dtype])
    nowhere = torch.nn.functional.silu(gate.float()) * up.float()
    assert torch.equal(found.isnan(), nowhere.isnan())
    assert torch.equal(found.isinf(), nowhere.to(dtype).isinf())
    x = torch.tensor([[1.0, math.nan, 2.0], [1.0, math.inf, 2.0]]).to(dtype)
    y, _ = elementwise.rms_norm(x, torch.ones(3), 1e-5)
    assert y[0].isnan().all()
    assert torch.equal(y[1].isnan(), torch.tensor([False, True, False]))


@needs_compiler
def test_bfloat16_rounds_as_torch_does() -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    values = torch.cat([(bits << 16) + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]).view(
        torch.float32
    )
    values = values[values.isfinite()]
    kept, _ = elementwise.rms_norm(values.bfloat16()[:, None], torch.ones(1), 1.0)
    assert kept.dtype == torch.bfloat16
    # A row of one number x is x / sqrt(x^2 + 1) in float32, rounded once.
    wide = values.bfloat16().float()
    expected = wide * (1 / (wide * wide + 1).sqrt())
    sure = expected.bfloat16() == (expected * (1 + 3e-7)).bfloat16()
    sure &= expected.bfloat16() == (expected * (1 - 3e-7)).bfloat16()
    tiny = torch.finfo(torch.float32).tiny
    small = expected.abs() < tiny  # the CPU's own instruction makes zero of them
    assert torch.equal(kept[:, 0][sure & ~small], expected.bfloat16()[sure & ~small])
    assert float((kept[:, 0].double() - expected.double())[small].abs().max()) < tiny


@needs_compiler
def test_layouts() -> None:
    gate, up = torch.randn(6, 40)[:, ::2], torch.randn(20, 6).t()
    assert torch.equal(
        elementwise.silu_product(gate, up), elementwise.silu_product(gate.contiguous(), up.contiguous())
    )


@needs_compiler
def test_their_callers_do_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> list[torch.Tensor]:
        torch.manual_seed(0)
        gate, up, grad = (torch.randn(9, 70) for _ in range(3))
        weight, x = torch.rand(70), torch.randn(9, 70, requires_grad=True)
        y = rms_norm(x, weight, NormParts(1e-5, 1.0))
        (d_x,) = torch.autograd.grad(y, x, grad)
        silu = GATES["silu"]
        return [silu.product(gate, up), *silu.backward(grad.clone(), gate, up), y.detach(), d_x]

    called: list[str] = []
    for name in ("silu_product", "silu_product_backward", "rms_norm", "rms_norm_backward"):
        own = getattr(elementwise, name)
        monkeypatch.setattr(
            elementwise, name, lambda *a, own=own, name=name: (called.append(name), own(*a))[1]
        )
    with_them = run()
    assert called == ["rms_norm", "rms_norm_backward", "silu_product", "silu_product_backward"]
    monkeypatch.setattr(elementwise, "_loops", lambda: Loops("there is no C++ compiler"))
    for one, other in zip(with_them, run(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert len(called) == 4


@needs_compiler
def test_what_they_are_not_asked_for() -> None:
    x = torch.randn(4, 8)
    assert elementwise.usable(x, x)
    for other in (x[:2], x[:, :1], x.double(), x.half(), x.to("meta"), x.bfloat16()):
        assert not elementwise.usable(x, other)
    with_gradient = x.clone().requires_grad_()
    assert not elementwise.usable(with_gradient)
    with torch.no_grad():
        assert elementwise.usable(with_gradient)
    with FakeTensorMode():
        assert not elementwise.usable(torch.empty(4, 8))


@pytest.mark.parametrize("name", GATES)
def test_a_product_outside_of_a_function_has_its_gradients(name: str) -> None:
    gate, up = (torch.randn(4, 8).requires_grad_() for _ in range(2))
    grads = torch.autograd.grad(GATES[name].product(gate, up).sum(), (gate, up))
    wide = [x.detach().double().requires_grad_() for x in (gate, up)]
    exact = torch.autograd.grad((GATES[name].activate(wide[0]) * wide[1]).sum(), wide)
    for one, other in zip(grads, exact, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-6)


def test_norms_of_another_width_than_their_weight_raise() -> None:
    with pytest.raises(RuntimeError, match="size of tensor"):
        rms_norm(torch.randn(2, 8), torch.ones(4), NormParts(1e-5, 0.0))


@needs_compiler
@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_the_default_dtype_changes_nothing(default: torch.dtype) -> None:
    x, weight = torch.randn(33, 40), torch.rand(40)
    expected = elementwise.rms_norm(x, weight, 1e-5)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        found = elementwise.rms_norm(x, weight, 1e-5)
    finally:
        torch.set_default_dtype(before)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
