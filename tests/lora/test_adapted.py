"""What was read of a PEFT layer is good as long as nothing of it has changed, and not a call longer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import nn

from isotype.lora.adapted import read
from isotype.model.boundary import BoundarySettings, set_boundary


def layer_with(**lora: Any) -> Any:
    config = peft.LoraConfig(target_modules=["0"], lora_dropout=0.25, **lora)
    model: Any = peft.get_peft_model(nn.Sequential(nn.Linear(6, 4)), config)
    model.add_adapter("other", peft.LoraConfig(r=3, target_modules=["0"]))
    return model.base_model.model[0]


def hook(module: nn.Module) -> None:
    module.register_forward_hook(lambda *_: None)


def replace_hooks(module: Any) -> None:
    module._forward_hooks = OrderedDict()
    hook(module)


CHANGES: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "another adapter": (lambda layer: layer.set_adapter("other"), True),
    "both adapters": (lambda layer: layer.set_adapter(["default", "other"]), True),
    "adapters disabled": (lambda layer: layer.enable_adapters(False), True),
    "an adapter deleted": (lambda layer: (layer.set_adapter("other"), layer.delete_adapter("default")), True),
    "evaluation": (lambda layer: layer.eval(), True),
    "one dropout in evaluation": (lambda layer: layer.lora_dropout["default"].eval(), True),
    "another dropout": (lambda layer: setattr(layer.lora_dropout["default"], "p", 0.5), True),
    "another scale": (lambda layer: layer.scale_layer(2.0), True),
    "another scale of one": (lambda layer: layer.scaling.update(default=7.0), True),
    "another weight of A": (
        lambda layer: setattr(layer.lora_A["default"], "weight", nn.Parameter(torch.ones(8, 6))),
        True,
    ),
    "other data of A": (
        lambda layer: setattr(layer.lora_A["default"].weight, "data", torch.ones(2, 6)),
        True,
    ),
    "another module for B": (
        lambda layer: layer.lora_B.update({"default": nn.Linear(8, 4, bias=True)}),
        True,
    ),
    "the bias taken away": (lambda layer: setattr(layer.base_layer, "bias", None), True),
    "a boundary of the bias": (
        lambda layer: set_boundary(layer.base_layer, BoundarySettings("bias", torch.bfloat16)),
        True,
    ),
    "a boundary of the base": (
        lambda layer: set_boundary(layer.base_layer, BoundarySettings("compute", torch.bfloat16)),
        False,
    ),
    "a boundary of A": (
        lambda layer: set_boundary(layer.lora_A["default"], BoundarySettings("compute", torch.bfloat16)),
        False,
    ),
    "merged": (lambda layer: layer.merge(), False),
    "a trained base": (lambda layer: layer.base_layer.weight.requires_grad_(True), False),
    "a hook on the base": (lambda layer: hook(layer.base_layer), False),
    "a hook on B": (lambda layer: hook(layer.lora_B["default"]), False),
    "a hook in other hooks": (lambda layer: replace_hooks(layer.lora_A["default"]), False),
    "a hook of accelerate": (lambda layer: setattr(layer.base_layer, "_hf_hook", object()), False),
    "another variant": (lambda layer: layer.lora_variant.update(default=object()), False),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen(name: str) -> None:
    change, fused = CHANGES[name]
    layer = layer_with(r=8)
    before = read(layer, None)
    assert before is not None
    assert read(layer, before) is before
    change(layer)
    after, afresh = read(layer, before), read(layer, None)
    assert after is not before
    if not fused:
        assert after is None
        assert afresh is None
        return
    assert after is not None
    assert afresh is not None
    assert after.layer == afresh.layer
    assert [*map(id, after.tensors)] == [*map(id, afresh.tensors)]
    assert read(layer, after) is after


def test_what_changes_nothing_is_read_once() -> None:
    layer = layer_with(r=8)
    before = read(layer, None)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(2)
    hook(layer)  # who listens to the layer itself is called whatever its path
    layer.train()
    assert read(layer, before) is before


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_quantized_base_that_loses_its_state_is_seen(kind: str) -> None:
    import bitsandbytes as bnb

    base: Any
    if kind == "nf4":
        base = bnb.nn.Linear4bit(64, 64, quant_type="nf4", compute_dtype=torch.float32)
        base.weight = bnb.nn.Params4bit(torch.randn(64, 64), requires_grad=False, quant_type="nf4")
    else:
        base = bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False)
        base.weight = bnb.nn.Int8Params(torch.randn(64, 64).half(), requires_grad=False)
    base = base.to("cpu")
    model: Any = peft.get_peft_model(nn.Sequential(base), peft.LoraConfig(target_modules=["0"]))
    layer = model.base_model.model[0]
    before = read(layer, None)
    assert before is not None
    assert read(layer, before) is before
    if kind == "nf4":
        layer.base_layer.weight.quant_state = layer.base_layer.quant_state = None
    else:
        layer.base_layer.weight.SCB = layer.base_layer.state.SCB = None
    assert read(layer, before) is None
