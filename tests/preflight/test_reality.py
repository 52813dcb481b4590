"""What repair says is what happens: with nothing left to the caller the real step runs, and undo takes it all back."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from isotype.model.walk import plain_tensors
from isotype.preflight.check import check
from isotype.preflight.repair import repair
from tests.reality import Inputs, real_step
from tests.small import BF16, WIDTH, Net, ids, net, wide_norms

SetUp = tuple[nn.Module, Inputs]


def hidden(dtype: torch.dtype = BF16, name: str = "input") -> dict[str, torch.Tensor]:
    return {name: torch.randn(2, 3, WIDTH).to(dtype)}


def wide(model: nn.Module, *names: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """`model` with these modules in another dtype than the rest."""
    for name in names:
        model.get_submodule(name).to(dtype)
    return model


class Upcast(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.float()


class Functional(nn.Module):
    """Its own weight, one that it borrows from a layer that is never called, a buffer and a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.layer = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("shift", torch.randn(WIDTH), persistent=False)
        self.scale = torch.rand(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        held = nn.functional.linear(x, self.weight) * self.scale + self.shift
        return nn.functional.linear(held, self.layer.weight)


class Held(nn.Module):
    """Layers in a plain list and dict, which no `.to()` reaches, the list's with a reference to its owner."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks, self.heads = [nn.Linear(WIDTH, WIDTH)], {"main": nn.Sequential(nn.Linear(WIDTH, WIDTH))}
        self.blocks[0].owner = [self]  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.heads["main"](self.blocks[0](self.first(x)))  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x)[0])  # type: ignore[no-any-return]


class Checkpointed(Net):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(x)  # type: ignore[no-any-return]


def _hooked() -> SetUp:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).to(BF16)
    model[0].register_forward_hook(_upcast)
    return model, hidden()


def _upcast(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output.float()


def _parametrized() -> SetUp:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).to(BF16)
    nn.utils.parametrize.register_parametrization(model[1], "weight", Upcast(), unsafe=True)
    return model, hidden()


def _functional() -> SetUp:
    model = Functional().to(BF16)
    model.weight.data, model.layer.weight.data = model.weight.data.float(), model.layer.weight.data.float()
    return model, hidden(name="x")


def _tied() -> SetUp:
    model = net()
    model.head.weight = model.embed.weight
    return wide(model, "head"), ids()


def _convolutions() -> SetUp:
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3)).to(BF16)
    return wide(layers, "1", dtype=torch.float16), {"input": torch.randn(2, 3, 8, 8)}


def _weight_norm() -> SetUp:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).to(BF16)
    magnitude: Any = nn.utils.parametrizations.weight_norm(model[1]).parametrizations
    magnitude.weight.original0.data = magnitude.weight.original0.data.float()
    return model, hidden()


def _lora(**narrow: torch.dtype) -> SetUp:
    import peft

    config = peft.LoraConfig(r=2, target_modules=["proj"])
    model: Any = peft.get_peft_model(net(), config)
    layer = model.base_model.model.layers[1].proj
    for name, dtype in narrow.items():
        getattr(layer, name)["default"].to(dtype)
    return model, ids()


def _outside() -> SetUp:
    teacher = torch.randn(WIDTH, WIDTH)
    batch = hidden()["input"]
    return nn.Linear(WIDTH, WIDTH).to(BF16), lambda model: (model(batch) @ teacher).float().mean()


SET_UPS: dict[str, Callable[[], SetUp]] = {
    "norms": lambda: (wide_norms(), ids()),
    "a layer, a norm": lambda: (wide(net(), "layers.0.proj", "layers.1.norm"), ids()),
    "three dtypes": lambda: (wide(wide(net(), "layers.0"), "head", dtype=torch.float16), ids()),
    "few of many": lambda: (wide(Net(), "layers.1.proj", dtype=BF16), ids()),
    "checkpointing": lambda: (wide(Checkpointed().to(BF16), "layers.0.norm", "layers.1.proj"), ids()),
    "an input": lambda: (nn.Sequential(nn.Linear(WIDTH, 4), nn.ReLU()).to(BF16), hidden(torch.float32)),
    "a hook": _hooked,
    "a parametrization": _parametrized,
    "a parametrization of torch": _weight_norm,
    "functional weights": _functional,
    "layers in a list and a dict": lambda: (Held().to(BF16), hidden(name="x")),
    "tied weights": _tied,
    "convolutions": _convolutions,
    "a recurrent layer": lambda: (wide(Recurrent().to(BF16), "layer"), hidden(name="x")),
    "one adapter's A": lambda: _lora(lora_A=BF16),
    "one adapter's B": lambda: _lora(lora_B=BF16),
    "a tensor of the loss": _outside,
}


def everything(model: nn.Module) -> dict[str, Any]:
    """All that a repair may touch: classes, attributes, hooks, tensors with their dtypes, places and bytes."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        hooks = [
            len(hooks) for key, hooks in sorted(vars(module).items()) if key.endswith(("hooks", "kwargs"))
        ]
        found[name] = (type(module), sorted(vars(module)), hooks)
        tensors = {**module._parameters, **module._buffers, **dict(plain_tensors(module))}
        for key, held in tensors.items():
            if held is not None:
                read = held.detach().reshape(-1).clone().view(torch.uint8)
                found[f"{name}.{key}"] = (id(held), held.dtype, held.data_ptr(), read.tolist())
    return found


@pytest.mark.real_cpu
@pytest.mark.parametrize("name", SET_UPS)
def test_the_real_step_runs_where_nothing_is_left_to_the_caller(name: str) -> None:
    def built() -> SetUp:
        torch.manual_seed(0)
        return SET_UPS[name]()

    assert real_step(*built()).error is not None
    model, inputs = built()
    before, keys = everything(model), list(model.state_dict())
    repairs = repair(model, check(model, inputs, device="cpu", optimizer="sgd", verify=False), unsafe=True)
    errors = [finding for finding, _ in repairs.left if finding.severity == "error"]
    assert bool(repairs.to_do) == (
        name == "a tensor of the loss"
    )  # repair reaches no tensor outside of the model
    assert not errors
    assert list(model.state_dict()) == keys
    if not repairs.to_do:
        copies = [copy.deepcopy(model)]
        if "parametrization" not in name:  # torch itself pickles none
            copies.append(pickle.loads(pickle.dumps(model)))
        for each in copies:
            assert real_step(each, inputs).error is None
    repairs.undo()
    assert everything(model) == before


@pytest.mark.parametrize(
    ("fault", "fix"),
    [
        ({"lora_A": BF16}, "cast base_model.model.layers.*.proj.lora_A.default.weight to float32"),
        ({"lora_B": BF16}, "cast base_model.model.layers.*.proj.lora_B.default.weight to float32"),
    ],
)
def test_one_adapter_of_another_dtype_is_cast_to_that_of_the_others(
    fault: dict[str, torch.dtype], fix: str
) -> None:
    model, inputs = _lora(**fault)
    repairs = repair(model, check(model, inputs, device="cpu", verify=False))
    assert [each.description for each in repairs] == [f"{fix}, the dtype of the other adapters"]
    assert {weight.dtype for name, weight in model.named_parameters() if "lora" in name} == {torch.float32}
