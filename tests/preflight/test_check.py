"""check: nothing of the caller's changes, one cause is one finding, and its errors name every problem at once."""

from __future__ import annotations

import gc
import random
import sys
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import peft
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformers import AutoModelForCausalLM

from isotype.core.dtypes import dtype_name
from isotype.core.errors import PrecisionError, UsageError
from isotype.core.optimizers import OPTIMIZERS
from isotype.precision.policy import PrecisionPolicy
from isotype.preflight.check import check
from isotype.preflight.run import with_settings
from isotype.preflight.setup import compute_dtype
from isotype.records.finding import Action
from isotype.records.request import LossOf, Setup
from isotype.records.trace import Trace
from isotype.trace.fake.recorder import FakeRecorder
from tests.models import tiny_batch, tiny_model
from tests.reality import real_step
from tests.refusals import refused
from tests.small import BF16, FP16, FP32, WIDTH, ids, net, wide_norms

# ------------------------------------------------------------------------------------------------------- untouched


def facts(model: nn.Module) -> dict[str, Any]:
    """Everything about a model that a check could change."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        found[f"{name}:class"] = type(module)
        found[f"{name}:training"] = module.training
        found[f"{name}:dict"] = [(key, id(value)) for key, value in vars(module).items()]
        found[f"{name}:held"] = {
            key: dict(value) if key.endswith("hooks") else list(value)
            for key, value in vars(module).items()
            if isinstance(value, dict)
        }
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        found[f"{name}:tensor"] = _tensor(tensor)
        found[f"{name}:grad"] = None if tensor.grad is None else _tensor(tensor.grad)
        found[f"{name}:hooks"] = (
            tensor._backward_hooks,
            getattr(tensor, "_post_accumulate_grad_hooks", None),
        )
        found[f"{name}:attributes"] = {key: id(value) for key, value in vars(tensor).items()}
        state = getattr(tensor, "quant_state", None)
        found[f"{name}:state"] = None if state is None else (id(state), state.dtype, _tensor(state.absmax))
    return found


def _tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    bits = (
        None
        if tensor.is_meta
        else tensor.detach().clone().view(torch.uint8).tolist()
        if tensor.ndim
        else tensor.item()
    )
    return (
        id(tensor),
        type(tensor),
        tensor.dtype,
        tensor.device.type,
        tensor.requires_grad,
        tensor._version,
        tensor.is_meta or tensor.data_ptr(),
        bits,
    )


def process() -> dict[str, Any]:
    """What else of the process a check could change."""
    return {
        "python": random.getstate(),
        "numpy": repr(numpy.random.get_state()),
        "torch": torch.get_rng_state().tolist(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in ("cpu", "cuda")
        ],
        "cache": torch.is_autocast_cache_enabled(),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "threads": torch.get_num_threads(),
        "modes": (len(_get_current_dispatch_mode_stack()), torch._C._len_torch_function_stack()),
        "hooks": torch.nn.modules.module._has_any_global_hook(),
        "tracing": (sys.gettrace(), sys.getprofile()),
        "warnings": list(warnings.filters),
        "swap": torch.__future__.get_swap_module_params_on_conversion(),
    }


@dataclass(frozen=True)
class Case:
    """A model, its inputs, and how it is checked."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], Any]
    options: dict[str, Any]
    held: Callable[[Any], list[torch.Tensor]] = lambda inputs: [
        value for value in inputs.values() if isinstance(value, torch.Tensor)
    ]


class Ending(nn.Module):
    """Keeps state of its own, draws random numbers, and raises in the middle."""

    def __init__(self, error: bool) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, 2)
        self.register_buffer("count", torch.zeros(()))
        self.calls: list[int] = []
        self.error = error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append(1)
        self.count.add_(1)
        self.kept = self.drop(self.first(x)) + torch.rand(WIDTH) + random.random() + numpy.random.rand()
        x.add_(1)
        if self.error:
            raise ValueError("in the middle")
        return self.last(self.kept)


def meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2))


def tied() -> nn.Module:
    made = net()
    made.head = nn.Linear(WIDTH, 16, bias=False).to(BF16)
    made.head.weight = made.embed.weight
    return made


def with_gradients() -> nn.Module:
    made = wide_norms()
    for parameter in made.parameters():
        parameter.grad = torch.full_like(parameter, 0.25)
    made.layers[0].eval()
    made.layers[1].register_forward_hook(lambda *_: None)
    next(made.parameters()).register_hook(lambda gradient: gradient * 2)
    return made


def adapted() -> nn.Module:
    peft = pytest.importorskip("peft")
    return peft.inject_adapter_in_model(
        peft.LoraConfig(r=2, target_modules=["proj"], lora_dropout=0.1), net()
    )


def packed(kind: str) -> nn.Module:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    if kind == "nf4":
        layer = bitsandbytes.nn.Linear4bit(
            64, 64, quant_type="nf4", compute_dtype=BF16, compress_statistics=True
        )
    else:
        layer = bitsandbytes.nn.Linear8bitLt(64, 64, has_fp16_weights=False)
    frozen = layer.to(BF16).to("cpu").requires_grad_(False)
    return nn.Sequential(nn.Linear(64, 64).to(BF16), frozen, nn.Linear(64, 2).to(BF16))


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """The first check imports parts of torch that add a filter to `warnings`."""
    check(nn.Linear(2, 2), {"input": torch.ones(1, 2)}, device="cpu", verify=False)


def _closure(rows: torch.Tensor) -> Any:
    def loss(model: nn.Module) -> torch.Tensor:
        return model(rows).mean()

    loss.held = [rows]  # type: ignore[attr-defined]
    return loss


def _wide(dtype: torch.dtype = FP32) -> dict[str, torch.Tensor]:
    return {"input": torch.ones(3, 64, dtype=dtype)}


CASES: dict[str, Case] = {
    "healthy": Case(net, ids, {}),
    "broken": Case(wide_norms, ids, {}),
    "gradients, hooks, eval": Case(
        with_gradients, ids, {"phases": ("forward", "backward", "optimizer", "generate")}
    ),
    "autocast and scaler": Case(wide_norms, ids, {"autocast": "fp16", "scaler": True}),
    "for a gpu": Case(wide_norms, ids, {"device": "a100", "autocast": "bf16"}),
    "state, randomness": Case(lambda: Ending(False), lambda: {"x": torch.ones(2, WIDTH)}, {}),
    "an error midway": Case(lambda: Ending(True), lambda: {"x": torch.ones(2, WIDTH)}, {}),
    "a closure": Case(
        lambda: Ending(False), lambda: _closure(torch.ones(2, WIDTH)), {}, lambda given: given.held
    ),
    "meta": Case(meta, lambda: {"input": torch.ones(2, WIDTH, dtype=BF16)}, {}),
    "tied": Case(tied, ids, {}),
    "adapters": Case(adapted, ids, {}),
    "nf4": Case(lambda: packed("nf4"), lambda: _wide(BF16), {}),
    "int8": Case(lambda: packed("int8"), lambda: _wide(BF16), {}),
    "nf4, mixed": Case(lambda: packed("nf4"), _wide, {}),
    "batch norm": Case(
        lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), lambda: {"input": torch.ones(3, 4)}, {}
    ),
    "inputs that require gradients": Case(
        lambda: nn.Linear(4, 4), lambda: {"input": torch.ones(3, 4, requires_grad=True)}, {}
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_nothing_of_the_callers_changes(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    model, inputs = case.make(), case.inputs()
    given = [(_tensor(each), each.grad) for each in case.held(inputs)]
    before, around = facts(model), process()
    check(model, inputs, **{"device": "cpu", **case.options})
    assert facts(model) == before
    after = process()
    assert {key for key in around if around[key] != after[key]} == set()
    assert [(_tensor(each), each.grad) for each in case.held(inputs)] == given


def test_modes_that_are_on_around_a_check() -> None:
    model = wide_norms()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with torch.no_grad(), torch.autocast("cpu", dtype=FP16):
            before = process()
            report = check(model, ids(), device="cpu", verify=False)
            assert process() == before
    finally:
        torch.use_deterministic_algorithms(False)
    assert [finding.code for finding in report.errors] == ["IST101"]
    assert any(call.phase == "backward" for call in report.trace.calls)


def test_a_default_dtype_and_device_are_those_of_the_step() -> None:
    torch.set_default_dtype(FP16)
    try:
        report = check(
            nn.Linear(4, 4), lambda model: model(torch.ones(2, 4)).sum(), device="cpu", verify=False
        )
    finally:
        torch.set_default_dtype(FP32)
    assert {weight.dtype for weight in report.trace.weights} == {FP16}
    assert report.ok


def test_the_same_report_twice() -> None:
    model = wide_norms()
    first, second = (check(model, ids(), device="cpu") for _ in range(2))
    assert [str(finding) for finding in first.findings] == [str(finding) for finding in second.findings]


@pytest.mark.real_cpu
def test_the_real_step_runs_afterwards_as_without_a_check() -> None:
    def step(checked: bool) -> torch.Tensor:
        torch.manual_seed(3)
        model = Ending(False)
        if checked:
            check(model, {"x": torch.ones(2, WIDTH)}, device="cpu")
        random.seed(0)
        numpy.random.seed(0)
        outcome = real_step(model, {"x": torch.ones(2, WIDTH)})
        assert outcome.loss is not None
        return outcome.loss.detach()

    assert torch.equal(step(False), step(True))


# -------------------------------------------------------------------------------------------------------- findings


def test_one_cause_is_one_finding() -> None:
    (finding,) = check(wide_norms(5), ids(), device="cpu", verify=False).errors
    assert finding.places == tuple(f"layers.{number}.proj" for number in range(5))


def test_two_causes_are_two_findings_of_one_run() -> None:
    model = wide_norms()
    model.head.double()
    report = check(model, ids(), device="cpu", verify=False)
    assert [(finding.code, finding.cause) for finding in report.errors] == [
        ("IST101", "layers.0.norm.weight is float32"),
        ("IST101", "head.weight is float64"),
    ]
    assert report.complete


@pytest.mark.real_cpu
def test_the_first_error_is_where_the_real_step_raises() -> None:
    report = check(wide_norms(), ids(), device="cpu", verify=False)
    assert report.errors[0].module == real_step(wide_norms(), ids()).module


def test_a_clean_step() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    report = check(model, {"input": torch.ones(2, 4)}, device="cpu")
    assert report.findings == ()
    assert report.ok
    assert report.raise_for_errors() is None


def test_fixes_are_tried_only_where_that_was_asked_for() -> None:
    def verified(verify: bool) -> set[bool]:
        report = check(wide_norms(), ids(), device="cpu", verify=verify)
        return {fix.verified for fix in report.errors[0].fixes if fix.actions[0].kind != "advice"}

    assert verified(True) == {True}
    assert verified(False) == {False}


# -------------------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize("inputs", [None, [1, 2], "ids"])
def test_arguments_that_do_not_fit_are_all_named(inputs: Any) -> None:
    assert refused(
        UsageError, check, net(), inputs, optimizer="adamw_troch", phases=("forward", "training", "sleep")
    ) == (
        "the step cannot be checked with these arguments\n"
        "  - optimizer 'adamw_troch'\n"
        f"    expected  one of {', '.join(OPTIMIZERS)}\n"
        "    fix       did you mean adamw_torch or adamw_foreach?\n"
        f"  - inputs of type {type(inputs).__name__}\n"
        "    expected  the dict of arguments of the model (labels included), or a callable model -> loss\n"
        "    fix       isotype.check(model, {'input_ids': …, 'labels': …})\n"
        "  - phases ['training', 'sleep']\n"
        "    expected  of load, forward, backward, unscale, optimizer, generate\n"
        "    fix       omit them"
    )


def test_what_is_no_model() -> None:
    assert refused(UsageError, check, {"a": 1}, ids()) == (
        "nothing to check\n"
        "  - a dict\n"
        "    expected  an nn.Module with its inputs, or a transformers or TRL trainer\n"
        "    fix       isotype.check(model, inputs)"
    )


@pytest.mark.parametrize("options", [{"device": "t5"}, {"autocast": "bf61"}])
def test_names_that_nobody_knows(options: dict[str, Any]) -> None:
    with pytest.raises(PrecisionError, match="unknown d"):
        check(net(), ids(), **options)


def test_an_unknown_optimizer() -> None:
    with pytest.raises(UsageError, match="optimizer 'adamw_troch'"):
        check(net(), ids(), device="cpu", optimizer="adamw_troch")


def setup_of(**options: Any) -> Setup:
    report = check(nn.Linear(4, 4), {"input": torch.ones(2, 4)}, verify=False, **{"device": "cpu", **options})
    return report.trace.setup


def test_the_set_up() -> None:
    plain = setup_of()
    assert (plain.autocast, plain.scaler, plain.optimizer, plain.compute) == (None, False, "adamw", FP32)
    assert plain.batch == {"input": (2, 4)}
    assert setup_of(autocast="fp16").scaler
    assert not setup_of(autocast="bf16").scaler
    assert not setup_of(autocast="fp16", scaler=False).scaler
    assert setup_of(autocast="bf16").compute == BF16
    assert setup_of(phases=("optimizer", "forward")).phases == ("forward", "optimizer")
    assert setup_of(device="t4").profile.name == "t4"


def test_a_policy_gives_what_was_not_said() -> None:
    policy = PrecisionPolicy(compute=BF16, storage="bfloat16")
    assert setup_of(policy=policy).compute == BF16
    assert setup_of(policy=policy).policy is policy


def test_an_optimizer_gives_its_learning_rate() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.125)
    made = setup_of(optimizer=optimizer)
    assert (made.optimizer, made.learning_rate) == ("SGD", 0.125)


def test_a_batch_that_is_no_plain_dict() -> None:
    class Batch(dict[str, torch.Tensor]):
        pass

    assert check(net(), Batch(ids()), device="cpu", verify=False).trace.failure is None
    loss = LossOf(lambda model, inputs: model(**inputs).mean(), ids())
    assert check(net(), loss, device="cpu", verify=False).trace.setup.batch == {"ids": (2, 3)}


# --------------------------------------------------------------------------------------------------- compute dtype


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_a_model_of_one_dtype_computes_in_it(dtype: torch.dtype) -> None:
    assert compute_dtype(net().to(dtype)) == dtype


def test_most_elements_of_linear_layers_decide() -> None:
    model = net()
    model.head.float()
    assert compute_dtype(model) == BF16
    assert compute_dtype(wide_norms()) == BF16
    assert compute_dtype(nn.LayerNorm(4).to(FP16)) == FP16
    assert compute_dtype(nn.ReLU()) == FP32


def test_adapters_do_not_decide() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=64, target_modules=["proj", "head"])
    assert compute_dtype(peft.inject_adapter_in_model(config, net())) == BF16


def test_a_4bit_layer_decides_by_what_it_computes_in() -> None:
    assert compute_dtype(nn.Sequential(*list(packed("nf4"))[1:2])) == BF16


# -------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("target", "value", "expected"),
    [
        ("autocast", "bfloat16", BF16),
        ("autocast", "None", None),
        ("scaler", "True", True),
        ("learning_rate", "0.5", 0.5),
        ("optimizer", "sgd", "sgd"),
        ("fsdp", "2", 2),
    ],
)
def test_settings_are_read_as_in_python(target: str, value: str, expected: Any) -> None:
    changed = with_settings(
        setup_of(), [Action("setting", target, value), Action("parameter", "a", "float16")]
    )
    assert getattr(changed, target) == expected


def test_float16_autocast_brings_a_scaler() -> None:
    made = with_settings(setup_of(), [Action("setting", "autocast", dtype_name(FP16))])
    assert made.scaler
    both = [Action("setting", "autocast", "float16"), Action("setting", "scaler", "False")]
    assert not with_settings(setup_of(), both).scaler


def test_another_compute_dtype_is_another_policy() -> None:
    """A fix that takes the whole step to another dtype does not contradict the policy: it changes what was asked for."""
    policy = PrecisionPolicy(compute=FP16, storage="float16", loss_scaling=True)
    actions = [
        Action("setting", name, value) for name, value in (("compute", "bfloat16"), ("scaler", "False"))
    ]
    changed = with_settings(replace(setup_of(), policy=policy), actions).policy
    assert changed == PrecisionPolicy(compute=BF16, storage="bfloat16", loss_scaling=False)
    quantized = replace(policy, storage="nf4")
    kept = with_settings(replace(setup_of(), policy=quantized), actions).policy
    assert kept is not None
    assert kept.storage == "nf4"


def test_float16_that_a_policy_asked_for_has_a_fix_where_bfloat16_is_faster() -> None:
    policy = PrecisionPolicy(compute=FP16, storage="float16", loss_scaling=True)
    report = check(net().to(FP16), ids(), policy=policy, device="cpu-amx")
    slow = next(finding for finding in report.findings if finding.code == "IST602")
    assert [(fix.description, fix.verified) for fix in slow.fixes] == [
        ("run the step in bfloat16 and cast the weights", True)
    ]


def test_a_check_keeps_no_trace_and_no_twin_alive() -> None:
    def alive() -> set[int]:
        gc.collect(2)
        return {id(each) for each in gc.get_objects() if type(each) in (Trace, FakeRecorder)}

    others = alive()  # what earlier tests of this process hold
    report = check(wide_norms(), ids(), device="cpu")
    kept = weakref.ref(report.trace)
    assert kept() is not None
    del report
    assert alive() <= others
    assert kept() is None


def test_a_checkpoint_loaded_in_another_dtype(tmp_path: Path) -> None:
    # transformers sets `config.dtype` to the dtype of the load, so only the file names the checkpoint's.
    tiny_model("llama", torch.bfloat16).save_pretrained(tmp_path)
    wide = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert wide.config.dtype == torch.float32
    adapted = peft.get_peft_model(wide, peft.LoraConfig(target_modules="all-linear"))
    report = check(adapted, tiny_batch("llama"), device="a100")
    (finding,) = (f for f in report.findings if f.code == "IST501")
    assert finding.message.startswith(
        "the checkpoint's config names bfloat16, but the frozen weights are float32: "
    )
    as_stored = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto"),
        peft.LoraConfig(target_modules="all-linear"),
    )
    assert "IST501" not in {f.code for f in check(as_stored, tiny_batch("llama"), device="a100").findings}
