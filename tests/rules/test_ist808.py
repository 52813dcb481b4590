from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import isotype
from isotype.rules.ist808_counting import find
from tests.rules.traces import BF16, FP16, WHOLE, traced, verified


class Positions(nn.Module):
    """A layer over positions that are counted in one dtype and given in the layer's."""

    def __init__(self, dtype: torch.dtype, counted: torch.dtype, cast: bool) -> None:
        super().__init__()
        self.layer, self.counted, self.cast = nn.Linear(1, 4).to(dtype), counted, cast

    def forward(self, length: int) -> torch.Tensor:
        if self.cast:
            made = torch.arange(length).to(self.counted)
        else:
            made = torch.arange(length, dtype=self.counted)
        positions: torch.Tensor = self.layer((made / length).to(self.layer.weight.dtype)[:, None])
        return positions


@pytest.mark.parametrize(("dtype", "length"), [(BF16, 514), (FP16, 4098)])
@pytest.mark.parametrize("cast", [False, True])
def test_positions_that_run_into_each_other(dtype: torch.dtype, length: int, cast: bool) -> None:
    assert torch.arange(length).to(dtype).unique().numel() < length
    (finding,) = verified(Positions(dtype, dtype, cast), {"length": length}, "IST808")
    name = str(dtype).removeprefix("torch.")
    assert finding.message == f"integers are rounded to {name}: they are wrong by up to 1"
    by = "a cast of arange to" if cast else "torch.arange in"
    assert finding.cause.startswith(f"{by} {name} at test_ist808.py:")
    assert finding.fixes[0].description.startswith("count in float32 at test_ist808.py:")
    assert finding.fixes[0].verified


@pytest.mark.parametrize(("counted", "length"), [(BF16, 256), (FP16, 2048), (torch.float32, 4098)])
def test_what_the_dtype_counts_exactly_is_silent(counted: torch.dtype, length: int) -> None:
    assert torch.arange(length).to(counted).unique().numel() == length
    trace = traced(Positions(BF16, counted, False), {"length": length}, phases=("forward",))
    assert any(call.op.startswith("aten.arange.") for call in trace.calls)
    assert list(find(trace)) == []


class Placed(nn.Module):
    """A layer over numbers that come from integers."""

    def __init__(self, numbers: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self.layer, self.numbers = nn.Linear(1, 4).to(dtype), numbers

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(self.numbers(positions)[:, None].to(self.layer.weight.dtype))
        return result


@pytest.mark.parametrize(
    ("numbers", "dtype", "positions", "expected"),
    [
        (lambda p: p.to(BF16), BF16, [3, 731], "a cast of positions to bfloat16 at "),
        (lambda p: (p - 2).to(BF16), BF16, [3, 731], "a cast of positions to bfloat16 at "),
        (lambda p: torch.arange(3000, dtype=FP16)[p], FP16, [3, 2999], "torch.arange in float16 at "),
        (lambda p: torch.arange(400.0).add(1).to(BF16)[p], BF16, [1, 2], "a cast of arange to bfloat16 at "),
        (lambda p: p.to(BF16), BF16, [3, 256, 512], ""),
        (lambda p: p.to(FP16), FP16, [3, 731], ""),
        (lambda p: (p / 1000).to(BF16), BF16, [3, 731], ""),
        (lambda p: p.ne(0).expand(301, -1).sum(0).to(BF16), BF16, [3, 731], ""),  # a count, such as a divisor
    ],
)
def test_integers_that_a_cast_rounds(
    numbers: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype, positions: list[int], expected: str
) -> None:
    inputs = {"positions": torch.tensor(positions)}
    findings = list(find(traced(Placed(numbers, dtype), inputs, phases=("forward",))))
    assert [finding.cause.partition("test_ist808")[0] for finding in findings] == [expected] * bool(expected)
    for finding in findings:
        assert finding.message == f"integers are rounded to {str(dtype)[6:]}: they are wrong by up to 1"


class Counting(torch.optim.Optimizer):
    """SGD that counts its steps, and adds an epsilon to a number of its own."""

    def __init__(self, parameters: Any, dtype: torch.dtype) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=self.dtype)
            state["step"] += 1
            scale = torch.ones(1, dtype=torch.bfloat16).add_(1e-8)
            parameter.sub_(parameter.grad * scale, alpha=0.1)


@pytest.mark.parametrize(("dtype", "stops"), [(BF16, 256), (FP16, 2048), (torch.float32, 0)])
def test_a_count_of_steps(dtype: torch.dtype, stops: int) -> None:
    count = torch.zeros((), dtype=dtype)
    for _ in range(3000):
        count += 1
    assert count.item() == (stops or 3000)
    options = {"optimizer": lambda p: Counting(p, dtype), "phases": WHOLE}
    findings = verified(nn.Linear(4, 4), {"input": torch.ones(2, 4)}, "IST808", **options)
    assert [finding.message.rpartition(" ")[2] for finding in findings] == [f"{stops:,}"] * bool(stops)
    for finding in findings:
        assert finding.cause.startswith("zeros returns ")
        assert finding.fixes[0].description.startswith("count in float32 at test_ist808.py:")
        assert finding.fixes[0].verified


@pytest.mark.parametrize(
    "foreach",
    [False, pytest.param(True, marks=pytest.mark.newest)],  # torch 2.10 adds to all counts by another call
)
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_a_loaded_optimizer_state_with_a_count_in_16_bits(dtype: torch.dtype, foreach: bool) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    saved = optimizer.state_dict()
    for state in saved["state"].values():
        state["step"] = state["step"].to(dtype)
    optimizer.load_state_dict(saved)
    report = isotype.check(model, {"input": torch.ones(2, 4)}, device="cpu", optimizer=optimizer)
    causes = [finding.cause for finding in report.findings if finding.code == "IST808"]
    assert causes == ["the optimizer's step of weight is bfloat16"] * (dtype == BF16)
