from __future__ import annotations

import torch
from torch import nn

import isotype
from tests.rules.traces import BF16, found, traced, verified

RULE = "ist102_adapters"
X = torch.ones(2, 8, dtype=BF16)


class Adapted(nn.Module):
    """A low-rank adapter beside a layer, as PEFT lays it; `cast` as PEFT casts the adapter's input."""

    def __init__(self, cast: bool) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8).to(BF16).requires_grad_(False)
        self.lora_A = nn.Linear(8, 2, bias=False)
        self.lora_B = nn.Linear(2, 8, bias=False)
        self.cast = cast

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.base(x)
        given = x.float() if self.cast else x
        return result + self.lora_B(self.lora_A(given)).to(result.dtype)


def test_float32_adapters_on_bfloat16_activations() -> None:
    (finding,) = verified(nn.Sequential(Adapted(cast=False)), {"input": X}, "IST102")
    assert finding.message == "float32 instead of bfloat16 in the matmul of an adapter"
    assert (finding.module, finding.op, finding.phase) == ("0.lora_A", "aten.mm.default", "forward")
    assert finding.cause == "0.lora_A.weight is float32"
    assert finding.places == ("0.lora_A", "0.lora_B")
    assert finding.notes == (
        "1 more operator in 2 modules fails for the same cause",
        "the device raises: expected m1 and m2 to have the same dtype, but got: c10::BFloat16 != float",
    )
    assert [(fix.description, fix.safety, fix.verified) for fix in finding.fixes] == [
        (
            "let each Linear of 0.lora_A, 0.lora_B compute in bfloat16 and cast its inputs and outputs",
            "safe",
            True,
        ),
        ("run the step under autocast to bfloat16", "safe", True),
        ("cast the operands to bfloat16 at test_ist102.py:26", "safe", True),
    ]


def test_inputs_that_are_cast_to_the_adapters_dtype() -> None:
    assert found(RULE, traced(nn.Sequential(Adapted(cast=True)), {"input": X})) == []


def test_class_weights_of_another_dtype_than_a_trained_head_are_no_adapter() -> None:
    """huggingface/blog #1595: PEFT trains a copy of the classifier; scikit-learn's class weights are float64."""
    net = nn.ModuleDict({"modules_to_save": nn.Linear(8, 3)})
    weight = torch.ones(3, dtype=torch.float64)

    def loss(model: nn.Module) -> torch.Tensor:
        logits = model["modules_to_save"](torch.ones(2, 8))
        return nn.functional.cross_entropy(logits, torch.arange(2), weight=weight)

    trace = traced(net, loss)
    assert found(RULE, trace) == []
    (finding,) = found("ist101_operands", trace)
    report = isotype.check(net, loss, device="t4", wiring=False)
    assert [error.code for error in report.errors] == ["IST101"]  # a GPU raises the same error
    assert finding.message.startswith("float64 instead of float32")
    assert finding.cause == "weight in the loss function is float64"
