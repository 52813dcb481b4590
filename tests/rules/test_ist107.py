from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import isotype
from tests.reality import real_step
from tests.rules.traces import BF16, FP16, found, traced

RULE = "ist107_recomputation"
X = torch.ones(2, 8)


class Recompute(torch.autograd.Function):
    """A checkpoint of one's own, which forgets the autocast that its forward ran under."""

    @staticmethod
    def forward(ctx: Any, layer: nn.Module, x: torch.Tensor) -> Any:
        ctx.layer = layer
        ctx.save_for_backward(x)
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, torch.Tensor]:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            given = x.detach().requires_grad_()
            again = ctx.layer(given)
        torch.autograd.backward(again, grads[0].to(again.dtype))
        return None, given.grad


class Checkpointed(nn.Module):
    def __init__(self, own: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8).to(FP16)
        self.own = own

    def forward(self, x: torch.Tensor) -> Any:
        if self.own:
            return Recompute.apply(self.second, self.first(x))  # type: ignore[no-untyped-call]
        return checkpoint(self.second, self.first(x), use_reentrant=False)


@pytest.mark.real_cpu
def test_a_checkpoint_that_forgets_autocast() -> None:
    (finding,) = found(RULE, traced(Checkpointed(own=True), {"x": X}, autocast=BF16))
    outcome = real_step(Checkpointed(own=True), {"x": X}, autocast=BF16)
    assert (outcome.phase, outcome.module) == (finding.phase, finding.module) == ("backward", "second")
    assert f"the device raises: {outcome.error}" in finding.notes
    assert finding.message == (
        "float16 instead of bfloat16 while gradient checkpointing recomputes the forward"
    )
    assert finding.op == "aten.addmm.default"
    assert finding.cause == "autocast to bfloat16 is on in the forward, and off in the recomputation"
    assert "second.weight is float16" in finding.notes
    assert "custom_bwd" in finding.fixes[0].description


@pytest.mark.real_cpu
def test_torch_checkpoint_restores_autocast() -> None:
    assert found(RULE, traced(Checkpointed(own=False), {"x": X}, autocast=BF16)) == []
    assert real_step(Checkpointed(own=False), {"x": X}, autocast=BF16).error is None


class Counting(nn.Module):
    """A part that creates a tensor in torch's default dtype, which is bfloat16 only while the forward runs."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight, self.dtype = nn.Parameter(torch.ones(8, dtype=BF16)), dtype

    def counted(self, x: torch.Tensor) -> torch.Tensor:
        return ((x * self.weight).float() * torch.zeros(8, dtype=self.dtype)).sum()

    def forward(self, x: torch.Tensor) -> Any:
        torch.set_default_dtype(BF16)
        try:
            return checkpoint(self.counted, x, use_reentrant=False)
        finally:
            torch.set_default_dtype(torch.float32)


@pytest.mark.real_cpu
def test_a_default_dtype_that_changes_before_the_backward() -> None:
    (finding,) = found(RULE, traced(Counting(), {"x": X.bfloat16()}))
    outcome = real_step(Counting(), {"x": X.bfloat16()})
    assert (outcome.phase, type(outcome.error).__name__) == ("backward", "CheckpointError")
    assert finding.cause.startswith("zeros at test_ist107.py:")
    assert "returns bfloat16 [8] in the forward and float32 [8] in the recomputation" in finding.cause
    assert finding.fixes[0].description.startswith("pass the dtype at test_ist107.py:")
    assert found(RULE, traced(Counting(BF16), {"x": X.bfloat16()})) == []


class _Reentrant(Counting):
    def forward(self, x: torch.Tensor) -> Any:
        torch.set_default_dtype(BF16)
        try:
            return checkpoint(self.counted, x * self.weight, use_reentrant=True)
        finally:
            torch.set_default_dtype(torch.float32)


def test_a_reentrant_checkpoint_that_recomputes_another_default_dtype_silently() -> None:
    trace = traced(_Reentrant(), {"x": X.bfloat16()})
    assert trace.failure is None
    (finding,) = found(RULE, trace)
    assert (finding.severity, finding.op) == ("warning", "aten.zeros.default")
    assert "torch's default dtype has changed after the forward" in finding.cause
    assert found(RULE, traced(_Reentrant(BF16), {"x": X.bfloat16()})) == []


def _buffer(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(*x.shape, dtype=dtype).add_(x)


class _Summed(torch.autograd.Function):
    """One helper creates the buffers of the forward in bfloat16, and those of the backward in float32."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return _buffer(x, BF16)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return _buffer(grads[0], torch.float32).bfloat16()


def test_a_backward_that_creates_buffers_of_a_chosen_dtype_is_no_recomputation() -> None:
    layer = nn.Linear(8, 8, dtype=BF16)
    assert found(RULE, traced(layer, lambda model: _Summed.apply(model(X.bfloat16())).sum())) == []


def test_what_broke_in_the_forward_is_not_told_again() -> None:
    trace = traced(Checkpointed(own=False), {"x": X})
    assert found(RULE, trace) == []
    assert [finding.module for finding in found("ist101_operands", trace)] == ["second"]


def test_a_check_inside_of_a_checkpoint_changes_nothing() -> None:
    """`isotype run` checks a step at the first call of a model, which a script may make inside of a checkpoint."""
    layer, reports = nn.Linear(8, 8), []

    def checked(x: torch.Tensor) -> Any:
        reports.append(isotype.check(layer, {"input": X}, device="cpu"))
        return layer(x)

    checkpoint(checked, X, use_reentrant=False).sum().backward()
    assert [report.errors for report in reports] == [(), ()]
    assert layer.weight.grad is not None


def test_a_time_limit_that_ends_in_a_recomputation_is_no_error_of_the_model(monkeypatch: Any) -> None:
    clock = iter([*range(40), *[10**9] * 10_000])
    monkeypatch.setattr("isotype.trace.fake.recorder.time.monotonic", lambda: float(next(clock)))
    block = nn.Sequential(*[nn.Linear(8, 8) for _ in range(12)])
    report = isotype.check(
        block, lambda model: checkpoint(model, X, use_reentrant=False).sum(), device="cpu", seconds=45, verify=False
    )  # fmt: skip
    failure = report.trace.failure
    assert failure is not None
    assert (failure.phase, failure.error.split(":")[0]) == ("backward", "TimeSpentError")
    assert [finding.code for finding in report.findings if finding.severity == "error"] == []
