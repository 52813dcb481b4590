"""Words of a check that say what a step costs: slowdowns, the time of a step, experts that stay whole, devices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import isotype
from isotype.precision.devices.profile import device_profile
from isotype.records.finding import Cost
from isotype.report.check.cost import autocast_words, roofline_words, seconds_words
from isotype.report.check.record import Record
from isotype.report.check.text import cost_clauses, to_text
from isotype.rules.kit.costs import step_time
from tests.report.check_samples import clean
from tests.rules.samples import call, operand, trace
from tests.rules.traces import on
from tests.trace.test_sharded import Model, ids


@pytest.mark.parametrize(("times", "words"), [(1.0, []), (1.04, []), (1.06, ["1.1x"]), (12.4, ["12x"])])
def test_what_is_as_fast_is_not_called_slower(times: float, words: list[str]) -> None:
    assert [clause.split()[1] for clause in cost_clauses(Cost(slowdown=times), "a card")] == words


def test_the_least_time_of_a_step_is_told_with_what_bounds_it() -> None:
    record: Record = clean()
    trace = replace(record.trace, setup=replace(record.trace.setup, profile=device_profile("h100")))
    told = seconds_words(replace(record, trace=trace))
    assert told.startswith("at least ")
    assert "NVIDIA H100" in told
    assert "which no device reaches" in told
    assert "tokens/s at most" in told
    unrated = replace(trace.setup, profile=device_profile("cpu-generic"))
    assert seconds_words(replace(record, trace=replace(trace, setup=unrated))) == ""


def test_the_rate_of_an_emulated_dtype_is_marked() -> None:
    record: Record = clean()
    product = call("aten.mm.default", operand(torch.bfloat16), operand(torch.bfloat16), flops=8)
    traced = on(trace(calls=[product]), "t4")
    words = roofline_words(replace(record, trace=traced))
    assert "bfloat16 8 FLOP at 8.10 TFLOP/s (emulated in float32)" in words


def test_the_report_names_the_devices() -> None:
    def told(**more: Any) -> str:
        report = isotype.check(Model(), ids(), device="h100", optimizer="sgd", verify=False, **more)
        return " ".join(to_text(report, 500).split())

    sharded = told(devices=8, fsdp=2)
    assert "8 × NVIDIA H100 SXM 80 GB" in sharded
    assert "FSDP2 over 8 devices" in sharded
    assert "on each of 8 devices" in sharded
    assert "which keep gathered weights for the backward" in told(devices=8, fsdp=2, reshard=False)
    assert "DDP on 2 devices, each with all weights" in told(devices=2)
    assert "the number of devices, so the memory figures are for one device" in told(fsdp=2)


def test_the_least_time_of_products_by_hand() -> None:
    """One product bound by arithmetic, one by memory, attention by half of its scores; the rest is in no bound."""
    t4 = device_profile("t4")
    rate, bandwidth = t4.peak_flops[torch.float16], t4.memory_bandwidth
    assert bandwidth is not None
    large, thin, fused, other = (
        call(op, *(operand(torch.float16, shape=shape) for shape in shapes), result=torch.float16, flops=flops, repeats=3)
        for op, shapes, flops in (
            ("aten.mm.default", ((4096, 4096), (4096, 4096)), 2 * 4096**3),
            ("aten.mm.default", ((4096, 1), (1, 4096)), 2 * 4096),
            ("aten._scaled_dot_product_flash_attention_for_cpu.default", ((4096, 64),), 4 * 4096**2 * 64),
            ("aten.mul.Tensor", ((4096, 4096),), 0),
        )
    )  # fmt: skip
    step = on(trace(calls=[large, thin, fused, other], compute=torch.float16), "t4")
    time = step_time(step)
    assert time is not None
    arithmetic, scores = 2 * 4096**3 / rate, 2 * 4096**2 * 64 / rate
    memory = 2 * 3 * 4096 / bandwidth  # the result of `call` has its first operand's shape
    assert time.seconds == pytest.approx(3 * (arithmetic + scores + memory))
    assert time.traced_seconds - time.seconds == pytest.approx(3 * 2 * 2 * 4096**2 / bandwidth)
    assert time.launches == 12
    assert time.launch_seconds == pytest.approx(time.traced_seconds / 12)
    assert time.products[torch.float16].flops == pytest.approx(
        3 * (2 * 4096**3 + 2 * 4096 + 2 * 4096**2 * 64)
    )
    assert time.traffic_seconds == pytest.approx(time.bytes / bandwidth)
    assert time.tokens is None
    assert time.bound == "products"
    assert step_time(on(trace(calls=[large], compute=torch.float16), "cpu-generic")) is None


def test_a_step_has_no_time_where_a_dtype_has_no_rate() -> None:
    values = operand(torch.complex64)
    product = call("aten.mm.default", values, values, result=torch.complex64, flops=8)
    assert step_time(on(trace(calls=[product]), "t4")) is None
    known = call("aten.mm.default", operand(torch.bfloat16), operand(torch.bfloat16), flops=8)
    assert step_time(on(trace(calls=[known]), "a100")) is not None


def test_a_dtype_that_a_card_emulates_has_the_rate_of_float32() -> None:
    """A T4's bfloat16: its tensor cores take float16 alone."""
    t4 = device_profile("t4")
    large = (4096, 4096)
    product = call(
        "aten.mm.default",
        *(operand(torch.bfloat16, shape=large) for _ in "ab"),
        result=torch.bfloat16,
        flops=2 * 4096**3,
    )
    time = step_time(on(trace(calls=[product]), "t4"))
    assert time is not None
    assert time.seconds == pytest.approx(2 * 4096**3 / t4.peak_flops[torch.float32])
    assert time.products[torch.bfloat16].emulated_in is torch.float32
    native = step_time(on(trace(calls=[product]), "a100"))
    assert native is not None
    assert native.products[torch.bfloat16].emulated_in is None


def test_autocast_that_the_model_turns_on_by_itself_is_named() -> None:
    """As accelerate does in the forwards that it has prepared."""
    product = call("aten.mm.default", operand(torch.bfloat16), autocast=torch.bfloat16)
    assert autocast_words(trace(calls=[product])) == "bfloat16 in parts of the step"
    assert autocast_words(trace(calls=[product], autocast=torch.float16)) == "float16"
    assert autocast_words(trace(calls=[replace(product, autocast=None)])) == ""
