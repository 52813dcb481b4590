from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from isotype.core.names import format_bytes
from isotype.precision.devices.profile import device_profile
from isotype.records.trace import Call, Operand, Origin
from isotype.rules.kit import costs
from isotype.rules.kit.costs import step_time
from tests.rules.samples import trace
from tests.rules.traces import BF16, FP32, on, traced


def matmul(dtype: torch.dtype, rows: int, inner: int, columns: int, repeats: int = 1) -> Call:
    origin = Origin("input", dtype, "x")
    operands = (
        Operand("self", dtype, (rows, inner), origin),
        Operand("mat2", dtype, (inner, columns), origin),
    )
    flops = 2 * rows * inner * columns
    return Call("aten.mm.default", "forward", "", "", operands, ((dtype, (rows, columns)),), flops, repeats)


def test_roofline_of_one_matmul() -> None:
    t4 = device_profile("t4")
    assert t4.memory_bandwidth is not None
    seconds = partial(costs.seconds, rates=t4.peak_flops, bandwidth=t4.memory_bandwidth)
    # 2 * 4096^3 FLOPs at 65 TFLOP/s; far above the ridge, so that memory does not count.
    large = matmul(torch.float16, 4096, 4096, 4096, repeats=3)
    assert seconds(large) == pytest.approx(3 * 2 * 4096**3 / 65e12)
    # One row: 2 * (4096 + 4096^2 + 4096) bytes at 300 GB/s.
    thin = matmul(torch.float16, 1, 4096, 4096)
    assert seconds(thin) == pytest.approx(2 * (2 * 4096 + 4096**2) / 300e9)


def test_no_rates_no_slowdown() -> None:
    assert costs.slowdown(on(trace((), ()), "cpu-generic"), (), BF16) is None


def test_slowdown_of_a_model_of_matmuls() -> None:
    model = nn.Linear(512, 512, bias=False).requires_grad_(False)
    trace = on(traced(model, lambda m: m(torch.ones(512, 512)).sum(), phases=("forward",)), "a100")
    wide = [call for call in trace.calls if call.flops]
    assert [call.flops for call in wide] == [2 * 512**3]
    rest = sum(
        costs.seconds(call, trace.setup.profile.peak_flops, 2039e9) for call in trace.calls if not call.flops
    )
    before, after = 2 * 512**3 / 19.5e12, max(2 * 512**3 / 312e12, 2 * 3 * 512**2 / 2039e9)
    expected = (before + rest) / (after + rest)
    assert costs.slowdown(trace, wide, BF16) == pytest.approx(expected)
    assert costs.slowdown(trace, (), BF16) == 1.0


@pytest.mark.parametrize(
    "op", ["aten.view.default", "aten.t.default", "aten.expand.default", "prim.device.default"]
)
def test_views_move_nothing(op: str) -> None:
    assert costs.is_view(op)


@pytest.mark.parametrize(
    "op", ["aten.mm.default", "aten.add_.Tensor", "aten.clone.default", "torch.linear", "x"]
)
def test_others_move_bytes(op: str) -> None:
    assert not costs.is_view(op)


def test_root_goes_through_a_layer_that_casts_and_restores() -> None:
    norm = Origin("parameter", FP32, "norm.weight")
    inside = Origin("cast", BF16, "to", "layer", "bnb.py:1", norm)
    restored = Origin("cast", FP32, "to", "layer", "bnb.py:2", inside)
    assert costs.root(restored) is norm
    assert costs.root(Origin("promotion", FP32, "mul", "rotary", "x.py:3", restored)) is norm
    # A cast up in one module of what another cast down is a choice of its own.
    other = Origin("cast", FP32, "float", "custom", "mine.py:4", inside)
    assert costs.root(other) is other


@given(st.floats(min_value=0, max_value=1e17))
def test_sizes_have_three_digits_and_a_unit(amount: float) -> None:
    number, unit = format_bytes(amount).split()
    scale = {"B": 0, "KiB": 1, "MiB": 2, "GiB": 3, "TiB": 4}[unit]
    assert float(number.replace(",", "")) * 1024**scale == pytest.approx(amount, rel=0.006, abs=0.51)


def test_sizes_in_every_finding_and_report() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1536, 3 * 2**30)] == [
        "0 B",
        "1,023 B",
        "1.50 KiB",
        "3.00 GiB",
    ]


def test_memory_that_nothing_is_written_to_moves_no_bytes() -> None:
    origin = Origin("input", FP32, "x")
    operands = (Operand("self", FP32, (64, 64), origin),)
    for name, moved in (("new_empty.default", 0), ("_unsafe_view.default", 0), ("zeros_like.default", 32768)):
        call = Call(f"aten.{name}", "forward", "", "", operands, ((FP32, (64, 64)),))
        assert costs.bytes_moved(call) == moved


def test_large_results_take_what_their_system_clears_pages_in() -> None:
    shape = (4096, 4096)
    origin = Origin("input", FP32, "x")
    operands = (Operand("self", FP32, shape, origin),)
    names = (
        "mul.Tensor",
        "empty_like.default",
        "mul_.Tensor",
        "t.default",
        "tanh.out",
        "_unsafe_view.default",
    )
    calls = [Call(f"aten.{name}", "forward", "", "", operands, ((FP32, shape),), repeats=2) for name in names]
    small = Call("aten.mul.Tensor", "forward", "", "", operands, ((FP32, (64, 64)),))
    size = 2 * 4 * 4096**2
    assert [costs.new_pages(call) for call in (*calls, small)] == [size, size, 0, 0, 0, 0, 0]
    step = on(trace(calls=[matmul(FP32, 512, 512, 512), *calls]), "t4")
    paged = replace(step, setup=replace(step.setup, profile=replace(step.setup.profile, page_rate=1e9)))
    before, after = step_time(step), step_time(paged)
    assert before is not None
    assert after is not None
    assert after.traced_seconds - before.traced_seconds == pytest.approx(2 * size / 1e9)
    assert after.seconds == before.seconds


def test_random_values_take_what_their_device_draws_in_a_second() -> None:
    origin = Origin("input", torch.float16, "x")
    mask = Operand("self", torch.uint8, (512, 512), origin)
    drawn = Call("aten.bernoulli_.float", "forward", "", "", (mask,), ((torch.uint8, (512, 512)),), repeats=2)
    step = on(trace(calls=[matmul(torch.float16, 512, 512, 512), drawn], compute=torch.float16), "t4")
    slow = replace(step, setup=replace(step.setup, profile=replace(step.setup.profile, random_rate=1e6)))
    before, after = step_time(step), step_time(slow)
    assert before is not None
    assert after is not None
    traffic = 2 * 2 * 512**2 / device_profile("t4").memory_bandwidth  # type: ignore[operator]
    assert after.traced_seconds - before.traced_seconds == pytest.approx(2 * 512**2 / 1e6 - traffic)
    assert after.seconds == before.seconds  # what lies between products is in no bound
