from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isotype.dtypes import COMPUTE_DTYPES
from isotype.errors import PrecisionError
from isotype.precision.probe import measure_all, measure_matmul, next_side


def test_float32_rate_is_plausible() -> None:
    rate = measure_matmul(torch.float32, seconds=0.05, size=256)
    assert rate.flops_per_second is not None
    assert 1e7 < rate.flops_per_second < 1e14
    assert rate.repeats >= 1
    assert rate.size <= 256
    assert rate.message is None


@pytest.mark.parametrize("dtype", COMPUTE_DTYPES)
def test_budget_holds_even_for_a_slow_dtype(dtype: torch.dtype) -> None:
    start = time.perf_counter()
    rate = measure_matmul(dtype, seconds=0.05, size=2048)
    spent = time.perf_counter() - start
    assert rate.seconds_spent <= spent
    # The slack is for a busy machine; a 2048 matmul in software float16 alone takes over ten seconds.
    assert spent < 2.0


def test_refused_dtype_has_no_rate_but_the_operators_words() -> None:
    rate = measure_matmul(torch.bool, seconds=0.01)
    with pytest.raises(RuntimeError) as caught:
        torch.mm(torch.ones(2, 2, dtype=torch.bool), torch.ones(2, 2, dtype=torch.bool))
    assert rate.flops_per_second is None
    assert rate.repeats == 0
    assert rate.message == str(caught.value).partition("\n")[0]


def test_measure_all_measures_every_compute_dtype() -> None:
    rates = measure_all("cpu", seconds_total=0.06)
    assert tuple(rates) == COMPUTE_DTYPES
    assert all(rate.dtype is dtype and rate.flops_per_second for dtype, rate in rates.items())


def test_a_device_that_is_not_here_is_refused() -> None:
    with pytest.raises(PrecisionError) as caught:
        measure_matmul(torch.float32, "t4")
    assert str(caught.value) == (
        "only a device that is here can be measured\n"
        "  - device 't4'\n"
        "    expected  a device of this machine\n"
        "    fix       give auto, cpu or a device that torch sees here"
    )


@given(
    side=st.integers(1, 4096),
    size=st.integers(1, 8192),
    call=st.floats(1e-9, 1e3),
    remaining=st.floats(-1, 1e3),
)
def test_next_side_grows_only_within_the_budget(side: int, size: int, call: float, remaining: float) -> None:
    side = min(side, size)
    larger = next_side(side, size, call, remaining)
    assert side <= larger <= min(2 * side, size)
    if larger > side:
        assert call * (larger / side) ** 3 <= remaining / 4
