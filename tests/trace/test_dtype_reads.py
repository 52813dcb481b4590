"""A dtype that code takes from another tensor has that tensor's cause; one that it writes out is its own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from isotype.core.dtypes import FLOATS
from isotype.records.trace import Trace
from isotype.rules.kit.groups import groups
from isotype.trace.dtype_reads import call_of
from tests.measured_step import measure_step
from tests.reality import real_step
from tests.rules.traces import traced

BF16, FP32 = torch.bfloat16, torch.float32
X = {"x": torch.ones(2, 8, dtype=BF16)}
CHOSEN: torch.dtype | None = FP32

Act = Callable[["Block", torch.Tensor, torch.Tensor], torch.Tensor]


class Norm(nn.Module):
    """A custom norm that returns what its weight makes of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = x.dtype
        return self.weight * x.float().to(given)


class Block(nn.Module):
    """A float32 norm in a bfloat16 model; `act` makes the projection's input, the norm's output at hand."""

    def __init__(self, act: Act) -> None:
        super().__init__()
        self.norm, self.act = Norm(), act
        self.proj = nn.Linear(8, 8, bias=False, dtype=BF16)
        self.wide = FP32

    @property
    def dtype(self) -> torch.dtype:
        return next(parameter.dtype for parameter in self.parameters())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(self.act(self, x * 2, self.norm(x)))


def _cast(x: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    return x.to(dtype)


def _cast_through(dtype: torch.dtype, x: torch.Tensor) -> torch.Tensor:
    return _cast(x, dtype=dtype)


def _variable(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    rows, wanted = len(y), y.dtype
    narrow = x.dtype
    return x[:rows].to(narrow).to(wanted)


def _options(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    options = {"device": y.device, "dtype": y.dtype}
    return torch.ones(2, 8, **options)


def _closure(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    wanted = y.dtype

    def inner(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(wanted)

    return inner(x)


def _either(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.to(
        y.dtype
        if y is not None
        else torch.float32
    )  # fmt: skip


TAKEN: dict[str, Act] = {
    "to": lambda m, x, y: x.to(y.dtype),
    "to keyword": lambda m, x, y: x.to(device=y.device, dtype=y.dtype),
    "to tensor": lambda m, x, y: x.to(y),
    "type": lambda m, x, y: x.type(y.dtype),
    "no cast": lambda m, x, y: x.float().to(y.dtype),
    "type_as": lambda m, x, y: x.type_as(y),
    "zeros": lambda m, x, y: torch.zeros(2, 8, dtype=y.dtype),
    "zeros_like": lambda m, x, y: torch.zeros_like(y),
    "zeros_like dtype": lambda m, x, y: torch.zeros_like(x, dtype=y.dtype),
    "new_zeros": lambda m, x, y: y.new_zeros(2, 8),
    "new_tensor": lambda m, x, y: y.new_tensor([[1.0] * 8] * 2),
    "tensor": lambda m, x, y: x + torch.tensor([1.0] * 8, dtype=y.dtype),
    "softmax": lambda m, x, y: torch.softmax(x, -1, dtype=y.dtype),
    "another's weight": lambda m, x, y: x.to(m.norm.weight.dtype),
    "first parameter": lambda m, x, y: x.to(next(m.parameters()).dtype),
    "property": lambda m, x, y: x.to(m.dtype),
    "helper": lambda m, x, y: _cast_through(y.dtype, x),
    "variable": _variable,
    "options": _options,
    "closure": _closure,
    "either": _either,
}


def _read_beside(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    assert y.dtype == torch.float32
    return x.to(torch.float32)


def _like(x: torch.Tensor, y: torch.Tensor | None) -> torch.Tensor:
    wanted = y.dtype if y is not None else torch.float32
    return x.to(wanted)


def _called_before(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The second call of a function runs in the frame of the first."""
    for like in (y, None):
        made = _like(x, like)
    return made


def _read_before(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    seen = y.dtype
    return x.float() if seen == torch.float32 else x


CHOOSING: dict[str, Act] = {
    "written out": _read_beside,
    "float": _read_before,
    "called before": _called_before,
    "no cast of a dtype": lambda m, x, y: x.float().to(torch.float32),
    "receiver": lambda m, x, y: x.to(y.dtype).to(x.dtype).to(torch.float32),
    "attribute": lambda m, x, y: x.to(m.wide) if y.dtype == torch.float32 else x,
    "global": lambda m, x, y: x.to(CHOSEN) if y.dtype == torch.float32 else x,
    "default": lambda m, x, y: _cast(x, dtype=torch.float32) if y.dtype == torch.float32 else x,
}


def causes(trace: Trace) -> list[tuple[str, str]]:
    return [(group.cause.kind, group.cause.name) for group in groups(trace)]


@pytest.mark.parametrize("name", TAKEN)
def test_the_tensor_whose_dtype_is_taken_is_the_cause(name):
    trace = traced(Block(TAKEN[name]), X, phases=("forward",))
    assert causes(trace) == [("parameter", "norm.weight")]


@pytest.mark.parametrize("name", CHOOSING)
def test_a_dtype_that_the_code_chooses_is_its_own(name):
    ((kind, _),) = causes(traced(Block(CHOOSING[name]), X, phases=("forward",)))
    assert kind == "cast"


def test_code_without_its_source_chooses_for_itself():
    """Arguments are read from the source; where there is none, nothing is guessed."""
    names: dict[str, Any] = {}
    exec("def act(m, x, y):\n    return x.to(y.dtype)", names)
    ((kind, _),) = causes(traced(Block(names["act"]), X, phases=("forward",)))
    assert kind == "cast"


def test_a_debugger_keeps_its_events_and_the_cause_stays_right():
    """A coverage tool or a debugger traces the lines of the same frames."""
    lines: list[int] = []
    code = TAKEN["to"].__code__

    def tracer(frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code is code and event in ("line", "return"):
            lines.append(frame.f_lineno)
        return tracer if frame.f_code is code else None

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        step = traced(Block(TAKEN["to"]), X, phases=("forward",))
    finally:
        sys.settrace(before)
    assert causes(step) == [("parameter", "norm.weight")]
    assert lines == [code.co_firstlineno] * 2, "the line, and the return after the cast was recorded"


def test_a_frame_keeps_its_mark():
    frame, before = sys._getframe(), sys._getframe().f_trace
    try:
        frame.f_trace = None
        mark = call_of(frame)
        assert call_of(frame) is mark is frame.f_trace
        assert mark(frame, "line", None) is None
    finally:
        frame.f_trace = before


def test_the_evidence_says_who_took_it_and_where():
    from isotype.rules.kit.words import evidence

    (group,) = groups(traced(Block(TAKEN["to"]), X, phases=("forward",)))
    assert (
        evidence(group.mismatched.origin)[-1]
        == f"to takes that dtype at test_dtype_reads.py:{TAKEN['to'].__code__.co_firstlineno}"
    )


def test_a_running_step_knows_it_too():
    model = Block(TAKEN["to"])
    with measure_step(model, X) as measured, pytest.raises(RuntimeError):
        model(**X)
    (broken,) = [call for call in measured.calls if call.breach is not None]
    assert {operand.origin.cause.name for operand in broken.operands if operand.dtype == FP32} == {
        "norm.weight"
    }


# Tensors without dimensions


class Scaled(nn.Module):
    """A gain in float32 (the cause) beside a scale without dimensions in float32 (never the cause)."""

    def __init__(self, act: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.act, self.proj = act, nn.Linear(8, 8, dtype=BF16)
        self.scale, self.gain = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(self.act(self, x))


@pytest.mark.parametrize(
    ("act", "cause"),
    [
        (lambda m, x: m.scale * (m.gain * x), "gain"),
        (lambda m, x: m.scale / (m.gain * x), "gain"),
        (lambda m, x: torch.where(x > 0, m.scale, m.gain), "gain"),
        # Of another category than all that has dimensions, it decides.
        (lambda m, x: m.scale * torch.ones(2, 8, dtype=torch.long), "scale"),
    ],
)
def test_a_tensor_without_dimensions_is_the_cause_only_where_it_decides(act, cause):
    trace = traced(Scaled(act), X, phases=("forward",))
    assert causes(trace) == [("parameter", cause)]
    assert any(operand.dtype in FLOATS for operand in next(trace.breaches()).operands)


@pytest.mark.real_cpu
def test_a_scale_without_dimensions_promotes_nothing():
    model = Scaled(lambda m, x: m.scale * x)
    assert not list(traced(model, X, phases=("forward",)).breaches())
    assert real_step(model, X, phases=("forward",)).error is None


# A backward that is written out


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.wanted = weight.dtype
        ctx.save_for_backward(weight)
        return x @ weight.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        grad = grad.to(ctx.wanted)
        return torch.mm(grad, weight.to(torch.bfloat16)), None


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj, self.weight = nn.Linear(8, 8, dtype=BF16), nn.Parameter(torch.ones(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Product.apply(self.proj(x), self.weight)


@pytest.mark.real_cpu
def test_a_written_backward_is_placed_at_its_own_line():
    assert real_step(Custom(), X).phase == "backward"
    (group,) = groups(traced(Custom(), X))
    code = Product.backward.__code__
    assert group.calls[0].source == f"{code.co_filename}:{code.co_firstlineno + 4}"
    assert (group.cause.kind, group.cause.name) == ("parameter", "weight")


class Halves(nn.Module):
    """One layer of a float16 model is bfloat16, and the sum of both 16-bit dtypes is float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8, dtype=BF16)
        self.inner, self.last = (nn.Linear(8, 8, dtype=torch.float16) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.first(x.bfloat16()) + self.inner(x))
        return out


def test_the_sum_of_two_16_bit_dtypes_has_the_cause_of_the_rarer_one() -> None:
    """unslothai/unsloth #4970: bfloat16 activations in a float16 model on a T4."""
    inputs = {"x": torch.ones(2, 8, dtype=torch.float16)}
    assert causes(traced(Halves(), inputs, phases=("forward",))) == [("parameter", "first.bias")]


def test_a_running_step_knows_a_cast_without_effect():
    """THUDM/CogKit #32: float32 inputs of a bfloat16 model keep the timestep embedding in float32."""

    class Timed(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Linear(4, 4, dtype=torch.bfloat16)

        def forward(self, x, t):
            return self.embed(t[:, None].float().cos().expand(-1, 4).to(x.dtype))

    model, inputs = Timed(), {"x": torch.ones(2, 4), "t": torch.arange(2)}
    with measure_step(model, inputs) as measured, pytest.raises(RuntimeError):
        model(**inputs)
    (broken,) = [call for call in measured.calls if call.breach is not None]
    (origin,) = [operand.origin for operand in broken.operands if operand.dtype == torch.float32]
    assert (origin.cause.kind, origin.cause.name) == ("input", "x")
    assert "test_dtype_reads.py:" in origin.source
