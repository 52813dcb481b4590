"""What the recorder of fakes does beyond recording: numbers that do not fit, edits that are tried, what it blames."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as nnf

from isotype.precision.devices.profile import device_profile
from isotype.preflight.setup import compute_dtype
from isotype.records.request import Setup, StepRequest
from isotype.records.trace import Origin, Trace
from isotype.trace.fake.step import trace_step
from tests.reality import real_step
from tests.rules.traces import traced
from tests.small import BF16, FP16, FP32

HALF = torch.ones(2, 4, dtype=FP16)
MASK = torch.tensor([[True, False, True, False]] * 2)
ROWS = torch.zeros(2, 1, dtype=torch.long)


class Doing(nn.Module):
    """A layer in `dtype`, then `act` on its result."""

    def __init__(self, act: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4).to(dtype)
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.proj(x))


def on(device: str, model: nn.Module, inputs: Any, **lines: torch.dtype) -> Trace:
    setup = Setup(
        profile=device_profile(device),
        autocast=None,
        scaler=False,
        optimizer="adamw",
        compute=compute_dtype(model),
    )
    return trace_step(StepRequest(model, inputs), setup, lines=lines)


# ------------------------------------------------------------------------------------------- numbers that do not fit

FILLS: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "masked_fill": lambda x, number: x.masked_fill(MASK, number),
    "masked_fill_": lambda x, number: x.clone().masked_fill_(MASK, number),
    "fill_": lambda x, number: x.clone().fill_(number),
    "full": lambda x, number: x + torch.full((4,), number, dtype=x.dtype),
    "full_like": lambda x, number: x + torch.full_like(x, number),
    "new_full": lambda x, number: x + x.new_full((4,), number),
    "pad": lambda x, number: nnf.pad(x, (1, 1), value=number),
    "index_fill": lambda x, number: x.index_fill(0, torch.tensor([0]), number),
    "scatter": lambda x, number: x.scatter(1, ROWS, number),
    "clamp": lambda x, number: x.clamp(min=number),
}


@pytest.mark.real_cpu
@pytest.mark.parametrize("name", FILLS)
def test_a_number_beyond_the_range_is_refused_as_it_really_is(name: str) -> None:
    def act(x: torch.Tensor) -> torch.Tensor:
        return FILLS[name](x, -1e9)

    (call,) = on("cpu", Doing(act, FP16), {"x": HALF}).breaches()
    assert call.breach is not None
    error = real_step(Doing(act, FP16), {"x": HALF}).error
    assert call.breach.message == str(error).splitlines()[0]
    assert call.operands[0].dtype == FP16


@pytest.mark.real_cpu
@pytest.mark.parametrize("number", [-6e4, float("-inf")])
@pytest.mark.parametrize("name", FILLS)
def test_a_number_within_the_range_is_not(name: str, number: float) -> None:
    def act(x: torch.Tensor) -> torch.Tensor:
        return FILLS[name](x, number)

    assert real_step(Doing(act, FP16), {"x": HALF}).error is None
    assert list(on("cpu", Doing(act, FP16), {"x": HALF}).breaches()) == []


def test_cuda_compares_in_float32() -> None:
    model = Doing(lambda x: x.clamp(min=-1e9), FP16)
    assert list(on("t4", model, {"x": HALF}).breaches()) == []


# ------------------------------------------------------------------------------------------------------ edited lines


def _refusals(
    act: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype | None, at: int = 0
) -> list[str]:
    """The operators that are refused after the line `at` lines into `act` was edited."""
    model = Doing(act, BF16)
    code = act.__code__
    edits = {f"{code.co_filename}:{code.co_firstlineno + at}": dtype} if dtype is not None else {}
    trace = on("cpu", model, {"x": HALF.to(BF16)}, **edits)
    assert trace.failure is None
    return [call.op for call in trace.breaches() if not (call.breach and call.breach.consequence)]


def _made_without_a_dtype(x: torch.Tensor) -> torch.Tensor:
    table = torch.ones(4, 4)
    return x @ table


def _made_of_whole_numbers(x: torch.Tensor) -> torch.Tensor:
    table = torch.arange(16).view(4, 4) / 16
    return x @ table


@pytest.mark.parametrize("act", [_made_without_a_dtype, _made_of_whole_numbers])
def test_an_edit_reaches_what_a_line_makes_without_naming_a_dtype(act: Any) -> None:
    assert _refusals(act, None) == ["aten.mm.default"]
    assert _refusals(act, BF16, at=1) == []


def _attends(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return nnf.scaled_dot_product_attention(wide[None], wide[None], x[None])


def test_an_edit_reaches_what_is_refused_above_the_operators() -> None:
    assert _refusals(_attends, None) == ["torch.scaled_dot_product_attention"]
    assert _refusals(_attends, BF16, at=2) == []


def _writes(x: torch.Tensor) -> torch.Tensor:
    into = torch.zeros(2, 4)
    into.index_add_(0, torch.tensor([0, 1]), x)
    return into


def test_no_edit_of_a_line_changes_the_dtype_of_what_it_writes_into() -> None:
    assert _refusals(_writes, None) == ["aten.index_add_.default"]
    assert _refusals(_writes, BF16, at=2) == ["aten.index_add_.default"]
    assert _refusals(_writes, FP32, at=2) == []


def _multiplies(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return torch.baddbmm(x[None, :, :2], wide[None], wide[None].transpose(1, 2))


def test_autograd_still_fits_gradients_to_their_values() -> None:
    """The step goes on through the backward of the edited line, whose operands are float32 outside of it."""
    assert _refusals(_multiplies, None) == ["aten.baddbmm.default"]
    assert _refusals(_multiplies, BF16, at=2) == []


# ------------------------------------------------------------------------------------------------------------- blame


class Head(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.body = nn.Linear(4, 16).to(BF16)
        self.rnn = nn.GRU(16, 2, batch_first=True).to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rnn(self.body(x))[0]


@pytest.mark.real_cpu
def test_a_check_of_torchs_own_modules_shows_their_weights() -> None:
    inputs = {"x": torch.ones(2, 3, 4, dtype=BF16)}
    assert real_step(Head(FP32), inputs).module == "rnn"
    trace = traced(Head(FP32), inputs)
    (call,) = trace.breaches()
    assert (trace.failure, call.module) == (None, "rnn")
    assert [operand.origin.name for operand in call.operands] == ["body.bias", "rnn.weight_ih_l0"]
    assert not list(traced(Head(BF16), inputs).breaches())


class Holding(nn.Module):
    """A table that is no buffer: `.to()` leaves it as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.table = torch.ones(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x) @ self.table


def test_a_plain_attribute_is_known_by_its_name() -> None:
    call = next(on("cpu", Holding().to(BF16), {"x": HALF.to(BF16)}).breaches())
    assert [(o.origin.kind, o.origin.name) for o in call.operands if o.dtype == FP32] == [
        ("attribute", "table")
    ]


@pytest.mark.parametrize("inside", [False, True])
def test_a_tensor_that_the_loss_brings_is_not_one_that_the_model_keeps(inside: bool) -> None:
    table = torch.ones(4, 4)
    model = Doing((lambda x: x @ table) if inside else (lambda x: x), BF16)

    def plain(given: nn.Module) -> Any:
        return given(HALF.to(BF16)).sum()

    def bringing(given: nn.Module) -> Any:
        return (given(HALF.to(BF16)) @ table).sum()

    call = next(on("cpu", model, plain if inside else bringing).breaches())
    mismatched = next(operand for operand in call.operands if operand.dtype == FP32)
    assert isinstance(mismatched.origin, Origin)
    assert mismatched.origin.kind == ("outside" if inside else "data")


def test_a_second_model_that_the_loss_brings_has_the_names_of_its_weights() -> None:
    teacher = nn.Linear(4, 4)

    def distilled(given: nn.Module) -> Any:
        return (given(HALF.to(BF16)) - teacher(HALF.to(BF16))).sum()

    call = next(on("cpu", Doing(lambda x: x, BF16), distilled).breaches())
    mismatched = [operand.origin for operand in call.operands if operand.dtype == FP32]
    assert {(origin.kind, origin.name) for origin in mismatched if isinstance(origin, Origin)} == {
        ("data", "teacher.weight"),
        ("data", "teacher.bias"),
    }
