"""Products with float32 results on GPUs: how they are put together, and that one which rounds is not taken.

torch has them on GPUs only: a stand-in multiplies in float64 and rounds to the result's dtype. What a step on a GPU launches is in
`tests/lora/test_fake_gpu.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from isotype.lora import kernels
from isotype.lora.kernels import Products, float32_reductions
from isotype.lora.loops import products
from isotype.lora.loops.products import Sum, write_sums

CPU = torch.device("cpu")
ADDMM, MM = Products(scales=True), Products(scales=False)


@pytest.fixture
def with_out_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's two operators as a GPU has them."""

    def mm(left: torch.Tensor, right: torch.Tensor, *, out_dtype: torch.dtype, out: Any = None) -> Any:
        result = (left.double() @ right.double()).to(out_dtype)
        return result if out is None else out.copy_(result)

    def addmm(
        total: torch.Tensor,
        left: torch.Tensor,
        right: torch.Tensor,
        *,
        out_dtype: torch.dtype,
        out: Any,
        **by: Any,
    ) -> Any:
        added = by.get("alpha", 1) * (left.double() @ right.double())
        return out.copy_((total.double() + added if by.get("beta", 1) else added).to(out_dtype))

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(torch, "addmm", addmm)


@pytest.mark.usefixtures("with_out_dtype")
@pytest.mark.parametrize("way", [ADDMM, MM], ids=["addmm", "mm"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_float32_sum_is_never_rounded_to_16_bits(
    way: Products, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "kernel_of", lambda *_: way)
    torch.manual_seed(0)
    a, b, c, d = (torch.randn(shape).to(dtype) for shape in ((9, 33), (33, 5), (9, 17), (17, 5)))
    bias, out = torch.randn(5).to(dtype), torch.empty(9, 5)
    write_sums([Sum(out, iter(((a, b), (c, d))), bias, 0.3)], compiled=False)
    exact = 0.3 * (a.double() @ b.double() + c.double() @ d.double()) + bias.double()
    assert (
        out - exact
    ).norm() / exact.norm() < 1e-6  # float32's, where one rounding to 16 bits is 1e-4 at least


@pytest.mark.usefixtures("with_out_dtype")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_product_that_rounds_is_not_taken(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_why_not", lambda name, kind: None)
    asked: Any = "float32_product", CPU, dtype
    assert kernels.chosen.__wrapped__(*asked).functions == ADDMM
    own = torch.addmm

    def rounds(*args: Any, out: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return out.copy_(own(*args, out=out, **kwargs).to(dtype))

    monkeypatch.setattr(torch, "addmm", rounds)
    kernel = kernels.chosen.__wrapped__(*asked)
    assert kernel.functions == MM
    assert kernel.reasons[0].startswith("addmm: results in float32 differ from float64 results by ")


def test_a_torch_without_it_says_so() -> None:
    kernel = kernels.chosen.__wrapped__("float32_product", CPU, torch.bfloat16)
    assert kernel.functions is None
    assert kernel.reasons[1] == "mm: this torch has no product with a float32 result on cpu"


@pytest.mark.parametrize("before", [True, False])
def test_reductions_are_whole_for_a_time(before: bool) -> None:
    matmul: Any = torch.backends.cuda.matmul
    names = [f"allow_{name}_reduced_precision_reduction" for name in ("bf16", "fp16")]
    held = [getattr(matmul, name) for name in names]
    try:
        for name in names:
            setattr(matmul, name, before)
        with float32_reductions():
            assert not any(getattr(matmul, name) for name in names)
        assert [getattr(matmul, name) for name in names] == [before, before]
    finally:
        for name, allowed in zip(names, held, strict=True):
            setattr(matmul, name, allowed)
