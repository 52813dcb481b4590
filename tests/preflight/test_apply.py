"""Every kind of action applies, and undo gives back what was there, bit for bit."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from isotype.core.errors import PrecisionError, UsageError
from isotype.model.boundary import Boundary
from isotype.model.experts.quantize import quantize_parts
from isotype.model.experts.stack import place_stack
from isotype.model.walk import plain_tensors
from isotype.preflight.apply import apply_actions, take_back
from isotype.records.finding import Action
from tests.refusals import refused
from tests.small import BF16, FP16, FP32, WIDTH, Net, ids, net, wide_norms


def state(model: nn.Module) -> dict[str, Any]:
    """Whatever an action can change, with the tensors' identities and bits."""
    facts: dict[str, Any] = {}
    for name, module in model.named_modules():
        facts[f"{name}()"] = type(module)
        facts[f"{name}{{}}"] = {
            key: len(value) if isinstance(value, dict) else None for key, value in vars(module).items()
        }
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        facts[name] = (id(tensor), tensor.data_ptr(), tensor.dtype, _bits(tensor), id(tensor.grad))
        facts[f"{name}.grad"] = None if tensor.grad is None else (tensor.grad.dtype, _bits(tensor.grad))
    return facts


def _bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().clone().untyped_storage())  # type: ignore[call-overload]


def with_buffer() -> Net:
    model = wide_norms(3)
    model.register_buffer("table", torch.full((WIDTH,), 1 / 3))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.1)
    return model


ACTIONS = [
    Action("parameter", "layers.*.norm.weight", "bfloat16"),
    Action("parameter", "layers.1.norm.weight", "float16"),
    Action("buffer", "table", "bfloat16"),
    Action("output", "layers.*.norm", "bfloat16"),
    Action("input", "", "bfloat16"),
    Action("input", "layers.*.proj", "bfloat16"),
    Action("boundary", "layers.*.proj", "compute:bfloat16"),
    Action("boundary", "layers.*.norm", "float32:bfloat16"),
]


@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: f"{action.kind} {action.target}")
def test_undo_gives_back_every_bit(action: Action) -> None:
    model = with_buffer()
    before = state(model)
    undos = apply_actions(model, [action])
    assert state(model) != before
    take_back(undos)
    assert state(model) == before
    assert undos == []


def test_undo_of_many_goes_backwards() -> None:
    model = with_buffer()
    before = state(model)
    both = [Action("parameter", "layers.0.norm.weight", name) for name in ("float16", "bfloat16")]
    undos = apply_actions(model, [*ACTIONS, *both, *reversed(ACTIONS)])
    take_back(undos)
    assert state(model) == before


def test_a_parameter_is_cast_with_its_gradient_and_stays_the_same_object() -> None:
    model = with_buffer()
    weight = model.layers[0].norm.weight
    apply_actions(model, [Action("parameter", "layers.0.norm.weight", "bfloat16")])
    assert model.layers[0].norm.weight is weight
    assert weight.dtype == weight.grad.dtype == BF16
    assert model.layers[1].norm.weight.dtype == FP32


def test_a_star_is_the_number_of_a_layer_and_nothing_else() -> None:
    model = nn.ModuleDict({"a": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), "a_last": nn.Linear(2, 2)})
    apply_actions(model, [Action("parameter", "a.*.weight", "float16")])
    assert {name for name, each in model.named_parameters() if each.dtype == FP16} == {
        "a.0.weight",
        "a.1.weight",
    }


def test_tied_weights_stay_tied() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(4, 4), "head": nn.Linear(4, 4, bias=False)})
    model["head"].weight = model["embed"].weight
    undos = apply_actions(model, [Action("parameter", "head.weight", "bfloat16")])
    assert model["head"].weight is model["embed"].weight
    assert model["embed"].weight.dtype == BF16
    take_back(undos)
    assert model["head"].weight is model["embed"].weight
    assert model["embed"].weight.dtype == FP32


@pytest.mark.parametrize(
    ("kind", "target"),
    [("output", "layers.*.norm"), ("boundary", "layers.*.norm"), ("parameter", "layers.*.norm.weight")],
)
def test_what_mends_a_twin_mends_the_model(kind: Any, target: str) -> None:
    model = wide_norms()
    with pytest.raises(RuntimeError, match="same dtype"):
        model(**ids())
    value = "float32:bfloat16" if kind == "boundary" else "bfloat16"
    apply_actions(model, [Action(kind, target, value)])
    assert model(**ids()).dtype == BF16


def test_casts_at_inputs_reach_keyword_arguments_and_nested_values_but_no_integers() -> None:
    seen: dict[str, Any] = {}

    class Looking(nn.Module):
        def forward(self, x: Any, *, mask: Any) -> torch.Tensor:
            seen.update(x=[leaf.dtype for leaf in x], mask=mask["at"].dtype)
            return x[0]

    model = Looking()
    apply_actions(model, [Action("input", "", "bfloat16")])
    model([torch.ones(2), torch.ones(2, dtype=torch.long)], mask={"at": torch.ones(2)})
    assert seen == {"x": [BF16, torch.long], "mask": BF16}


def test_a_repaired_model_can_be_copied_and_pickled() -> None:
    model = wide_norms()
    apply_actions(model, [Action("output", "layers.*.norm", "bfloat16"), Action("input", "head", "bfloat16")])
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(**ids()), model(**ids()))


class Rotary(nn.Module):
    """Frequencies from a config, as transformers lays them."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("inv_freq", 1.0 / config.base ** (torch.arange(4) / 4))


def test_rounded_frequencies_are_computed_again() -> None:
    model = nn.ModuleDict({"rotary": Rotary(SimpleNamespace(base=10000.0))})
    exact = model["rotary"].inv_freq.clone()
    model.to(BF16)
    rounded = model["rotary"].inv_freq
    undos = apply_actions(model, [Action("buffer", "rotary.inv_freq", "float32")])
    assert torch.equal(model["rotary"].inv_freq, exact)
    take_back(undos)
    assert model["rotary"].inv_freq is rounded


def test_frequencies_without_a_config_are_refused_and_nothing_stays() -> None:
    model = nn.ModuleDict({"rotary": Rotary(SimpleNamespace(base=10000.0)), "proj": nn.Linear(2, 2)}).to(BF16)
    del model["rotary"].config
    before = state(model)
    actions = [Action("parameter", "proj.weight", "float32"), Action("buffer", "rotary.inv_freq", "float32")]
    assert refused(UsageError, apply_actions, model, actions) == (
        "a cast does not restore rounded frequencies\n"
        "  - inv_freq of a Rotary in bfloat16\n"
        "    expected  a module with a config, from which the frequencies can be computed\n"
        "    fix       load the model again, and do not cast its buffers"
    )
    assert state(model) == before


@pytest.mark.parametrize(
    ("action", "kind"),
    [
        (Action("parameter", "layers.*.gate.weight", "bfloat16"), "tensor"),
        (Action("buffer", "layers.0.norm.weight", "bfloat16"), "tensor"),
        (Action("output", "layers.*.gate", "bfloat16"), "module"),
        (Action("output", "layers.0.nor", "bfloat16"), "module"),
    ],
)
def test_an_unknown_target_leaves_nothing_applied(action: Action, kind: str) -> None:
    model = with_buffer()
    before = state(model)
    assert refused(UsageError, apply_actions, model, [*ACTIONS, action]) == (
        "the fix does not apply to this model\n"
        f"  - {action.kind} {action.target!r}\n"
        f"    expected  a {kind} of Net\n"
        "    fix       call repair with the model that was checked"
    )
    assert state(model) == before


def test_a_value_that_is_no_dtype_leaves_nothing_applied() -> None:
    model = with_buffer()
    before = state(model)
    with pytest.raises(PrecisionError, match="unknown dtype"):
        apply_actions(model, [*ACTIONS, Action("output", "layers.*.norm", "bfloat61")])
    assert state(model) == before


@pytest.mark.parametrize("kind", ["setting", "advice", "line"])
def test_what_only_the_user_can_do_is_passed_over(kind: Any) -> None:
    model = net()
    before = state(model)
    assert apply_actions(model, [Action(kind, "autocast", "bfloat16")]) == []
    assert state(model) == before


# ------------------------------------------------------------------------------------------------ quantized layers


def packed(compute: torch.dtype | None = None) -> nn.ModuleDict:
    import bitsandbytes

    torch.manual_seed(0)
    layer = bitsandbytes.nn.Linear4bit(64, 64, compute_dtype=compute, quant_type="nf4")
    return nn.ModuleDict({"proj": layer.to(FP16).to("cpu").requires_grad_(False)})


def test_the_state_of_a_4bit_layer() -> None:
    model = packed()
    codes = model["proj"].weight.data.clone()
    undos = apply_actions(model, [Action("state", "proj", "bfloat16")])
    assert model["proj"].weight.quant_state.dtype == BF16
    assert torch.equal(model["proj"].weight.data, codes)
    take_back(undos)
    assert model["proj"].weight.quant_state.dtype == FP16


@pytest.mark.parametrize("before", [None, FP16])
def test_the_compute_dtype_of_a_4bit_layer(before: torch.dtype | None) -> None:
    model = packed(before)
    kept = model["proj"].compute_dtype, model["proj"].compute_type_is_set
    undos = apply_actions(model, [Action("compute", "proj", "bfloat16")])
    assert (model["proj"].compute_dtype, model["proj"].compute_type_is_set) == (BF16, True)
    take_back(undos)
    assert (model["proj"].compute_dtype, model["proj"].compute_type_is_set) == kept


@pytest.mark.parametrize("kind", ["compute", "state"])
@pytest.mark.parametrize("storage", ["nf4", "int8"])
def test_the_dtype_of_quantized_experts(kind: Any, storage: str) -> None:
    """The action set an attribute of the parametrization's holder, which nothing reads."""
    model = nn.ModuleDict({"experts": nn.Module()})
    dense = torch.ones(2, 64, 64)
    place_stack(model["experts"], "up", *quantize_parts([dense], dense.shape, storage, FP32))
    undos = apply_actions(model, [Action(kind, "experts.parametrizations.up", "bfloat16")])
    assert model["experts"].up.dtype == BF16
    take_back(undos)
    assert model["experts"].up.dtype == FP32


def test_a_boundary_that_was_there_comes_back() -> None:
    model = wide_norms()
    first = Action("boundary", "layers.0.norm", "float32:bfloat16")
    apply_actions(model, [first])
    before = state(model)
    undos = apply_actions(model, [Action("boundary", "layers.*.norm", "compute:float16")])
    take_back(undos)
    assert state(model) == before
    assert isinstance(model.layers[0].norm, Boundary)
    assert not isinstance(model.layers[1].norm, Boundary)


def test_a_border_is_for_modules_with_weights() -> None:
    """`*` stands for any number: what lies between two layers is named by it, too."""
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))
    undos = apply_actions(model, [Action("boundary", "0.*", "compute:bfloat16")])
    assert [isinstance(module, Boundary) for module in model[0]] == [True, False, True]
    assert model(torch.ones(2, 4)).dtype == BF16
    take_back(undos)
    assert not any(isinstance(module, Boundary) for module in model.modules())


def test_a_plain_tensor_of_a_module_is_cast_as_a_buffer_is() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].table = kept = torch.ones(4)
    undos = apply_actions(model, [Action("buffer", "0.table", "bfloat16")])
    assert model[0].table.dtype == BF16
    assert "table" not in model[0]._buffers
    take_back(undos)
    assert model[0].table is kept


def test_a_gradient_is_accumulated_in_another_dtype_and_back() -> None:
    model = nn.Linear(4, 4)
    model.weight.grad_dtype = torch.bfloat16
    model(torch.ones(1, 4)).sum().backward()
    before = model.weight.grad
    undos = apply_actions(model, [Action("gradient", "weight", "float32")])
    assert model.weight.grad is not None
    assert model.weight.grad.dtype == torch.float32
    model(torch.ones(1, 4)).sum().backward()
    assert model.weight.grad.dtype == torch.float32
    take_back(undos)
    assert model.weight.grad is before
    assert model.weight.grad_dtype == torch.bfloat16


def test_a_tensor_in_a_tuple_of_a_module_is_cast_and_put_back() -> None:
    """A table of cosines and sines, which `.to()` does not move."""
    model: Any = nn.Sequential(nn.Linear(2, 2))
    cos, sin = torch.ones(2), torch.zeros(2)
    model[0].tables = before = ((cos, sin), "kept")
    assert [name for name, _ in plain_tensors(model[0])] == ["tables.0.0", "tables.0.1"]
    undos = apply_actions(model, [Action("buffer", "0.tables.0.1", "bfloat16")])
    assert [table.dtype for table in model[0].tables[0]] == [torch.float32, torch.bfloat16]
    assert model[0].tables[0][0] is cos
    take_back(undos)
    assert model[0].tables is before
