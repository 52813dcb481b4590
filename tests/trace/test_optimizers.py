"""Optimizers by name, on the twin's parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from isotype.core.optimizers import OPTIMIZERS, make_optimizer, names_instead, state_bytes, unknown_optimizer
from isotype.precision.devices.profile import device_profile
from isotype.preflight.script.ahead import request_of_script
from isotype.preflight.setup import setup_of
from isotype.records.request import Setup, StepRequest
from isotype.report.check.cost import optimizer_words
from isotype.trace.fake.step import trace_step
from isotype.trace.live.forward import Beginning
from isotype.train.command.command import specs
from tests.allocations import peak_of
from tests.small import BF16, FP16, FP32


def parameters(dtype: torch.dtype = FP32) -> list[torch.Tensor]:
    made = [nn.Parameter(torch.ones(3, 2, dtype=dtype)), nn.Parameter(torch.ones(2, dtype=dtype))]
    for each in made:
        each.grad = torch.full_like(each, 0.5)
    return made


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_name_makes_an_optimizer_that_steps(name: str) -> None:
    trained = parameters()
    made = make_optimizer(name, trained, 0.25)
    assert isinstance(made, torch.optim.Optimizer)
    assert made.param_groups[0]["lr"] == 0.25
    before = [each.detach().clone() for each in trained]
    made.step()
    assert not any(torch.equal(old, new) for old, new in zip(before, trained, strict=True))


def test_fused_and_foreach_kernels() -> None:
    assert make_optimizer("adamw_fused", parameters(), None).defaults["fused"]
    assert make_optimizer("adamw_torch_fused", parameters(), None).defaults["fused"]
    assert make_optimizer("adamw_foreach", parameters(), None).defaults["foreach"]


def test_no_learning_rate_leaves_the_optimizers_own() -> None:
    assert make_optimizer("adamw", parameters(), None).param_groups[0]["lr"] == 1e-3


def test_an_optimizer_that_asks_for_the_loss_is_not_traced() -> None:
    note = make_optimizer(torch.optim.LBFGS([nn.Parameter(torch.ones(1))]), parameters(), None)
    assert note == "the step calls a closure that computes the loss"


def test_an_optimizer_gives_its_class_and_defaults() -> None:
    asked = torch.optim.AdamW([nn.Parameter(torch.ones(1))], lr=0.5, weight_decay=0.125, betas=(0.5, 0.75))
    trained = parameters()
    made = make_optimizer(asked, trained, 0.25)
    assert type(made) is torch.optim.AdamW
    assert made.param_groups[0]["params"] == trained
    assert (made.defaults["weight_decay"], made.defaults["betas"], made.defaults["lr"]) == (
        0.125,
        (0.5, 0.75),
        0.5,
    )
    assert asked.state == {}


def test_an_option_that_was_set_after_the_constructor_stays() -> None:
    first, second = parameters()
    changed = torch.optim.AdamW([first], lr=0.5, weight_decay=0.125)
    changed.param_groups[0]["weight_decay"] = 0.0
    remade = make_optimizer(changed, [first], None)
    assert (remade.param_groups[0]["lr"], remade.param_groups[0]["weight_decay"]) == (0.5, 0.0)
    grouped = torch.optim.AdamW([{"params": [first]}, {"params": [second], "lr": 0.0}], lr=0.5)
    copy = names_instead(grouped, nn.ParameterDict({"a": first, "b": second}))
    remade = make_optimizer(copy, [first, second], None, ["a", "b"])
    assert [(group["params"], group["lr"]) for group in remade.param_groups] == [
        ([first], 0.5),
        ([second], 0.0),
    ]


def test_a_step_of_two_optimizers_has_the_operators_and_states_of_both() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.LayerNorm(4), nn.Linear(4, 4, bias=False))
    body, norm, head = ([*layer.parameters()] for layer in model)
    plain, frozen = torch.optim.SGD(body, lr=0.5), torch.optim.Adagrad(norm, lr=0.0)
    adam = torch.optim.AdamW(head, lr=0.25, weight_decay=0.0)
    request = StepRequest(model, {"input": torch.ones(2, 4)}, device="cpu", optimizer=[plain, frozen, adam])
    setup = setup_of(request)
    assert (setup.optimizer, setup.learning_rate) == ("SGD and Adagrad and AdamW", 0.5)
    assert setup.updates["0.weight"] == ("SGD", 0.5)
    assert setup.updates["1.bias"] == ("Adagrad", 0.0)
    assert optimizer_words(setup) == "SGD lr 0.5 and Adagrad lr 0 and AdamW lr 0.25"
    same_rate = setup_of(replace(request, learning_rate=1e-3))
    assert optimizer_words(same_rate) == "SGD lr 0.001 and Adagrad lr 0.001 and AdamW lr 0.001"
    trace = trace_step(StepRequest(model, request.inputs, optimizer=request.optimizer), setup)
    assert trace.failure is None
    adagrad, adamw = 2 * (16 + 4), 2 * 64 + 4  # the states of both, each with its step counters
    assert trace.memory.phases["forward"]["optimizer"] == adagrad + adamw
    stepped = [call for call in trace.calls if call.phase == "optimizer"]
    updated = {operand.origin.name for call in stepped for operand in call.operands}
    assert {"0.weight", "1.weight", "1.bias", "2.weight"} <= updated
    assert not list(unknown_optimizer(request.optimizer))
    assert [problem.given for problem in unknown_optimizer(["adamw"])] == ["optimizer: a list"]


def test_a_script_s_request_has_all_optimizers_of_its_model() -> None:
    model, other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4)
    muon = torch.optim.Muon([model[0].weight], lr=0.5, weight_decay=0.0)
    adam = torch.optim.AdamW([model[0].bias, *model[1].parameters()], lr=0.25)
    of_other = torch.optim.SGD(other.parameters(), lr=1.0)
    beginning = Beginning(model, {"input": torch.ones(2, 4)}, (), {})
    setup = setup_of(request_of_script(beginning, None, "cpu"))
    assert sorted(setup.optimizer.split(" and ")) == ["AdamW", "Muon"]
    assert set(setup.updates.values()) == {("Muon", 0.5), ("AdamW", 0.25)}
    alone = setup_of(request_of_script(Beginning(other, {"input": torch.ones(2, 4)}, (), {}), None, "cpu"))
    assert (alone.optimizer, alone.learning_rate) == ("SGD", 1.0)
    del muon, adam, of_other


@pytest.mark.parametrize(("dtype", "scales"), [(torch.float16, True), (torch.bfloat16, False)])
def test_masters_outside_of_the_model_need_loss_scaling_in_float16_only(
    dtype: torch.dtype, scales: bool
) -> None:
    """DeepSpeed keeps flat float32 masters for `bf16`, too, and does not scale this loss."""
    model = nn.Linear(4, 4).to(dtype)
    masters = torch.optim.SGD([nn.Parameter(torch.ones(20))], lr=0.5)
    request = request_of_script(Beginning(model, {"input": torch.ones(2, 4)}, (), {}), None, "cpu")
    assert (request.scaler, masters.param_groups[0]["lr"]) == (scales, 0.5)


class _Scaled(torch.optim.SGD):
    def __init__(self, params: Any, *, scale: float, wide: bool = False) -> None:
        super().__init__(params, lr=0.5)
        self.scale, self.wide, self.flat = scale, wide, list(self.param_groups[0]["params"])


def test_an_optimizer_of_ones_own_keeps_its_settings_and_gets_other_parameters() -> None:
    trained = parameters()
    optimizer = make_optimizer(_Scaled([nn.Parameter(torch.ones(1))], scale=2.0, wide=True), trained, None)
    assert (optimizer.scale, optimizer.wide, optimizer.flat) == (2.0, True, trained)


def test_a_callable_and_a_class() -> None:
    made = make_optimizer(lambda given: torch.optim.SGD(given, lr=3.0), parameters(), None)
    assert made.param_groups[0]["lr"] == 3.0
    assert isinstance(make_optimizer(torch.optim.Adagrad, parameters(), None), torch.optim.Adagrad)


@pytest.mark.parametrize(
    "name", ["adamw_bnb_8bit", "paged_adamw_32bit", "lion_8bit", "galore_adamw", "schedule_free_radam"]
)
def test_optimizers_with_kernels_of_their_own_are_said_to_be_left_out(name: str) -> None:
    note = make_optimizer(name, parameters(), None)
    assert note == "the optimizer has its own kernels"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("adamw_8bit", "AdamW8bit"),
        ("adamw8bit", "AdamW8bit"),
        ("lion_8bit", "Lion8bit"),
        ("rmsprop_bnb_8bit", "RMSprop8bit"),
        ("ademamix_8bit", "AdEMAMix8bit"),
        ("lion_32bit", "Lion32bit"),
        ("paged_adamw_8bit", "AdamW8bit"),  # states of few elements are not paged
    ],
)
def test_states_of_kernels_of_their_own_are_counted_as_they_are(name: str, kind: str) -> None:
    optim = pytest.importorskip("bitsandbytes").optim
    model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 70))  # the biases are small
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    real = getattr(optim, kind)(model.parameters())
    real.step()
    states = [state for parameter in model.parameters() for state in real.state[parameter].items()]
    held = sum(value.nbytes for key, value in states if torch.is_tensor(value) and "qmap" not in key)
    setup = Setup(device_profile("a100"), None, scaler=False, optimizer=name, compute=FP32)
    trace = trace_step(StepRequest(model, {"input": torch.ones(2, 100)}), setup)
    assert trace.memory.phases["optimizer"].get("optimizer", 0) == held
    assert trace.memory.phases["backward"].get("optimizer", 0) == held


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("AdamW8bit", "adamw_bnb_8bit"),
        ("AdamW", "paged_adamw_32bit"),
        ("Lion", "lion_32bit"),
        ("Lion8bit", "paged_lion_8bit"),
        ("RMSprop", "rmsprop_bnb"),
        ("RMSprop8bit", "rmsprop_bnb_8bit"),
        ("AdEMAMix", "ademamix"),
        ("AdEMAMix8bit", "paged_ademamix_8bit"),
    ],
)
def test_an_update_on_a_cpu_takes_copies_of_the_largest_parameter(
    kind: str, name: str, dtype: torch.dtype
) -> None:
    optim = pytest.importorskip("bitsandbytes").optim
    model = nn.Sequential(nn.Linear(256, 300), nn.Linear(300, 16)).to(dtype)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    real = getattr(optim, kind)(model.parameters())
    real.step()
    taken, _ = peak_of(real.step)
    setup = Setup(device_profile("cpu-avx2"), None, scaler=False, optimizer=name, compute=dtype)
    request = StepRequest(model, {"input": torch.ones(1, 256, dtype=dtype)})
    phase = trace_step(request, setup).memory.phases["optimizer"]
    assert phase["activations"] == pytest.approx(taken, rel=0.02)


def test_paged_states_leave_a_full_device_but_not_a_cpu() -> None:
    assert state_bytes("paged_adamw_32bit", (1000, 100)) == 0
    assert state_bytes("paged_adamw_32bit", (99_999,)) == 8 * 99_999
    assert state_bytes("paged_adamw_32bit", (100_000,), pages=False) == 800_000


@pytest.mark.parametrize(
    ("name", "shape", "held"),
    [
        ("schedule_free_adamw", (300, 200), 2 * 2 * 60_000),  # a copy of the weights, and the second moment
        ("schedule_free_sgd", (300, 200), 2 * 60_000),
        ("muon", (300, 200), 2 * 60_000),
        ("grokadamw", (300,), 3 * 2 * 300),
        ("lomo", (300, 200), 0),
        ("galore_adafactor", (100, 50), 0),
        (
            "galore_adamw",
            (300, 200),
            2 * 128 * (2 * 300 + 200),
        ),  # two moments of the projected gradient, and the projection
        ("apollo_adamw", (200, 300), 2 * 128 * (2 * 300 + 200)),
        ("galore_adamw_8bit", (300, 200), 128 * (2 * 300 + 2 * 200)),
        ("galore_adamw", (300, 16), 2 * 2 * 4_800),  # already of a low rank
    ],
)
def test_states_of_other_packages_are_counted_by_their_moments(
    name: str, shape: tuple[int, ...], held: int
) -> None:
    assert state_bytes(name, shape, 2) == held


def test_states_of_an_embedding_are_not_quantized() -> None:
    setup = Setup(device_profile("a100"), None, scaler=False, optimizer="adamw_8bit", compute=FP32)
    model = nn.Sequential(nn.Embedding(100, 50), nn.Linear(50, 1, bias=False))
    trace = trace_step(StepRequest(model, {"input": torch.ones(2, dtype=torch.long)}), setup)
    assert trace.memory.phases["optimizer"]["optimizer"] == 2 * 4 * (100 * 50 + 50)


def test_an_unknown_name() -> None:
    (problem,) = unknown_optimizer("adamw_troch")
    assert str(problem) == (
        "optimizer 'adamw_troch'\n"
        f"    expected  one of {', '.join(OPTIMIZERS)}\n"
        "    fix       did you mean adamw_torch or adamw_foreach?"
    )
    assert not list(unknown_optimizer("paged_adamw_8bit"))


def test_every_optimizer_of_a_training_can_be_checked() -> None:
    elsewhere = {
        "adamw_torch_xla",
        "adamw_torch_npu_fused",
        "adamw_anyprecision",
    }  # TPU, NPU, no package on PyPI
    assert [name for name in specs("sft")["optim"].choices if list(unknown_optimizer(name))] == sorted(
        elsewhere, key=specs("sft")["optim"].choices.index
    )


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "adafactor"])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_steps_on_fakes_as_on_real_tensors(name: str, dtype: torch.dtype) -> None:
    """What the real optimizer does in this dtype, the step on fakes does too."""
    model = nn.Linear(2, 3).to(dtype)
    setup = Setup(device_profile("cpu"), None, False, name, dtype)
    trace = trace_step(StepRequest(model, {"input": torch.ones(1, 2, dtype=dtype)}), setup)
    assert trace.failure is None
    assert not list(trace.breaches())
    make_optimizer(name, parameters(dtype), None).step()
    assert any(call.phase == "optimizer" for call in trace.calls)
