"""Sums of products by compiled loops against float64, for every way in which matrices can lie.

Tolerance, of the norm: in bfloat16 the sum is rounded once (2^-8 of it at most); sums are float32's, of runs of
256 lanes in float32. What is written as float32 has no rounding but those of the sum.
"""

from __future__ import annotations

import itertools
from typing import cast

import pytest
import torch

from isotype.lora.loops import products
from isotype.lora.loops.loading import Loops
from isotype.lora.loops.products import FEWEST, Sum, compiled_products, is_used, write_sums
from isotype.precision.devices import cpu as devices_cpu
from isotype.precision.devices.cpu import CpuFeatures, OneDnn
from tests.cpus import CPUS, no_bfloat16_loops, no_compiler, pretend
from tests.lora.watched import Watched
from tests.pairwise import pairwise

TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8}
SUMMED = 1e-6


@pytest.fixture(params=TOLERANCES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Of what is multiplied: where nothing was compiled for it, torch's operators are asked for the same."""
    return cast("torch.dtype", request.param)


@pytest.fixture(
    params=[
        pytest.param(torch.float32, marks=pytest.mark.lacking(no_compiler())),
        pytest.param(torch.bfloat16, marks=pytest.mark.lacking(no_bfloat16_loops())),
    ],
    ids=str,
)
def compiled_dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """One that loops are compiled for: those of bfloat16 for no CPU without its products, which tests see by default."""
    if request.param == torch.bfloat16:
        pretend("cpu-avx512", monkeypatch)
    return cast("torch.dtype", request.param)


_ROUNDINGS = 4
"""By torch's operators: of three products and of what a bias is added to; sums that cancel are not among these."""

LAYOUTS = ("rows", "columns", "padded", "odd", "strided", "repeated")


def matrix(rows: int, columns: int, dtype: torch.dtype, layout: str) -> torch.Tensor:
    """Random values that lie in memory as the name says."""
    if layout == "columns":
        return torch.randn(columns, rows).to(dtype).t()
    if layout == "padded":
        return torch.randn(rows + 1, columns + 16).to(dtype)[:rows, 8 : columns + 8]
    if layout == "odd":
        return torch.randn(rows, columns + 3).to(dtype)[:, 1 : columns + 1]
    if layout == "strided":
        return torch.randn(2 * rows, 3 * columns).to(dtype)[::2, ::3]
    if layout == "repeated":
        return torch.randn(1, columns).to(dtype).expand(rows, columns)
    return torch.randn(rows, columns).to(dtype)


def exact(asked: Sum) -> torch.Tensor:
    total = sum(
        (left.double() @ right.double() for left, right in asked.terms), torch.zeros(asked.out.shape).double()
    )
    total *= asked.factor
    return total if asked.bias is None else total + asked.bias.double()


def check(asked: Sum) -> None:
    asked.out.fill_(float("nan"))
    write_sums([asked], compiled=True)
    wanted, found = exact(asked), asked.out.double()
    assert found.shape == wanted.shape
    if not found.numel():
        return
    assert bool(found.isfinite().all())
    size = sum(
        float((left.double().abs() @ right.double().abs()).norm()) for left, right in asked.terms
    ) * abs(asked.factor) + float(0 if asked.bias is None else asked.bias.double().norm())
    rounding = TOLERANCES[asked.out.dtype] if asked.out.dtype != torch.float32 else SUMMED
    working = asked.terms[0][0].dtype  # type: ignore[index]
    if not compiled_products().has("sums_of_products", working):
        rounding = _ROUNDINGS * TOLERANCES[working]
    assert float((found - wanted).norm()) <= rounding * float(wanted.norm()) + SUMMED * size / 10 + 1e-30


SIZES = (
    (1, 1, 1),
    (6, 16, 64),
    (13, 7, 5),
    (97, 33, 65),
    (96, 64, 128),
    (200, 130, 70),
    (3, 2100, 66),
    (130, 4100, 9),
)


@pytest.mark.usefixtures("threads")
@pairwise("threads, left, right", [1, 3], LAYOUTS, LAYOUTS, indirect=["threads"])
def test_matrices_of_every_layout(left: str, right: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for rows, depth, columns in SIZES[:-2] if (left, right) != ("rows", "columns") else SIZES:
        terms = ((matrix(rows, depth, dtype, left), matrix(depth, columns, dtype, right)),)
        check(Sum(torch.empty(rows, columns, dtype=dtype), terms))


@pytest.mark.usefixtures("threads")
@pairwise("threads, layout, wide", [1, 3], LAYOUTS[:5], [False, True], strength=1, indirect=["threads"])
def test_results_that_no_cache_keeps(layout: str, wide: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    out = torch.float32 if wide else dtype
    for columns in (1088, 1090):  # rows that begin at multiples of 64 bytes, and others
        terms = ((matrix(500, 70, dtype, "rows"), matrix(70, columns, dtype, "columns")),)
        for bias in (None, matrix(1, columns, dtype, "rows")[0]):
            check(Sum(matrix(500, columns, out, layout), terms, bias, 2.0))


@pytest.mark.usefixtures("threads")
def test_several_terms_a_bias_and_a_factor(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    for rows, columns, depths in ((70, 100, (64, 3, 1)), (130, 48, (1030, 16, 2100)), (1, 65, (5, 0, 2))):
        terms = tuple(
            (matrix(rows, depth, dtype, left), matrix(depth, columns, dtype, right))
            for depth, left, right in zip(depths, LAYOUTS, reversed(LAYOUTS), strict=False)
        )
        for factor, bias in itertools.product((1.0, -0.37), (None, torch.randn(columns).to(dtype))):
            check(Sum(torch.empty(rows, columns, dtype=dtype), terms, bias, factor))


def test_by_torch_the_same() -> None:
    torch.manual_seed(5)
    for factor, bias, out in itertools.product(
        (1.0, -0.37), (None, torch.randn(7)), (torch.float32, torch.float64)
    ):
        terms = [(torch.randn(9, depth), torch.randn(depth, 7)) for depth in (4, 1, 6)]
        asked = Sum(torch.empty(9, 7, dtype=out), iter(terms), bias, factor)
        write_sums([asked], compiled=False)
        torch.testing.assert_close(
            asked.out.double(), exact(asked._replace(terms=terms)), rtol=1e-5, atol=1e-5
        )


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("out", [torch.float32, None], ids=str)
def test_what_is_written_may_lie_anyhow(out: torch.dtype | None, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    for layout in LAYOUTS[:-1]:
        left, right = matrix(100, 37, dtype, "rows"), matrix(37, 70, dtype, "columns")
        made = matrix(100, 70, out or dtype, layout)
        around = made._base
        before = None if around is None else around.clone()
        check(Sum(made, ((left, right),)))
        if around is not None and before is not None:
            made.copy_(before.as_strided(made.shape, made.stride(), made.storage_offset()))
            assert torch.equal(around, before)  # nothing beside it was written


@pytest.mark.usefixtures("threads")
def test_many_sums_in_one_call_and_empty_ones(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    asked = [
        Sum(
            torch.empty(rows, columns, dtype=dtype),
            ((matrix(rows, depth, dtype, "rows"), matrix(depth, columns, dtype, "columns")),),
        )
        for rows, depth, columns in ((5, 8, 3), (0, 8, 3), (5, 8, 0), (4, 0, 6), (300, 70, 90))
    ]
    write_sums(asked, compiled=True)
    for each in asked:
        torch.testing.assert_close(each.out.double(), exact(each), rtol=2.0**-8, atol=1e-5)


def test_threads_change_nothing(compiled_dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    terms = ((matrix(500, 300, compiled_dtype, "rows"), matrix(300, 200, compiled_dtype, "columns")),)
    made = []
    before = torch.get_num_threads()
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        out = torch.empty(500, 200, dtype=compiled_dtype)
        write_sums([Sum(out, terms)], compiled=True)
        made.append(out)
    torch.set_num_threads(before)
    assert torch.equal(made[0], made[1])
    assert torch.equal(made[0], made[2])


def test_what_is_not_finite_goes_on(dtype: torch.dtype) -> None:
    left, right = torch.ones(70, 40, dtype=dtype), torch.ones(40, 70, dtype=dtype)
    left[3, 5], left[4, 0], right[:, 9] = float("nan"), float("inf"), float("inf")
    out = torch.empty(70, 70, dtype=dtype)
    write_sums([Sum(out, ((left, right),))], compiled=True)
    assert bool(out[3].isnan().all())
    assert bool((out[4] == float("inf")).all())
    assert bool((out[:3, 9] == float("inf")).all())
    assert bool((out[:3, :9] == 40).all())


def test_who_watches_operators_sees_those_of_torch(dtype: torch.dtype) -> None:
    out = torch.empty(70, 70, dtype=dtype)
    with Watched() as watched:
        write_sums(
            [Sum(out, ((torch.ones(70, 3, dtype=dtype), torch.ones(3, 70, dtype=dtype)),))], compiled=True
        )
    assert any("mm" in name for name in watched.names)
    assert bool((out == 3).all())


# ------------------------------------------------------------------------------------------------- which way is taken


@pytest.mark.parametrize("cpu", CPUS)
def test_torch_multiplies_bfloat16_by_amx(
    cpu: str, compiled_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    loops = compiled_products()
    monkeypatch.setattr(products, "compiled_products", lambda: loops)
    pretend(cpu, monkeypatch)
    amx = cpu == "cpu-amx" and compiled_dtype == torch.bfloat16
    assert is_used(compiled_dtype, torch.zeros(FEWEST, 8)) != amx


@pytest.mark.parametrize(
    ("flag", "limit", "amx"),
    [("avx512_bf16", "", False), ("amx_bf16", "", True), ("amx_bf16", "AVX512_CORE_BF16", False)],
)
def test_onednn_may_be_kept_from_amx(
    flag: str, limit: str, amx: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    onednn, features = OneDnn(frozenset({torch.bfloat16}), limit), CpuFeatures("", frozenset({flag}), "")
    monkeypatch.setattr(devices_cpu, "this_onednn", lambda: onednn)
    monkeypatch.setattr(devices_cpu, "this_cpu", lambda: features)
    assert devices_cpu.multiplies_by_amx() == amx


def test_a_cpu_without_vectors_multiplies_by_torch(
    compiled_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "compiler_options", tuple)
    assert not is_used(compiled_dtype, torch.zeros(FEWEST, 8))


def test_what_the_loops_cannot_take(compiled_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(FEWEST, 8)
    assert is_used(compiled_dtype, torch.nn.Parameter(x))
    assert not is_used(compiled_dtype, x[1:])
    assert not is_used(torch.float16, x)
    assert not is_used(compiled_dtype, x.to("meta"))
    assert not is_used(compiled_dtype, x.as_subclass(_Own))
    monkeypatch.setattr(products, "compiled_products", lambda: Loops("there is no C++ compiler"))
    assert not is_used(compiled_dtype, x)


class _Own(torch.Tensor):
    pass


def test_what_does_not_fit_is_refused_by_torch(dtype: torch.dtype) -> None:
    left, right, out = (torch.ones(70, 70, dtype=dtype) for _ in range(3))
    wrong = [
        Sum(out, ((left[:, 1:], right),)),
        Sum(out, ((left, right.half()),)),
        Sum(out, ((left, right),), bias=torch.ones(69, dtype=dtype)),
        Sum(out, ((left, right), (left[1:], right))),
    ]
    for each in wrong:
        with pytest.raises(RuntimeError):
            write_sums([each], compiled=True)


def test_what_the_loops_cannot_read_is_left_to_torch(dtype: torch.dtype) -> None:
    left, out = torch.ones(70, 70, dtype=dtype), torch.zeros(70, 70, dtype=dtype)
    write_sums([Sum(out, ((left, left.as_subclass(_Own)),))], compiled=True)
    assert bool((out == 70).all())
    bias = torch.ones(140, dtype=dtype)[::2] * torch.arange(2, dtype=dtype).repeat(35)
    for each in (bias, torch.ones(1, dtype=dtype).expand(70), torch.arange(140, dtype=dtype)[::2]):
        check(Sum(out, ((left, left),), each))
