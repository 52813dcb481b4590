"""Measured rates of a device's kernels, without the time to launch a kernel and to wait for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from isotype.planning import rates
from isotype.planning.rates import REACHED, with_rates
from isotype.planning.record import Time
from isotype.planning.text import cells_of, speed_of
from isotype.precision.devices.probe import MatmulRate
from isotype.precision.devices.profile import device_profile
from isotype.records.memory import StepTime
from isotype.records.trace import Call
from isotype.rules.kit.costs import bytes_moved, step_time, traffic_of
from tests.planning.rows import row
from tests.rules.samples import call, operand, trace, weight
from tests.rules.traces import on

WAITED, LAUNCHED, RAN = 15e-6, 5e-6, 160e-6


def test_a_gpu_is_waited_for_once_in_several_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose kernels run one after another while the host launches the next kernels."""
    now = 0.0

    def wait(_: torch.device) -> None:
        nonlocal now
        now += WAITED

    def run() -> None:
        nonlocal now
        now += max(LAUNCHED, RAN)

    monkeypatch.setattr(rates, "wait_for", wait)
    monkeypatch.setattr(rates, "clock", lambda _: lambda: now)
    assert rates._fastest(run, torch.device("cuda")) == pytest.approx(RAN, rel=0.02)


def test_rates_of_this_cpu() -> None:
    cpu = torch.device("cpu")
    assert 1e8 < rates.copy_rate(cpu) < 1e13
    assert 1e5 < rates.draw_rate(cpu) < 1e12


def test_a_card_elsewhere_reaches_less_than_its_data_sheet() -> None:
    """A card with a lower rate, or with units that sum in float32 at half their rate, reaches a larger share."""
    shares = {}
    for name in ("t4", "a100-80g", "h100", "rtx4090", "a10g"):
        sheet, (rated, source) = device_profile(name), with_rates(device_profile(name))
        assert source == "speed estimated from published runs on GPUs"
        assert rated.memory_bandwidth == sheet.memory_bandwidth
        shares[name] = rated.peak_flops[torch.float16] / sheet.peak_flops[torch.float16]
        assert rated.steps == REACHED
    assert 1 > shares["rtx4090"] == shares["a10g"] == REACHED.ceiling
    assert REACHED.ceiling > shares["t4"] > shares["a100-80g"] > shares["h100"] > 0.3
    assert with_rates(device_profile("mps")) == (device_profile("mps"), "")


def test_the_seconds_of_this_cpu_are_the_sum_of_its_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("copy_rate", "draw_rate", "page_rate"):
        monkeypatch.setattr(rates, name, lambda _: 1e9)
    busy = MatmulRate(torch.float32, 1e9, repeats=5, size=64)
    monkeypatch.setattr(rates, "measure_all", lambda name, seconds: {torch.float32: busy})
    assert with_rates(device_profile("cpu"))[1].endswith(
        "this machine, while it was busy: times are uncertain"
    )
    monkeypatch.setattr(rates, "measure_all", lambda name, seconds: {})
    rated, source = with_rates(device_profile("cpu"))
    assert source == "rates measured on this machine"
    assert rated.steps is None


def test_a_measured_card_fuses_and_launches_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("copy_rate", "draw_rate", "page_rate"):
        monkeypatch.setattr(rates, name, lambda _: 1e12)
    monkeypatch.setattr(rates, "measure_all", lambda name, seconds: {})
    rated, _ = with_rates(replace(device_profile("a100"), present=True, name="cuda"))
    assert rated.memory_bandwidth == 1e12
    assert rated.steps == REACHED


def test_chains_are_fused_and_many_launches_bound_a_step() -> None:
    """A step has a large product, 1,000 small operators, an update, and another library's operator."""
    rated, _ = with_rates(device_profile("a100"))
    assert rated.memory_bandwidth is not None
    size, n = 2 * 2 * 1024**2, 4096
    product = call("aten.mm.default", operand(torch.bfloat16, shape=(n, n)), flops=2 * n**3)
    between = call("aten.mul.Tensor", operand(torch.bfloat16, shape=(1024, 1024)), repeats=1000)
    whole = [
        replace(between, repeats=1, phase="optimizer"),
        replace(between, repeats=1, op="bitsandbytes.dequantize_4bit.default"),
        call("aten.mul.out", operand(torch.int8, shape=(2048, 1024)), result=torch.int8),
    ]

    def timed(*calls: Call) -> StepTime:
        step = on(trace(calls=[product, *calls]), "a100")
        time = step_time(replace(step, setup=replace(step.setup, profile=rated)))
        assert time is not None
        return time

    alone = timed()
    assert alone.bound == "products"
    fused = timed(between)
    assert fused.bound == "launches"
    assert fused.traced_seconds == pytest.approx(1001 * REACHED.launch)
    apart = timed(*whole)
    assert apart.traced_seconds - alone.traced_seconds == pytest.approx(3 * size / rated.memory_bandwidth)
    large = timed(replace(between, repeats=1, results=((torch.bfloat16, (n, n, 4)),)))
    moved = size / 2 + 2 * 4 * n**2
    assert large.traced_seconds - alone.traced_seconds == pytest.approx(moved / rated.memory_bandwidth)


def test_a_plan_prints_a_range_and_one_number_of_what_was_measured() -> None:
    some = row(rows=2, length=1000, accumulation=1, time=Time(1.0, 0.5, "products", 10, 1.25))
    assert speed_of(some) == "1,600 to 2,500"
    assert cells_of(some, chosen=False)["tokens/s"] == "1,600 to 2,500"
    assert some.lowest_speed == 1600
    assert some.highest_speed == 2500
    small = row(rows=1, length=30, accumulation=1, time=Time(2.0, 0.5, "launches", 10, 1.25))
    assert speed_of(small) == "12 to 19"
    assert speed_of(row(rows=2, length=1000, accumulation=1, time=Time(1.0, 0.5, "products", 10))) == "2,000"
    assert speed_of(row(time=None)) == ""


def test_an_optimizer_updates_the_layers_that_a_folded_one_stands_for() -> None:
    """The update's call has two weights, a folded layer and the head, which stand for five weights of a step."""
    update = call("aten._fused_adamw_.default", operand(torch.float32, shape=(1024, 2048)), phase="optimizer")
    product = call("aten.mm.default", operand(torch.float16), flops=8, result=torch.float16)
    weights = [
        replace(weight(name), shape=(1024, 1024), trainable=True, repeats=repeats)
        for name, repeats in (("layers.0.weight", 4), ("head.weight", 1))
    ]
    step = on(trace(weights, [product, update]), "t4")
    assert traffic_of(step, update) == 2.5 * bytes_moved(update)
    assert traffic_of(step, product) == bytes_moved(product)
    assert traffic_of(on(trace((), [update]), "t4"), update) == bytes_moved(update)
