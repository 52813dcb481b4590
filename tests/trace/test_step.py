"""One step on fakes: phases, losses, set-ups, and what is said to be left out."""

from __future__ import annotations

import gc
import threading
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from isotype.model.loss import loss_of
from isotype.precision.devices.profile import device_profile
from isotype.records.request import UNSHARDED, LossOf, Setup, StepRequest
from isotype.records.trace import Trace
from isotype.trace.fake.recorder import FakeRecorder
from isotype.trace.fake.step import trace_step
from tests.reality import real_step
from tests.small import BF16, FP16, FP32, WIDTH, Seen, ids, net, wide_norms

SETUP = Setup(device_profile("cpu"), None, False, "adamw", FP32)
X = {"input": torch.ones(2, WIDTH)}


def phases_seen(trace: Trace) -> list[str]:
    return list(dict.fromkeys(call.phase for call in trace.calls))


# -------------------------------------------------------------------------------------------------------- losses

Pair = namedtuple("Pair", "logits hidden")


@pytest.mark.parametrize(
    "output",
    [
        lambda x: x,
        lambda x: (x, None),
        lambda x: {"ids": torch.zeros(2, dtype=torch.long), "logits": x},
        lambda x: [None, {"deep": [x]}],
        lambda x: Pair(x, x),
        lambda x: {"loss": x.float().mean(), "logits": x},
        lambda x: SimpleNamespace(loss=x.float().mean()),
    ],
    ids=["tensor", "tuple", "dict", "nested", "named tuple", "loss in a dict", "loss as an attribute"],
)
def test_what_a_model_may_return(output: Callable[[torch.Tensor], Any]) -> None:
    made = loss_of(output(torch.full((2, 2), 3.0, dtype=BF16)))
    assert (made.dtype, made.shape, made.item()) == (FP32, (), 3.0)


def test_a_model_that_returns_nothing_to_train_on() -> None:
    class Silent(nn.Module):
        def forward(self, **_: Any) -> Any:
            return {"ids": torch.zeros(2, dtype=torch.long)}

    failure = trace_step(StepRequest(Silent(), X), SETUP).failure
    assert failure is not None
    assert failure.error == "TypeError: the model returned dict without a float tensor to train on"


def test_inputs_as_a_dict_a_closure_and_a_loss_over_inputs_give_the_same_step() -> None:
    def mean(model: nn.Module, inputs: Any) -> torch.Tensor:
        return model(**inputs).float().mean()

    losses: list[Any] = [X, lambda model: mean(model, X), LossOf(mean, X)]
    traces = [trace_step(StepRequest(nn.Linear(WIDTH, 2), loss), SETUP) for loss in losses]
    steps = [[(call.op, call.phase, call.module) for call in trace.calls] for trace in traces]
    assert steps[0] == steps[1] == steps[2]
    assert all(trace.failure is None for trace in traces)


def test_the_loss_of_the_closure_is_the_one_that_is_followed() -> None:
    def squared(model: nn.Module) -> torch.Tensor:
        return model(torch.ones(2, WIDTH)).square().sum()

    ops = [call.op for call in trace_step(StepRequest(nn.Linear(WIDTH, 2), squared), SETUP).calls]
    assert ops.index("aten.pow.Tensor_Scalar") < ops.index("aten.sum.default")


# -------------------------------------------------------------------------------------------------------- phases


@pytest.mark.parametrize(
    "asked",
    [
        ("forward",),
        ("forward", "backward"),
        ("forward", "backward", "optimizer"),
        ("forward", "backward", "unscale", "optimizer", "generate"),
        ("generate",),
    ],
)
def test_the_phases_that_were_asked_for(asked: tuple[Any, ...]) -> None:
    setup = replace(SETUP, phases=asked, scaler="unscale" in asked)
    assert phases_seen(trace_step(StepRequest(nn.Linear(WIDTH, 2), X), setup)) == list(asked)


def test_generation_runs_without_gradients_labels_and_autocast() -> None:
    seen = Seen()

    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(WIDTH, 2)

        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
            seen.append((labels is None, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
            return self.proj(x)

    inputs = {"x": torch.ones(2, WIDTH), "labels": torch.zeros(2, dtype=torch.long)}
    setup = replace(SETUP, phases=("forward", "generate"), autocast=BF16)
    trace_step(StepRequest(Looking(), inputs), setup)
    trace_step(StepRequest(Looking(), inputs), replace(setup, autocast_eval=True))
    assert seen.all() == [(False, True, True), (True, False, False), (False, True, True), (True, False, True)]


def test_generation_of_an_encoder_with_a_decoder() -> None:
    """In a training, T5 and Whisper derive the decoder's tokens from the labels."""
    config = transformers.T5Config(
        vocab_size=32, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0
    )  # fmt: skip
    rows = torch.ones(2, 5, dtype=torch.long)
    inputs = {"input_ids": rows, "labels": rows[:, :3] - 101}
    code = StepRequest(transformers.T5ForConditionalGeneration(config), inputs)
    trace = trace_step(code, replace(SETUP, phases=("generate",)))
    assert trace.failure is None
    assert {call.outside for call in trace.calls} == {None}


def test_generation_keeps_labels_that_the_forward_requires() -> None:
    class Critic(nn.Linear):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * labels

    inputs = {"x": torch.ones(2, 2), "labels": torch.ones(2, 2)}
    assert trace_step(StepRequest(Critic(2, 2), inputs), replace(SETUP, phases=("generate",))).failure is None


def test_generation_of_ones_own() -> None:
    asked = Seen()
    setup = replace(SETUP, phases=("generate",))
    trace_step(StepRequest(nn.Linear(2, 2), X, generate=lambda model: asked.append(type(model))), setup)
    assert asked.all() == [nn.Linear]


def test_nothing_trainable_is_a_note() -> None:
    trace = trace_step(StepRequest(nn.Linear(WIDTH, 2).requires_grad_(False), X), SETUP)
    assert trace.notes == ("no backward: nothing that the loss depends on is trainable",)
    assert trace.failure is None
    assert phases_seen(trace) == ["forward"]


def test_an_optimizer_that_is_not_traced() -> None:
    trace = trace_step(StepRequest(nn.Linear(WIDTH, 2), X), replace(SETUP, optimizer="adamw_bnb_8bit"))
    assert trace.untraced == {"the step of optimizer adamw_bnb_8bit": "the optimizer has its own kernels"}
    assert trace.notes == ()


def test_deepspeeds_part_of_a_step_is_not_traced() -> None:
    trace = trace_step(StepRequest(nn.Linear(WIDTH, 2), X), replace(SETUP, deepspeed=True, devices=2))
    assert trace.untraced == {"DeepSpeed's casts and sharding": UNSHARDED}
    assert not any(kinds.get("buckets") for kinds in trace.memory.phases.values())  # DDP would have them


def test_kernels_of_weights_of_another_class_are_not_traced() -> None:
    """pytorch/ao #4376: a weight that torchao has quantized computes by operators of its own, here without a backward."""
    model = nn.Linear(WIDTH, 2)
    old = model.weight.detach()
    model.weight = nn.Parameter(TwoTensor(old, old))
    expected = {"the kernels of TwoTensor weights": "they are traced as dense float32 weights"}
    trace = trace_step(StepRequest(model, X), SETUP)
    assert trace.untraced == expected
    # The memory is that of the tensors inside the weight, which for torchao and quanto are smaller than a dense weight.
    bias = model.bias.nbytes
    assert trace.memory.phases["forward"]["weights"] == 2 * old.nbytes + bias


def test_what_comes_after_a_failure_is_not_run() -> None:
    class Failing(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            super().forward(x)
            raise ValueError("three channels, not four")

    trace = trace_step(StepRequest(nn.Sequential(Failing(WIDTH, 2)), X), SETUP)
    assert trace.failure is not None
    assert (trace.failure.phase, trace.failure.module) == ("forward", "0")
    assert trace.failure.error == "ValueError: three channels, not four"
    assert phases_seen(trace) == ["forward"]


@pytest.mark.parametrize("function", ["layer", "linear", "product"])
@pytest.mark.parametrize("caught", ["", "at once", "used"])
def test_operators_in_another_thread_end_the_trace(caught: str, function: str) -> None:
    """They run without the recorder's modes, so the trace would lack them."""
    call: Callable[..., torch.Tensor] = {
        "layer": lambda layer, hidden: layer(hidden),
        "linear": lambda layer, hidden: nn.functional.linear(hidden, layer.weight),
        "product": lambda layer, hidden: hidden * layer.weight[0],
    }[function]

    class Threaded(nn.Sequential):
        def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
            outputs = list[Any]()

            def run() -> None:
                try:
                    outputs.append(call(self[1], hidden))
                except RuntimeError:
                    outputs.append(hidden if caught == "at once" else None)

            hidden: torch.Tensor = self[0](input)
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
            return outputs[0] if caught else outputs[0] * 2

    trace = trace_step(StepRequest(Threaded(nn.Linear(WIDTH, 4), nn.Linear(4, 4)), X), SETUP)
    assert trace.failure is not None
    first = "aten.select.int" if function == "product" else "aten.t.default"
    assert (
        trace.failure.error
        == f"OtherThreadError: {first} runs in another thread, which a trace cannot record"
    )
    assert not trace.failure.source or "test_step.py" in trace.failure.source
    assert phases_seen(trace) == ["forward"]


def test_dropout_and_batch_norm_are_those_of_training() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).eval()
    trace = trace_step(StepRequest(model, X), SETUP)
    ops = [call.op for call in trace.calls]
    assert any("bernoulli" in op for op in ops)
    assert "aten.native_batch_norm_backward.default" in ops
    assert not model.training


# ------------------------------------------------------------------------------------------------------- unscale


@pytest.mark.real_cpu
@pytest.mark.parametrize("dtype", [FP32, FP16])
def test_unscale_refuses_float16_gradients_as_the_real_scaler_does(dtype: torch.dtype) -> None:
    model, inputs = nn.Linear(WIDTH, 2).to(dtype), {"input": torch.ones(2, WIDTH, dtype=dtype)}
    setup = replace(SETUP, scaler=True, compute=dtype)
    found = [
        call for call in trace_step(StepRequest(model, inputs), setup).breaches() if call.phase == "unscale"
    ]
    outcome = real_step(model, inputs, scaler=True)
    assert bool(found) == (outcome.phase == "unscale") == (dtype == FP16)
    if found:
        assert [call.breach.message for call in found if call.breach] == [str(outcome.error)]
        assert [operand.origin.name for operand in found[0].operands] == ["weight", "bias"]
        assert [operand.origin.cause.kind for operand in found[0].operands] == ["parameter", "parameter"]


def test_unscale_of_several_dtypes() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 4), nn.LayerNorm(4))
    setup = replace(SETUP, scaler=True)
    trace = trace_step(StepRequest(model, X), setup)
    assert [call.op for call in trace.calls if call.phase == "unscale" and "unscale" in call.op] == [
        "aten._amp_foreach_non_finite_check_and_unscale_.default"
    ]
    assert not list(trace.breaches())


# ---------------------------------------------------------------------------------------------------- checkpointing


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.again = False

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any = None) -> None:
        self.again = True
        self.options = gradient_checkpointing_kwargs or {"use_reentrant": False}

    def forward(self, x: torch.Tensor) -> Any:
        def run(x: torch.Tensor) -> torch.Tensor:
            return self.proj(x).sigmoid().sigmoid()

        return checkpoint(run, x, **self.options) if self.again else run(x)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_is_switched_on_in_the_twin_alone(reentrant: bool) -> None:
    model = Checkpointed()
    inputs = {"x": torch.ones(2, WIDTH, requires_grad=True)}
    kwargs = {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    trace = trace_step(StepRequest(model, inputs), replace(SETUP, gradient_checkpointing=kwargs))
    assert not model.again
    assert trace.failure is None
    again = [call for call in trace.calls if call.recomputed]
    assert "aten.addmm.default" in [call.op for call in again]
    assert {call.module for call in again if call.flops} == {"proj"}
    assert not any(call.recomputed for call in trace_step(StepRequest(model, inputs), SETUP).calls)


# ------------------------------------------------------------------------------------------------------- changes


def _cast(twin: nn.Module) -> None:
    for parameter in twin.parameters():
        parameter.data = parameter.data.to(BF16)


def test_a_change_is_made_to_the_twin_alone() -> None:
    model = nn.Linear(WIDTH, 2)
    trace = trace_step(StepRequest(model, X), SETUP, change=_cast)
    assert {weight.dtype for weight in trace.weights} == {BF16}
    assert {parameter.dtype for parameter in model.parameters()} == {FP32}


def test_magnitudes_come_from_the_real_weights() -> None:
    model = nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(3.0)
    (weight,) = trace_step(StepRequest(model, {"input": torch.ones(1, 1)}), SETUP).weights
    assert (weight.largest, weight.median_magnitude, weight.exact_in) == (3.0, 3.0, BF16)


def test_a_line_that_casts_to_another_dtype() -> None:
    class Casting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(WIDTH, 2).to(BF16)

        def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  # noqa: A002 - the name of the batch's tensor
            return self.proj(input.float())

    setup, inputs = replace(SETUP, compute=BF16), {"input": torch.ones(2, WIDTH, dtype=BF16)}
    first, *_ = trace_step(StepRequest(Casting(), inputs), setup).breaches()
    line = first.operands[1].origin.source
    edited = trace_step(StepRequest(Casting(), inputs), setup, lines={line: BF16})
    assert not list(edited.breaches())


def test_a_part_that_the_forward_casts() -> None:
    class Upcasting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(57, 3).to(BF16)  # a shape that no test before has made a fake of

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head.float()(x)

    model = Upcasting()
    trace = trace_step(StepRequest(model, {"x": torch.ones(2, 57)}), SETUP)
    assert trace.failure is None
    assert not list(trace.breaches())
    assert model.head.weight.dtype == BF16


def test_the_record() -> None:
    trace = trace_step(StepRequest(net(1), ids()), replace(SETUP, compute=BF16))
    assert trace.model == "Net"
    assert trace.modules["layers.0.norm"] == "ScaledNorm"
    assert trace.setup.compute == BF16
    assert trace.flops == {BF16: 2 * 3 * 2 * 3 * (WIDTH * WIDTH + WIDTH * 16)}
    assert list(trace.memory.phases) == ["load", "forward", "backward", "unscale", "optimizer"]


@pytest.mark.parametrize("outer", [False, True])
def test_casts_that_autocast_keeps_end_with_the_forward(outer: bool) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    setup = replace(SETUP, autocast=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=outer):
        trace = trace_step(StepRequest(model, {"input": torch.ones(1, 64)}), setup)
        assert torch.is_autocast_enabled("cpu") is outer
    assert trace.memory.phases["optimizer"]["activations"] == 0


@pytest.mark.parametrize("implementation", [{"fused": True}, {"foreach": True}, {"foreach": False}])
def test_the_state_that_an_optimizer_keeps_stays_in_its_dtype(implementation: dict[str, bool]) -> None:
    model = nn.Linear(WIDTH, 2)
    optimizer = torch.optim.AdamW(model.parameters(), **implementation)
    model(**X).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert not list(trace_step(StepRequest(model, X, optimizer=optimizer), SETUP).breaches())
    model.to(torch.bfloat16)
    given = {name: value.to(torch.bfloat16) for name, value in X.items()}
    (first, *_) = trace_step(StepRequest(model, given, optimizer=optimizer), SETUP).breaches()
    assert first.phase == "optimizer"
    names = {operand.origin.name for operand in first.operands}
    assert "the optimizer's exp_avg of weight" in names
    model(**given).sum().backward()
    with pytest.raises(RuntimeError, match=r"[Ff]loat"):
        optimizer.step()


class OfKinds(torch.optim.Optimizer):
    """Updates matrices and other parameters differently, like many versions of Muon."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        assert all(group.keys() == {"params", "matrices"} for group in groups)
        super().__init__(groups, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(parameter.grad.mT if group["matrices"] else parameter.grad)


class OfRate(torch.optim.SGD):
    def __init__(self, lr: float, matrices: Any) -> None:
        super().__init__(matrices, lr=lr)


def test_an_optimizer_steps_the_parameters_of_its_groups() -> None:
    model = nn.Linear(WIDTH, WIDTH)
    muon = torch.optim.Muon([model.weight])  # refuses biases
    matrices, rest = ({"params": [p], "matrices": p.dim() == 2} for p in (model.weight, model.bias))
    kinds = OfKinds([matrices, rest])
    torch.optim.lr_scheduler.LambdaLR(muon, lambda _: 1.0)
    for optimizer, shapes in ((muon, {(WIDTH, WIDTH)}), (kinds, {(WIDTH, WIDTH), (WIDTH,)})):
        trace = trace_step(StepRequest(model, X, optimizer=optimizer), SETUP)
        assert (trace.failure, trace.notes, trace.untraced) == (None, (), {})
        updates = (call for call in trace.calls if call.phase == "optimizer")
        updated = {operand.shape for call in updates for operand in call.operands}
        assert shapes <= updated
        assert ((WIDTH,) in shapes) == ((WIDTH,) in updated)
    trace = trace_step(StepRequest(model, X, optimizer=OfRate(0.1, [model.weight])), SETUP)
    assert trace.failure is None
    assert trace.untraced["the step of optimizer OfRate"].startswith("its constructor raises")


def test_an_expert_that_stands_for_tokens_without_one_is_taken_for_another() -> None:
    weights = nn.Parameter(torch.ones(4, WIDTH, WIDTH))

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = weights
            self.router = nn.Linear(WIDTH, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            chosen = self.router(x).argmax(-1)
            mask = nn.functional.one_hot(chosen, num_classes=5).T
            out = torch.zeros_like(x)
            for (expert,) in mask.sum(-1).gt(0).nonzero():
                (rows,) = torch.where(mask[expert])
                out.index_add_(0, rows, x[rows] @ self.weights[expert])
            return out

    trace = trace_step(StepRequest(Experts(), {"x": torch.ones(6, WIDTH)}), SETUP)
    assert trace.failure is None


def test_a_part_that_a_checkpointed_forward_casts() -> None:
    class Upcasting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(WIDTH, WIDTH).to(BF16)

        def cast(self, x: torch.Tensor) -> torch.Tensor:
            return self.head.float()(x)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.cast, x, use_reentrant=False)

    trace = trace_step(StepRequest(Upcasting(), {"x": torch.ones(2, WIDTH, requires_grad=True)}), SETUP)
    assert trace.failure is None


@pytest.mark.parametrize("how", ["module", "data"])
def test_a_layer_that_hooks_cast_for_its_forward(how: str) -> None:
    """Layers stored in float8, which hooks cast to the compute dtype and back (layerwise casting of diffusers)."""

    def cast(module: nn.Module, dtype: torch.dtype) -> None:
        if how == "module":
            module.to(dtype)
            return
        for parameter in module.parameters():
            parameter.data = parameter.data.to(dtype)

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).to(BF16)
    stored = model[1].to(torch.float8_e4m3fn).requires_grad_(False)
    stored.register_forward_pre_hook(lambda module, args: cast(module, BF16))
    stored.register_forward_hook(lambda module, args, output: cast(module, torch.float8_e4m3fn))
    x = {"input": torch.ones(2, WIDTH, dtype=BF16)}
    trace = trace_step(StepRequest(model, x), replace(SETUP, compute=BF16))
    assert trace.failure is None
    assert not list(trace.breaches())
    assert [weight.dtype for weight in trace.weights][2:] == [torch.float8_e4m3fn] * 2
    (product,) = [call for call in trace.calls if call.module == "1" and call.op == "aten.addmm.default"]
    assert {operand.origin.kind for operand in product.operands[::2]} == {"cast"}


def test_a_trace_frees_the_twin_and_its_fakes() -> None:
    def recorders() -> int:
        gc.collect(2)
        return sum(type(each) is FakeRecorder for each in gc.get_objects())

    before = recorders()
    trace_step(StepRequest(net(), X), SETUP)
    assert recorders() == before


def test_a_step_ends_where_what_was_seen_is_enough() -> None:
    asked: list[Trace] = []

    def enough(trace: Trace) -> bool:
        asked.append(trace)
        return True

    setup = Setup(device_profile("cpu"), None, False, "sgd", BF16)
    assert phases_seen(trace_step(StepRequest(wide_norms(), ids()), setup, enough=enough)) == ["forward"]
    assert [call.breach is not None for call in asked[0].calls].count(True) == 2
    assert "optimizer" in phases_seen(trace_step(StepRequest(net(), ids()), setup, enough=enough))
    assert len(asked) == 1  # of a step that breaks no contract nothing is asked
