"""The four public reports that the project began with, built as reported: they really fail here, and are predicted.

The first variant of each has two layers, so that one cause breaks several; the others have one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tests.corpus.cases.crashes_fused import (
    WEIGHT_BUFFERS,
    Adapted,
    FusedMLP,
    FusedProjections,
    dequantize,
    second_model,
    two_models,
    unsloth_fp16,
)
from tests.corpus.cases.crashes_nemo import automodel_gpt_oss
from tests.corpus.cases.crashes_parts import (
    BF16,
    FP16,
    FP32,
    MLP,
    Attention,
    Block,
    Decoder,
    RawLora,
    ids,
    linear_4bit,
    lora,
    matmul_error,
    nf4,
    normal,
    set_layers,
    watch_step,
)
from tests.corpus.judge import judge_scenario
from tests.corpus.scenario import Broken, Scenario
from tests.corpus.test_cases_real import run
from tests.models import HIDDEN, one_layer, tiny_batch, tiny_model
from tests.pairwise import few

# ------------------------------------------------------------- QLoRA compute dtype float16 beside a bfloat16 model


class DequantizedLinear(nn.Module):
    """An nf4 layer that multiplies with its dequantized weight itself, as kernels outside of bitsandbytes do."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.quantized = linear_4bit(layer, FP16, state=FP16)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, dequantize(self.quantized))


def dequantized_float16() -> Broken:
    """`bnb_4bit_compute_dtype=float16` decides what weights come out as; model and adapters are bfloat16."""
    torch.manual_seed(0)
    model = Decoder([Block(Attention(), MLP())]).to(BF16).requires_grad_(False)
    set_layers(model, ["q_proj", "v_proj"], lambda layer: RawLora(DequantizedLinear(layer), BF16))
    return Broken(model, {"input_ids": ids()})


def float16_compute(device: str = "cpu") -> Broken:
    """A bfloat16 Llama on nf4 layers with float16 compute; bfloat16 adapters, hence a bfloat16 optimizer."""
    model = lora(nf4(one_layer(tiny_model("llama", BF16)), FP16), autocast_adapter_dtype=False)
    return Broken(model, tiny_batch("llama"), BF16, device=device)


def trl_casts_to_bfloat16() -> Broken:
    """A float16 Llama on nf4, `fp16=True`: TRL casts every trainable parameter to bfloat16, a GradScaler runs."""
    model = lora(nf4(one_layer(tiny_model("llama", FP16)), FP16))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(BF16)
    return Broken(model, tiny_batch("llama"), FP16, scaler=True, device="t4")


def float16_products(broken: Broken) -> str | None:
    """How many products run in float16 in a model whose activations are bfloat16."""
    products = [s for s in watch_step(broken) if s.op.split(".")[1] in ("mm", "addmm", "linear")]
    half = sum(FP16 in seen.operands for seen in products)
    return f"{half} of {len(products)} products run in float16" if half else None


# --------------------------------------------------------------------------------------------- the reports

REPORTS: tuple[Scenario, ...] = (
    *(
        Scenario(
            f"NVIDIA-NeMo/Automodel #1622 {variant}",
            partial(automodel_gpt_oss, variant, layers=2 if variant == "lora" else 1),
            ("IST102", "IST101") if variant == "qlora" else ("IST101",),
            r"layers\.\S*input_layernorm",
            crashes=r"(mat1|m1) and (mat2|m2) .*same dtype, but got:? [Ff]loat (and|!=) (c10::)?BFloat16",
            phase="forward",
        )
        for variant in ("lora", "dora", "qlora")
    ),
    *(
        Scenario(
            f"unsloth #4005 backward {fused}",
            partial(unsloth_fp16, fused, layers=2 if fused == "mlp" else 1),
            ("IST105", "IST401"),
            r"base_layer",
            crashes=r"same dtype, but got:? (c10::)?Half (and|!=) (c10::)?BFloat16",
            phase="backward",
        )
        for fused in ("mlp", "attention")
    ),
    Scenario(
        "unsloth #4005 scaler",
        trl_casts_to_bfloat16,
        ("IST302",),
        r"lora_",
        notes="TRL's cast to bfloat16 under fp16=True: CUDA's unscale takes no bfloat16 gradients, a CPU's does.",
    ),
    Scenario(
        "unsloth #4005 both",
        partial(unsloth_fp16, "mlp", BF16, "t4", layers=1),
        ("IST105", "IST401", "IST302"),
        r"base_layer",
        crashes=r"same dtype, but got:? (c10::)?Half (and|!=) (c10::)?BFloat16",
        phase="backward",
        notes="Both faults at once: the scaler's is only reached once the backward is fixed.",
    ),
    Scenario(
        "QLoRA float16 compute, dequantized weights",
        dequantized_float16,
        ("IST401", "IST101"),
        r"quantized|q_proj",
        crashes=matmul_error(BF16, FP16),
    ),
    Scenario(
        "QLoRA float16 compute, bitsandbytes layers",
        float16_compute,
        ("IST401", "IST404"),
        r"compute|proj",
        cost=float16_products,
        notes="bitsandbytes casts in and out of each layer: nothing raises, float16's range is all that is left.",
    ),
    Scenario(
        "QLoRA bfloat16 without the hardware",
        partial(float16_compute, "t4"),
        ("IST601",),
        r"bfloat16|autocast|t4|T4",
        notes="A T4 has no bfloat16 tensor cores; this CPU runs the step.",
    ),
    Scenario(
        "unsloth #4026 sequential",
        second_model,
        ("IST406",),
        r"a tensor that the code stores outside of the model is bfloat16",
        crashes=matmul_error(FP16, BF16),
    ),
    Scenario(
        "unsloth #4026 alternating",
        partial(two_models, "121"),
        ("IST406",),
        r"the scratch tensor that (first|second)\.layers\.0\.self_attn\.q_proj allocated is b?float16",
        crashes=matmul_error(FP16, BF16),
    ),
    Scenario(
        "unsloth #4026 concurrent",
        partial(two_models, "21"),
        ("IST406",),
        r"the scratch tensor that (first|second)\.layers\.0\.self_attn\.q_proj allocated is b?float16",
        crashes=matmul_error(BF16, FP16),
    ),
)
BY_NAME = {report.case: report for report in REPORTS}


@pytest.fixture(autouse=True)
def _fresh_buffers() -> Any:
    """The process' buffers are of no other test."""
    yield
    WEIGHT_BUFFERS.clear()


@pytest.mark.real_cpu
@pytest.mark.parametrize("report", REPORTS, ids=lambda report: report.case)
def test_really_fails(report: Scenario) -> None:
    broken = report.build()
    if report.cost is not None:
        assert report.cost(broken)
        return
    outcome = run(broken)
    if not report.crashes:
        assert report.notes
        assert outcome.error is None
        return
    assert outcome.error is not None, "the step ran"
    assert re.search(report.crashes, str(outcome.error)), repr(outcome.error)
    assert outcome.phase == report.phase


# ----------------------------------------------------------------- the cause is the cause: without it, the step runs


def norms_in_bfloat16(broken: Broken) -> Broken:
    """What Automodel's fix did: nothing is restored to float32."""
    broken.model.to(BF16)
    return broken


def states_in_float16(broken: Broken) -> Broken:
    """Every quantization state in the activations' dtype."""
    for module in broken.model.modules():
        if hasattr(getattr(module, "weight", None), "quant_state"):
            module.weight.quant_state.dtype = FP16  # type: ignore[union-attr]
    return broken


def one_dtype(broken: Broken) -> Broken:
    """Both models in the dtype of the buffer."""
    broken.model.to(BF16)
    for module in broken.model.modules():
        if hasattr(getattr(module, "weight", None), "quant_state"):
            module.weight.quant_state.dtype = BF16  # type: ignore[union-attr]
    return broken


def empty_buffer(broken: Broken) -> Broken:
    """The first model's buffer is gone."""
    WEIGHT_BUFFERS.clear()
    return broken


CURES: tuple[tuple[str, Callable[[Broken], Broken]], ...] = (
    *((f"NVIDIA-NeMo/Automodel #1622 {variant}", norms_in_bfloat16) for variant in ("lora", "dora", "qlora")),
    *((f"unsloth #4005 backward {fused}", states_in_float16) for fused in ("mlp", "attention")),
    ("unsloth #4005 both", states_in_float16),
    ("QLoRA float16 compute, dequantized weights", one_dtype),
    ("unsloth #4026 sequential", empty_buffer),
    ("unsloth #4026 alternating", one_dtype),
    ("unsloth #4026 concurrent", one_dtype),
)


@pytest.mark.real_cpu
@pytest.mark.parametrize(("name", "cure"), CURES, ids=[name for name, _ in CURES])
def test_without_the_cause_the_step_runs(name: str, cure: Callable[[Broken], Broken]) -> None:
    outcome = run(cure(BY_NAME[name].build()))
    assert outcome.error is None, repr(outcome.error)
    assert outcome.loss is not None
    assert torch.isfinite(outcome.loss)


@pytest.mark.parametrize("fused", [FusedMLP, FusedProjections])
def test_the_fused_backward_is_right_where_dtypes_agree(fused: Any) -> None:
    """The kernels of the reports differentiate correctly: what fails is their dtypes, not their arithmetic."""
    sizes = ((HIDDEN, 96), (HIDDEN, 96), (96, HIDDEN)) if fused is FusedMLP else ((HIDDEN, HIDDEN),) * 3
    torch.manual_seed(0)
    layers = [Adapted(linear_4bit(nn.Linear(*size, bias=False), FP32), FP32) for size in sizes]
    weights = [w for layer in layers for w in (layer.lora_A.weight, layer.lora_B.weight)]
    x = normal(2, 5, HIDDEN).requires_grad_()

    def reference(hidden: torch.Tensor) -> torch.Tensor:
        def adapted(layer: Adapted, value: torch.Tensor) -> torch.Tensor:
            return value @ dequantize(layer.base_layer).T + 2.0 * layer.lora_B(layer.lora_A(value))

        if fused is FusedProjections:
            return torch.stack([adapted(layer, hidden) for layer in layers])
        return adapted(layers[2], F.silu(adapted(layers[0], hidden)) * adapted(layers[1], hidden))

    out = fused.apply(x, [layer.base_layer for layer in layers], *weights)
    got = torch.autograd.grad(
        (torch.stack(out) if isinstance(out, tuple) else out).square().sum(), (x, *weights)
    )
    expected = torch.autograd.grad(reference(x).square().sum(), (x, *weights))
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)


@pytest.mark.real_cpu
@pytest.mark.filterwarnings("ignore")
@few(
    "report",
    BY_NAME,
    "NVIDIA-NeMo/Automodel #1622 lora",
    "unsloth #4005 both",
    "QLoRA float16 compute, dequantized weights",
    "unsloth #4026 sequential",
)
def test_is_found_with_its_cause_and_runs_after_repair(report: Scenario) -> None:
    assert judge_scenario(report).problems == ()
