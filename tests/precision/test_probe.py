from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isotype.core.dtypes import COMPUTE_DTYPES
from isotype.core.errors import PrecisionError
from isotype.precision.devices import probe
from isotype.precision.devices.probe import MatmulRate, measure_all, next_side
from tests.refusals import refused


def measure_matmul(dtype: torch.dtype, device: str = "cpu", seconds: float = 0.05) -> MatmulRate:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe, "COMPUTE_DTYPES", (dtype,))
        patch.setattr(probe, "_CPU_SIZE", 256)
        return measure_all(device, seconds)[dtype]


@pytest.mark.real_cpu
def test_float32_rate_is_plausible() -> None:
    rate = measure_matmul(torch.float32)
    assert rate.flops_per_second is not None
    assert 1e7 < rate.flops_per_second < 1e14
    assert rate.repeats >= 1
    assert rate.size <= 256
    assert rate.message is None


class Machine:
    """Calls that take as long as an idle machine needs, and longer while it is busy; nothing is computed."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, busy: Callable[[int], float] = lambda call: 1.0
    ) -> None:
        self.calls: list[tuple[torch.dtype, int]] = []
        self.seconds: Counter[torch.dtype] = Counter()
        self.busy = busy
        monkeypatch.setattr(probe, "_time_call", self.call)
        monkeypatch.setattr(
            probe, "_operands", lambda side, dtype, device: (torch.empty(side, 0, dtype=dtype),) * 2
        )

    def call(self, operands: tuple[torch.Tensor, torch.Tensor], synchronize: object) -> float:
        (side, _), dtype = operands[0].shape, operands[0].dtype
        self.calls.append((dtype, side))
        rate = 1e9 if dtype == torch.float16 else 1e11
        took = self.busy(len(self.calls)) * 4 * side**3 / rate
        self.seconds[dtype] += took  # type: ignore[assignment]
        return took


@pytest.mark.real_cpu
def test_a_budget_holds_even_for_a_slow_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    rates = measure_all("cpu", seconds_total=3.0)
    assert {dtype: rate.size for dtype, rate in rates.items()} == {
        torch.float32: 1024, torch.bfloat16: 1024, torch.float16: 256,
    }  # fmt: skip
    assert all(rate.repeats >= 5 and rate.steady for rate in rates.values())
    assert max(machine.seconds.values()) < 1.2
    assert rates[torch.float32].flops_per_second == pytest.approx(1e11)
    last = [dtype for dtype, _ in machine.calls[-9:]]
    assert len(set(last)) == 2, "they take turns"


@pytest.mark.real_cpu
def test_a_machine_that_is_busy_now_and_then_makes_no_dtype_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fifth call waits fifty times as long as it computes."""
    Machine(monkeypatch, lambda call: 50.0 if call % 5 == 0 else 1.0)
    rates = measure_all("cpu", seconds_total=3.0)
    reached = {dtype: rate.flops_per_second for dtype, rate in rates.items()}
    assert reached[torch.float32] == pytest.approx(100 * reached[torch.float16])


@pytest.mark.real_cpu
def test_calls_that_wait_for_other_programs_do_not_keep_matrices_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every call waits 16 ms for a thread that another program keeps from running."""
    machine = Machine(monkeypatch)
    monkeypatch.setattr(probe, "_time_call", lambda *call: 0.016 + machine.call(*call))
    rates = measure_all("cpu", seconds_total=3.0)
    assert [rates[dtype].size for dtype in (torch.float32, torch.float16)] == [1024, 256]


@pytest.mark.real_cpu
def test_calls_that_differ_much_are_no_basis_for_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch, lambda call: 1.0 + call % 4)
    assert not any(rate.steady for rate in measure_all("cpu", seconds_total=3.0).values())


@pytest.mark.real_cpu
def test_refused_dtype_has_no_rate_but_the_operators_words() -> None:
    rate = measure_matmul(torch.bool, seconds=0.01)
    with pytest.raises(RuntimeError) as caught:
        torch.mm(torch.ones(2, 2, dtype=torch.bool), torch.ones(2, 2, dtype=torch.bool))
    assert rate.flops_per_second is None
    assert rate.repeats == 0
    assert rate.message == str(caught.value).partition("\n")[0]


@pytest.mark.real_cpu
def test_measure_all_measures_every_compute_dtype() -> None:
    rates = measure_all("cpu", seconds_total=0.06)
    assert tuple(rates) == COMPUTE_DTYPES
    assert all(rate.dtype is dtype and rate.flops_per_second for dtype, rate in rates.items())


@pytest.mark.real_cpu
def test_a_device_that_is_not_here_is_refused() -> None:
    assert refused(PrecisionError, measure_matmul, torch.float32, "t4") == (
        "only a device of this machine can be measured\n"
        "  - device 't4'\n"
        "    expected  a device of this machine\n"
        "    fix       use auto, cpu or a device that torch finds on this machine"
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


def test_the_device_that_is_measured_is_waited_for_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the second GPU, whose products would else be timed as they are queued."""
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    second = torch.device("cuda", 1)
    probe._time_call((torch.eye(4), torch.eye(4)), second)
    assert waited == [second, second]
