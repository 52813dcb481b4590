"""The recorder: where a step breaks, what broke it, and that it goes on to the end."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from isotype.records.trace import Call, Origin, Trace
from isotype.trace.recorder import Recorder
from tests.reality import real_step
from tests.rules.traces import traced
from tests.small import BF16, FP16, FP32, CustomLinear, ids, line, net, wide_norms

Forward = Callable[["Doing", torch.Tensor], torch.Tensor]
X = torch.ones(2, 8, dtype=BF16)


class Doing(nn.Module):
    """A bfloat16 layer, then whatever `act` does with its result; float32 things at hand."""

    def __init__(self, act: Forward) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8).to(BF16)
        self.inner = Acting(act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.proj(x))


class Acting(nn.Module):
    def __init__(self, act: Forward) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))
        self.bias = nn.Parameter(torch.ones(8))
        self.register_buffer("table", torch.ones(4, 8))
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self, x)


def _index_put(m: Any, x: torch.Tensor) -> torch.Tensor:
    into = m.table.clone()
    into[torch.tensor([0, 1])] = x
    return into


def _index_put_mask(m: Any, x: torch.Tensor) -> torch.Tensor:
    into = m.table.clone()
    into[torch.tensor([True, True, False, False])] = x
    return into


BREAKING: dict[str, Forward] = {
    "mm": lambda m, x: torch.mm(x, m.weight),
    "matmul": lambda m, x: x @ m.weight,
    "linear": lambda m, x: functional.linear(x, m.weight),
    "addmm": lambda m, x: torch.addmm(m.bias, x, m.weight),
    "addmm_": lambda m, x: torch.ones(2, 8).addmm_(x, m.weight),
    "bmm": lambda m, x: torch.bmm(x[None], m.weight[None]),
    "einsum": lambda m, x: torch.einsum("ij,jk->ik", x, m.weight),
    "index_put": _index_put,
    "index_put mask": _index_put_mask,
    "index_add": lambda m, x: m.table.index_add(0, torch.tensor([0, 1]), x),
    "index_copy": lambda m, x: m.table.index_copy(0, torch.tensor([0, 1]), x),
    "scatter": lambda m, x: m.table.scatter(0, torch.zeros(2, 8, dtype=torch.long), x),
    "scatter_reduce_": lambda m, x: torch.zeros(2, 8, dtype=BF16).scatter_reduce_(
        0, torch.zeros(2, 8, dtype=torch.long), m.weight[:2], "mean", include_self=False
    ),
    "masked_scatter": lambda m, x: m.table.masked_scatter(torch.eye(4, 8) > 0, x),
    "layer_norm": lambda m, x: functional.layer_norm(x.float(), (8,), m.bias.bfloat16(), m.bias),
    "conv1d": lambda m, x: functional.conv1d(x[None], m.weight[:2, :2, None]),
    "sdpa": lambda m, x: functional.scaled_dot_product_attention(x[None], m.weight[None], m.weight[None]),
    "no kernel": lambda m, x: torch.linalg.qr(x).Q,
}
RUNNING: dict[str, Forward] = {
    "add": lambda m, x: x + m.bias,
    "mul": lambda m, x: x * m.bias,
    "cat": lambda m, x: torch.cat([x, m.table]),
    "where": lambda m, x: torch.where(x > 0, x, m.bias),
    "copy_": lambda m, x: torch.ones(2, 8).copy_(x),
    "masked_fill": lambda m, x: x.masked_fill(x > 0, m.bias[0]),
    "masked value": lambda m, x: torch.ones(2, 8).masked_fill_(torch.ones(2, 8) > 0, x[0, 0]),
    "sdpa float32 mask": lambda m, x: functional.scaled_dot_product_attention(
        x[None], x[None], x[None], attn_mask=m.weight[:2, :2]
    ),
    "float32 norm": lambda m, x: functional.layer_norm(x, (8,), m.bias, m.bias),
    "rms_norm": lambda m, x: functional.rms_norm(x, (8,), m.bias),
    "cross_entropy": lambda m, x: functional.cross_entropy(x.float(), torch.tensor([0, 1])),
}


def breaches(trace: Trace) -> list[Call]:
    return [call for call in trace.breaches() if call.breach is not None and not call.breach.consequence]


@pytest.mark.real_cpu
@pytest.mark.parametrize("name", BREAKING)
def test_the_first_breach_is_where_the_real_step_raises(name: str) -> None:
    outcome = real_step(Doing(BREAKING[name]), {"x": X})
    trace = traced(Doing(BREAKING[name]), {"x": X})
    first = breaches(trace)[0]
    assert outcome.error is not None
    assert (first.phase, first.module) == (outcome.phase, outcome.module) == ("forward", "inner")
    assert first.breach is not None
    assert first.breach.message == str(outcome.error).splitlines()[0]
    assert line(first.source).startswith("test_recorder.py:")
    assert trace.failure is None
    assert any(call.phase == "optimizer" for call in trace.calls)


@pytest.mark.real_cpu
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("name", RUNNING)
def test_what_runs_breaks_nothing(name: str) -> None:
    assert real_step(Doing(RUNNING[name]), {"x": X}).error is None
    trace = traced(Doing(RUNNING[name]), {"x": X})
    assert breaches(trace) == []
    assert trace.failure is None


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("name", RUNNING)
def test_dtypes_are_those_of_the_real_step(name: str) -> None:
    """The dtype that the loss's own cast is given."""
    real = Doing(RUNNING[name])(X).dtype
    calls = traced(Doing(RUNNING[name]), {"x": X}).calls
    last = next(
        (call for call in reversed(calls) if call.phase == "forward" and call.op == "aten.mean.default"), None
    )
    if last is None:  # what the model returns is its loss already
        given, _ = [call for call in calls if call.phase == "forward"][-1].results[0]
        assert given == real
        return
    cast = calls[calls.index(last) - 1]
    given = cast.operands[0].dtype if cast.op == "aten._to_copy.default" else last.operands[0].dtype
    assert given == real


def test_every_mismatch_of_the_step_in_one_run() -> None:
    def several(m: Any, x: torch.Tensor) -> torch.Tensor:
        first = torch.mm(x, m.weight)
        second = torch.bmm(first[None].float(), x.T[None])
        third = m.table.index_add(0, torch.tensor([0, 1]), x)
        return second.sum() + third.sum()

    found = breaches(traced(Doing(several), {"x": X}))
    assert [call.op.split(".")[1] for call in found if call.phase == "forward"] == ["mm", "bmm", "index_add"]


@pytest.mark.real_cpu
def test_a_breach_only_in_the_backward() -> None:
    model = nn.Sequential(nn.Linear(8, 8), CustomLinear(8, 8)).to(BF16)
    (call, *_) = breaches(traced(model, {"input": X}))
    assert (call.phase, call.module, call.op) == ("backward", "1", "aten.mm.default")
    assert real_step(model, {"input": X}).phase == "backward"


@pytest.mark.parametrize("name", ["mm", "scatter_reduce_"])
def test_the_backward_of_a_breach_is_its_consequence(name: str) -> None:
    trace = traced(Doing(BREAKING[name]), {"x": X})
    assert [call.phase for call in breaches(trace)] == ["forward"]


def test_a_conversion_keeps_the_origin_whose_dtype_it_chose() -> None:
    """Behind a second conversion, too: the path does not get longer with every layer."""
    layers = [nn.Linear(8, 8, dtype=BF16 if number < 4 else torch.float32) for number in range(7)]
    products = [
        call for call in breaches(traced(nn.Sequential(*layers), {"input": X})) if call.phase == "forward"
    ]
    flow = [next(o.origin for o in call.operands if o.role == "mat1") for call in products]
    assert [call.module for call in products] == ["4", "5", "6"]
    assert [[(step.kind, step.name) for step in origin.path()] for origin in flow] == [
        [("parameter", "3.bias")],
        *[[("conversion", "aten.addmm.default"), ("parameter", "3.bias")]] * 2,
    ]


def test_a_breach_in_recomputation_is_marked() -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8).to(BF16), nn.Linear(8, 8)

        def _tail(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(x).sigmoid().sigmoid()  # recomputation stops at the last result that is needed

        def forward(self, x: torch.Tensor) -> Any:
            return checkpoint(self._tail, self.first(x), use_reentrant=False)

    found = breaches(traced(Again(), {"x": X}))
    assert [(call.phase, call.module, call.recomputed) for call in found] == [
        ("forward", "second", False),
        ("backward", "second", True),
    ]


class Alone(GradientCheckpointingLayer):  # type: ignore[misc]  # transformers ships no types
    """Computes by itself, without a module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight).sigmoid().sigmoid()


def checkpointed() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8).to(BF16), Alone())
    model[1].gradient_checkpointing = True  # type: ignore[assignment]
    model[1]._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)  # type: ignore[assignment]
    return model.train()


def test_a_layer_whose_hooks_do_not_run_again_is_known_in_recomputation() -> None:
    found = breaches(traced(checkpointed(), {"input": X}))
    assert [(call.phase, call.module, call.recomputed) for call in found] == [
        ("forward", "1", False),
        ("backward", "1", True),
    ]


def test_a_layer_has_its_own_checkpointing_again_afterwards() -> None:
    model = checkpointed()
    before = model[1]._gradient_checkpointing_func  # type: ignore[index]
    with Recorder().watch(model):
        assert model[1]._gradient_checkpointing_func is not before  # type: ignore[index]
    assert model[1]._gradient_checkpointing_func is before  # type: ignore[index]


@pytest.mark.real_cpu
def test_a_breach_in_generation() -> None:
    phases = ("forward", "backward", "optimizer", "generate")
    found = breaches(traced(wide_norms(), ids(), autocast=BF16, phases=phases))
    outcome = real_step(wide_norms(), ids(), autocast=BF16, generate=lambda model: model(**ids()))
    assert {call.phase for call in found} == {"generate"}
    assert (outcome.phase, outcome.module) == ("generate", found[0].module)


def test_an_error_that_no_dtype_explains_ends_the_step_where_it_was_raised() -> None:
    def fails(m: Any, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(3, 5)

    trace = traced(Doing(fails), {"x": X})
    assert trace.failure is not None
    assert (trace.failure.phase, trace.failure.module) == ("forward", "inner")
    assert trace.failure.error == "RuntimeError: shape '[3, 5]' is invalid for input of size 16"
    assert line(trace.failure.source).startswith("test_recorder.py:")


def test_an_error_in_a_trace_that_runs_while_its_caller_handles_another_error() -> None:
    """`isotype run` traces the last known step while the error of the script is handled."""
    model = nn.Sequential(nn.Linear(8, 8, dtype=BF16), Doing(lambda m, x: x.reshape(3, 5)))
    try:
        raise ValueError("the script's error")
    except ValueError:
        trace = traced(model, {"input": torch.ones(4, 8, dtype=BF16)})
    assert trace.failure is not None
    assert trace.failure.module == "1.inner"


def test_an_error_that_the_model_itself_catches() -> None:
    class Trying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bad, self.good = Acting(lambda m, x: x.reshape(3, 5)), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                x = self.bad(x)
            except RuntimeError:
                x = x + 1
            return self.good(x)

    trace = traced(Trying(), {"x": torch.ones(2, 8)})
    assert trace.failure is None
    assert [call.module for call in trace.calls if call.op == "aten.addmm.default"] == ["good"]
    (add,) = [call for call in trace.calls if call.op == "aten.add.Tensor" and call.phase == "forward"]
    assert add.module == ""


# ---------------------------------------------------------------------------------------------------- provenance


def way(trace: Trace, op: str, role: str) -> list[Origin]:
    """From the first origin to the last of the operand `role` of the first call of `op`."""
    call = next(call for call in trace.calls if call.op == op)
    return list(reversed(next(each for each in call.operands if each.role == role).origin.path()))


def described(
    trace: Trace, op: str = "aten.mm.default", role: str = "self"
) -> list[tuple[str, torch.dtype, str, str]]:
    return [(each.kind, each.dtype, each.name, each.module) for each in way(trace, op, role)]


def acting(act: Forward, dtype: torch.dtype = FP32) -> Trace:
    """`act` on an input, alone in its module."""
    return traced(Acting(act), {"x": torch.ones(2, 8, dtype=dtype)})


def test_an_input() -> None:
    assert described(acting(lambda m, x: torch.mm(x, m.weight))) == [("input", FP32, "x", "")]


def test_a_parameter() -> None:
    trace = acting(lambda m, x: torch.mm(x, m.weight))
    assert described(trace, role="mat2") == [("parameter", FP32, "weight", "")]


def test_a_buffer() -> None:
    trace = acting(lambda m, x: torch.mm(m.table, m.weight) + x[0])
    assert described(trace) == [("buffer", FP32, "table", "")]


def test_views_keep_the_origin() -> None:
    trace = acting(lambda m, x: torch.mm(x.reshape(4, 4).T.contiguous()[:2], m.weight[:4]))
    assert described(trace) == [("input", FP32, "x", "")]


def test_a_cast_names_the_line_that_asked_for_it() -> None:
    trace = acting(lambda m, x: torch.mm(x.float(), m.weight), BF16)
    assert described(trace) == [("input", BF16, "x", ""), ("cast", FP32, "float", "")]
    assert line(way(trace, "aten.mm.default", "self")[-1].source).startswith("test_recorder.py:")


def test_a_promotion_names_the_operand_that_won() -> None:
    trace = traced(Doing(lambda m, x: torch.mm(x * m.bias, m.weight)), {"x": X})
    assert described(trace) == [("parameter", FP32, "inner.bias", ""), ("promotion", FP32, "mul", "inner")]


def test_a_promotion_passes_the_blame_on() -> None:
    trace = traced(Doing(lambda m, x: torch.mm(x * m.bias, m.weight)), {"x": X})
    origin = way(trace, "aten.mm.default", "self")[-1]
    assert origin.cause.name == "inner.bias"


def test_autocast() -> None:
    trace = traced(Acting(lambda m, x: torch.mm(x, m.weight)), {"x": torch.ones(2, 8)}, autocast=BF16)
    assert described(trace) == [("input", FP32, "x", ""), ("autocast", BF16, "mm", "")]


def test_a_cast_under_autocast_is_still_a_cast() -> None:
    def act(m: Any, x: torch.Tensor) -> torch.Tensor:
        return x.to(BF16) * 2

    trace = traced(Acting(act), {"x": torch.ones(2, 8)}, autocast=BF16)
    assert described(trace, "aten.mul.Tensor")[-1] == ("cast", BF16, "to", "")


def test_a_constant() -> None:
    trace = acting(lambda m, x: torch.mm(torch.zeros(2, 8), m.weight) + x)
    assert described(trace) == [("constant", FP32, "zeros", "")]


OUTSIDE = torch.ones(2, 8)


def test_a_tensor_outside_of_the_model() -> None:
    trace = acting(lambda m, x: torch.mm(OUTSIDE, m.weight) + x)
    assert described(trace) == [("outside", FP32, "a tensor that the code stores outside of the model", "")]


def test_an_operator_with_a_dtype_of_its_own() -> None:
    trace = acting(lambda m, x: torch.mm((x > 0).double(), m.weight.double()))
    assert [each.kind for each in way(trace, "aten.mm.default", "self")] == ["input", "operator", "cast"]


def test_a_quantization_state() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    layer = bitsandbytes.nn.Linear4bit(64, 64, bias=False, quant_type="nf4").to(FP16).to("cpu")
    layer.requires_grad_(False)

    class Dequantizing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight = bitsandbytes.functional.dequantize_4bit(self.proj.weight, self.proj.weight.quant_state)
            return x @ weight.T

    trace = traced(Dequantizing(), {"x": torch.ones(2, 64, dtype=BF16, requires_grad=True)})
    (call, *_) = breaches(trace)
    mismatched = next(operand for operand in call.operands if operand.dtype == FP16)
    assert (mismatched.origin.cause.kind, mismatched.origin.cause.name) == ("state", "proj")


def test_the_way_of_a_dtype_does_not_grow_with_the_layers() -> None:
    def longest(layers: int) -> int:
        trace = traced(wide_norms(layers), ids())
        return max(len(operand.origin.path()) for call in trace.calls for operand in call.operands)

    assert longest(12) == longest(3) <= 8


def test_calls_of_a_module_that_is_used_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)
            self.b = self.a

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x))

    trace = traced(Twice(), {"x": torch.ones(2, 8)})
    assert [call.module for call in trace.calls if call.op == "aten.addmm.default"] == ["a", "a"]


def test_backward_operators_belong_to_the_module_of_their_forward() -> None:
    trace = traced(net(), ids())
    backward = {call.module for call in trace.calls if call.phase == "backward" and call.flops}
    assert backward == {"layers.0.proj", "layers.1.proj", "head"}


def test_flops_of_a_linear_layer() -> None:
    """Forward 2·rows·in·out; the backward twice that: one product for the weight, one for the input."""
    trace = traced(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)), {"input": torch.ones(3, 8)})
    forward = 2 * 3 * (8 * 16 + 16 * 4)
    assert trace.flops == {FP32: forward + 2 * forward - 2 * 3 * 8 * 16}  # no gradient for the input


def test_what_a_quantized_layer_returns_has_the_origin_of_what_it_was_given() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    layer = bitsandbytes.nn.Linear4bit(64, 64, bias=False, quant_type="nf4", compute_dtype=BF16).to("cpu")

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(64))
            self.proj = layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.mm(self.proj(x * self.scale), torch.ones(64, 64, dtype=BF16))

    (call, *_) = breaches(traced(Wide(), {"x": torch.ones(2, 64, dtype=BF16)}))
    assert call.operands[0].origin.cause.name == "scale"


class Scratch(nn.Module):
    """Two layers that write what they multiply with into one piece of memory, which the first of them allocates."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(self, FP32), Layer(self, BF16)])
        self.memory: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x).sum() + self.layers[1](x.to(BF16)).sum()


class Layer(nn.Module):
    def __init__(self, owner: Scratch, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8, dtype=dtype))
        self.owner = [owner]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = self.owner[0].memory
        if not memory:
            memory.append(torch.empty(64, dtype=self.weight.dtype))
        return torch.mm(x, memory[0].view(8, 8).copy_(self.weight))


def test_memory_that_another_module_allocated_in_its_dtype() -> None:
    (call, *_) = breaches(traced(Scratch(), {"x": torch.ones(2, 8)}))
    mismatched = next(
        operand.origin.cause for operand in call.operands if operand.origin.cause.kind == "scratch"
    )
    assert (mismatched.dtype, mismatched.name, call.module) == (FP32, "layers.0", "layers.1")
