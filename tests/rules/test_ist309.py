"""Training settings that have no effect; tests/preflight/script/test_run.py has those of a script's optimizers."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import peft
import pytest
import torch
import transformers
from accelerate import Accelerator
from torch import nn

import isotype
from isotype.model.adapters import unmatched
from isotype.model.recompute import idle_checkpoints
from tests.rules.samples import adapter, trace, weight
from tests.rules.traces import batch, found, llama, traced

RULE = "ist309_not_trained"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.encoder(x))
        return out


def of_net(net: Net) -> list[str]:
    return [finding.message for finding in found(RULE, traced(net, {"x": torch.ones(1, 4)}))]


def test_requires_grad_of_a_module_and_a_misspelt_attribute() -> None:
    net = Net()
    net.encoder.requires_grad = False  # type: ignore[assignment]
    net.head.weight.require_grad = False  # type: ignore[attr-defined]
    assert of_net(net) == [
        "encoder.requires_grad = False has no effect: 4 parameters stay trainable",
        "require_grad = False has no effect: 1 parameter stays trainable",
    ]
    net = Net().requires_grad_(False)
    net.head.requires_grad = True  # type: ignore[assignment]
    assert of_net(net) == ["head.requires_grad = True has no effect: 2 parameters stay frozen"]


def test_a_misspelt_argument_of_a_config() -> None:
    wrong = "BitsAndBytesConfig", "bnb_4bit_quant_typ", "bnb_4bit_quant_type", "train.py:5"
    (finding,) = found(RULE, replace(trace(), misspelt=(wrong,)))
    assert finding.message == "bnb_4bit_quant_typ, an argument of BitsAndBytesConfig, has no effect"
    assert finding.source == "train.py:5"
    assert finding.fixes[0].description == "replace bnb_4bit_quant_typ by bnb_4bit_quant_type"
    assert found(RULE, trace()) == []


def test_attributes_that_agree_with_the_parameters() -> None:
    net = Net()
    net.encoder.requires_grad = True  # type: ignore[assignment]
    assert of_net(net) == []
    net = Net()
    net.encoder.requires_grad = False  # type: ignore[assignment]
    adapted = peft.get_peft_model(net, peft.LoraConfig(target_modules=["0", "1"]))  # type: ignore[arg-type]
    assert of_net(adapted) == []


@pytest.mark.parametrize(
    ("targets", "missing"),
    [
        (["q_proj", "fc1", "layers.0.mlp.in_proj"], ["fc1, layers.0.mlp.in_proj"]),
        (["q_proj", "mlp.up_proj"], []),
        (r".*\.q_proj", []),
        ("all-linear", []),
    ],
)
def test_names_that_match_no_module(targets: str | list[str], missing: list[str]) -> None:
    model = llama().unload()
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=targets))
    inputs = {"input_ids": torch.arange(4)[None], "labels": torch.arange(4)[None]}
    findings = found(RULE, traced(adapted, inputs))
    assert [finding.message.partition("match no module: ")[2] for finding in findings] == missing


def test_an_optimizer_of_another_adapter() -> None:
    """huggingface/peft #1303: a second `trainer.train()` uses the optimizer of the first adapter."""
    config = peft.LoraConfig(target_modules=["0", "1"], init_lora_weights=False)
    model = peft.get_peft_model(Net(), config, "first")  # type: ignore[arg-type]
    model.add_adapter("second", config)
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), 0.1)

    def messages(optimizer: torch.optim.Optimizer) -> list[tuple[str, str]]:
        loss = lambda net: net(torch.ones(1, 4)).sum()  # noqa: E731
        report = isotype.check(model, loss, device="cpu", optimizer=optimizer)
        return [(finding.message, finding.cause) for finding in report.findings]

    assert messages(optimizer) == []
    model.set_adapter("second")
    cause = "no optimizer holds base_model.model.encoder.*.lora_A.second.weight and others"
    assert messages(optimizer) == [("no optimizer updates 4 of 4 trainable parameters", cause)]
    assert messages(torch.optim.SGD(model.parameters(), 0.1)) == []


def test_an_optimizer_of_another_model() -> None:
    """The optimizer was created before the model was copied, or belongs to another model."""

    def of_check(model: nn.Module, optimizer: Any) -> list[tuple[str, str]]:
        inputs = {"x": torch.ones(1, 4, dtype=next(model.parameters()).dtype)}
        report = isotype.check(model, inputs, device="cpu", optimizer=optimizer, autocast=False, wiring=False)
        return [
            (f.message, f.cause.partition(" of modules")[0]) for f in report.findings if f.code == "IST309"
        ]

    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    copied = [("no optimizer updates 6 of 6 trainable parameters", "AdamW holds 6 parameters")]
    assert of_check(copy.deepcopy(net), optimizer) == copied
    assert of_check(net, [torch.optim.AdamW(copy.deepcopy(net).parameters()), optimizer]) == []
    wrapped = Accelerator(cpu=True).prepare_optimizer(optimizer)
    assert of_check(net, wrapped) == []
    assert of_check(copy.deepcopy(net), wrapped) == copied
    masters = torch.optim.AdamW([p.detach().float().requires_grad_() for p in net.bfloat16().parameters()])
    assert of_check(net, masters) == []
    parts = [p.detach().float().flatten() for p in net.parameters()]
    padded = torch.cat([*parts, torch.zeros(3)]).requires_grad_()  # as ZeRO's masters
    assert of_check(net, torch.optim.AdamW([padded])) == []


def test_a_step_with_nothing_wrong() -> None:
    assert found(RULE, trace()) == []


def test_gradient_checkpointing_in_eval_mode() -> None:
    """huggingface/diffusers #9850; johnsmith0031/alpaca_lora_4bit #128."""
    model = llama()
    assert idle_checkpoints(model.eval()) == ()
    model.gradient_checkpointing_enable()
    idle = idle_checkpoints(model)
    assert any(name.endswith("layers.0") for name in idle)
    (finding,) = found(RULE, replace(trace(), idle_checkpoints=idle))
    assert finding.message == "gradient checkpointing has no effect: the model is in eval mode"
    assert idle_checkpoints(model.train()) == ()
    assert idle_checkpoints(model.eval().requires_grad_(False)) == ()


def test_a_head_that_peft_names_itself_is_not_missing() -> None:
    """PEFT adds `classifier` and `score` to the saved modules of a sequence classifier, whichever the model has."""
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, pad_token_id=0
    )  # fmt: skip
    model = transformers.LlamaForSequenceClassification(config)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], task_type="SEQ_CLS"))
    assert "classifier" in adapted.peft_config["default"].modules_to_save
    assert unmatched(adapted) == ()


def test_experts_that_have_no_adapters_beside_linear_layers_that_have() -> None:
    """PEFT's `all-linear` adapts no experts of gpt-oss."""
    stacks = [
        weight("experts.gate_up_proj", shape=(4, 8, 16)),
        weight("experts.down_proj", shape=(4, 8, 8)),
    ]
    adapters = [adapter(torch.float32)]
    (note,) = found(RULE, trace([*stacks, *adapters]))
    assert note.severity == "note"
    assert note.message == "2 stacked expert weights have no adapter: 768 values stay frozen"
    (how,) = note.fixes
    assert how.description.endswith("target_parameters: experts.gate_up_proj, experts.down_proj")
    adapted = [replace(stack, name=stack.name.replace(".", ".base_layer.")) for stack in stacks]
    assert list(found(RULE, trace([*adapted, *adapters]))) == []
    assert list(found(RULE, trace(stacks))) == []


class Tower(nn.Module):
    """A frozen encoder, whose first layer's output may require a gradient, and a trained head."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)]).requires_grad_(False)
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.encoder(x)).sum()
        return out


def of_tower(tower: Tower) -> list[Any]:
    return found(RULE, traced(tower, {"x": torch.ones(4, 8)}))


def test_a_backward_through_a_frozen_tower() -> None:
    tower = Tower()
    assert of_tower(tower) == []
    hook = tower.encoder[0].register_forward_hook(lambda *arguments: arguments[2].requires_grad_(True))
    (finding,) = of_tower(tower)
    # Forward: 3 products of the encoder and 1 of the head; backward: 2 of the encoder and 2 of the head, each a fourth of one.
    assert finding.message == "35 % of the FLOPs are a backward through frozen layers, which trains nothing"
    assert finding.places == ("encoder.2", "encoder.1")
    assert finding.cause.startswith(
        "the output of encoder.0 is made to require a gradient at test_ist309.py:"
    )
    assert finding.fixes[0].description.endswith("encoder.forward = torch.no_grad()(encoder.forward)")
    tower.encoder.forward = torch.no_grad()(tower.encoder.forward)  # type: ignore[method-assign]
    assert of_tower(tower) == []
    hook.remove()
    tower = Tower()
    tower.encoder[0].requires_grad_(True)
    assert of_tower(tower) == []


def test_a_backward_through_the_layers_below_the_first_adapter() -> None:
    model = llama(lora=False, layers=2)
    model.enable_input_require_grads()
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], layers_to_transform=[1])
    (finding,) = found(RULE, traced(peft.get_peft_model(model, config), batch()))
    assert finding.message.endswith("a backward through frozen layers, which trains nothing")
    assert all(".layers.0." in place for place in finding.places)
    assert finding.fixes[0].description.startswith("do not call enable_input_require_grads()")
    lowest = peft.LoraConfig(r=4, target_modules=["q_proj"], layers_to_transform=[0])
    model = llama(lora=False, layers=2)
    model.enable_input_require_grads()
    assert found(RULE, traced(peft.get_peft_model(model, lowest), batch())) == []
