"""Messages of a run on layers that are not fused, or not fused together."""

from __future__ import annotations

import io

import peft
import pytest
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from rich.console import Console

import isotype
from isotype.lora.fuse import FusionReport
from isotype.model.experts.quantize import place_quantized
from isotype.model.experts.stack import stacked_weights
from isotype.train.describe import parameter_counts, show_fusion
from tests.models import quiet, tiny_model


def shown(report: FusionReport, verbose: bool) -> str:
    out = io.StringIO()
    show_fusion(Console(file=out, width=300), report, verbose)
    return out.getvalue()


@pytest.mark.parametrize("verbose", [False, True])
def test_what_is_left_unfused_is_said(verbose: bool) -> None:
    with quiet():
        model = peft.get_peft_model(tiny_model("llama"), peft.LoraConfig(r=4, target_modules="all-linear"))
    layer = model.get_base_model().model.layers[0].mlp.down_proj
    add_hook_to_module(layer.base_layer, AlignDevicesHook(offload=True))
    report = isotype.fuse(model, {"input_ids": None})
    said = shown(report, verbose)
    assert report.unseen
    assert f"layers are fused one by one: {report.unseen}; pass `inputs` for the model's forward" in said
    assert "mlp.down_proj (1 layer): the weights are offloaded (a device map)" in said
    assert "fused: 13" in said


def test_a_line_for_attention_without_a_kernel() -> None:
    with quiet():
        model = peft.get_peft_model(tiny_model("llama"), peft.LoraConfig(r=4, target_modules="all-linear"))
    report = isotype.fuse(model)
    report.attention.slow = "NVIDIA T4 has no fused kernel for bfloat16, so all scores are stored (float32)"
    assert f"attention: {report.attention.slow}" in shown(report, verbose=False)


def test_experts_in_4_bits_count_as_the_values_they_stand_for() -> None:
    model = tiny_model("qwen3-moe")
    counts = parameter_counts(model.requires_grad_(False))
    for _, module, name in list(stacked_weights(model)):
        weight = getattr(module, name).data
        place_quantized(module, name, [weight], "nf4", weight.dtype)
    assert (
        parameter_counts(model) == counts == (sum(p.numel() for p in tiny_model("qwen3-moe").parameters()), 0)
    )
