from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from isotype import check
from isotype.records.finding import Action
from isotype.rules.ist303_no_scaler import find
from tests.rules.samples import BF16, FP16, FP32, LAYER, adapter, call, operand, packed, trace
from tests.rules.traces import batch, cast, llama, verified


def test_float16_backward_without_scaler() -> None:
    product = call("aten.mm.default", operand(FP16), result=FP16, phase="backward", flops=100)
    (finding,) = find(trace([adapter(FP32)], [product], autocast=FP16))
    assert finding.severity == "warning"
    assert "gradients below 6e-8 become zero" in finding.message
    assert finding.fixes[0].actions == (Action("setting", "scaler", "True"),)


def test_float16_masters_lose_adams_epsilon() -> None:
    update = call("aten.add_.Tensor", operand(FP16), phase="optimizer", numbers=(("other", 1e-8),))
    (finding,) = find(trace([adapter(FP16)], [update], compute=FP16))
    assert (finding.severity, finding.message) == (
        "warning",
        "1 float16 parameter is trained without loss scaling",
    )
    assert "0 / 0" in finding.notes[0]
    assert all(Action("setting", "scaler", "True") in fix.actions for fix in finding.fixes)


@pytest.mark.parametrize(
    ("optimizer", "tokens", "severity"),
    [
        (torch.optim.AdamW, 6, "error"),
        (partial(torch.optim.AdamW, fused=True), 6, "warning"),
        (partial(torch.optim.SGD, lr=0.1), 6, "warning"),
        (partial(torch.optim.AdamW, eps=1e-6), 6, "warning"),  # as openai/CLIP
        (partial(torch.optim.AdamW, foreach=True), 6, "error"),
        (torch.optim.AdamW, 8, "warning"),
    ],
)
def test_rows_of_an_embedding_that_become_nan(optimizer: Any, tokens: int, severity: str) -> None:
    """huggingface/sentence-transformers #3233; the real step decides. The finding stands at the embedding that it names."""
    model = nn.ModuleDict({"head": nn.Linear(4, 4), "table": nn.Embedding(8, 4)}).half()
    ids = torch.arange(tokens)

    def loss(m: nn.Module) -> torch.Tensor:
        return m["head"](m["table"](ids)).float().square().mean()

    request = check(model, loss, device="cpu", optimizer=optimizer(model.parameters()), verify=False)
    (finding,) = (finding for finding in request.findings if finding.code == "IST303")
    assert (finding.severity, finding.module) == (severity, "table" if severity == "error" else "head")
    real = optimizer(model.parameters())
    loss(model).backward()
    real.step()
    assert any(bool(p.isnan().any()) for p in model.parameters()) == (severity == "error")


def test_where_nothing_computes_in_float16_no_scaler_is_added() -> None:
    """A scaler beside autocast to bfloat16 is a finding of its own (IST302): the fix was never shown."""
    (finding,) = find(trace([adapter(FP16)], autocast=BF16))
    assert [fix.description for fix in finding.fixes] == [
        "keep the adapters in float32, so that the optimizer updates float32 values"
    ]
    assert {action.kind for action in finding.fixes[0].actions} == {"parameter"}
    model = cast(llama(FP16), FP16, ["lora"])
    (shown,) = verified(model, batch(), "IST303", autocast=BF16)
    assert [fix.verified for fix in shown.fixes] == [True]


def test_a_scaler_takes_float32_masters_only() -> None:
    """bfloat16 adapters on a float16 model: a scaler alone cannot unscale their gradients on a GPU."""
    product = call("aten.mm.default", operand(FP16), result=FP16, phase="backward", flops=100)
    (finding,) = find(trace([adapter(BF16)], [product], compute=FP16))
    (fix,) = finding.fixes
    assert {action.value for action in fix.actions} == {"float32", "True"}


def test_scaled_and_bfloat16_runs_are_silent() -> None:
    half = call("aten.mm.default", operand(FP16), result=FP16, phase="backward", flops=100)
    wide = call("aten.mm.default", operand(BF16), result=BF16, phase="backward", flops=100)
    assert not list(find(trace([adapter(FP32)], [half], autocast=FP16, scaler=True)))
    assert not list(find(trace([adapter(FP32)], [wide], autocast=BF16)))


def test_4bit_layers_that_alone_compute_in_float16_are_ist404s() -> None:
    half = call("aten.mm.default", operand(FP16), result=FP16, phase="backward", flops=100)
    layers = [adapter(FP32), packed(compute=FP16)]
    assert half.module == LAYER
    assert not list(find(trace(layers, [half], autocast=BF16)))
    elsewhere = call(
        "aten.mm.default", operand(FP16), result=FP16, phase="backward", flops=100, module="head"
    )
    (finding,) = find(trace(layers, [half, elsewhere], autocast=BF16))
    assert finding.cause == "float16 compute, and no GradScaler scales the loss"
