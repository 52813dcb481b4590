from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from isotype.compat.torch_fsdp import fake_process_group
from isotype.records.finding import Action
from isotype.records.trace import Origin, Trace
from tests.rules.samples import LAYER, call, norm, operand, packed, trace
from tests.rules.traces import BF16, FP16, FP32, found, of_llama, on, traced

RULE = "ist601_bfloat16"


@pytest.fixture(scope="module")
def autocast() -> Trace:
    return of_llama(FP32, lora=False, autocast=BF16)


def test_bfloat16_autocast_on_a_t4(autocast: Trace) -> None:
    (finding,) = found(RULE, on(autocast, "t4"))
    assert finding.severity == "warning"
    assert finding.message.startswith("bfloat16 matmuls have no hardware support on NVIDIA T4: ")
    assert finding.cause == "autocast is set to bfloat16"
    assert finding.notes[0].startswith("no bfloat16 tensor cores before compute capability 8.0")
    half, single = finding.fixes
    assert half.description == "run the step in float16 with a GradScaler"
    assert [(a.kind, a.target, a.value) for a in half.actions] == [
        ("setting", "autocast", "float16"),
        ("setting", "scaler", "True"),
        ("setting", "compute", "float16"),
    ]
    assert half.safety == "safe"
    assert single.actions[0].value == "None"


def test_bfloat16_weights_on_a_v100() -> None:
    (finding,) = found(RULE, on(of_llama(), "v100"))
    assert finding.cause == "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight is bfloat16"
    half, single = finding.fixes
    assert (half.safety, single.safety) == ("unsafe", "safe")
    assert half.description == (
        "run the step in float16 with a GradScaler and cast the weights; float16 overflows above 65,504"
    )
    casts = {action.target: action.value for action in half.actions if action.kind == "parameter"}
    assert casts["base_model.model.lm_head.weight"] == "float16"
    assert not any("lora" in name for name in casts)  # float32 masters stay what they are


def test_the_cause_is_a_weight_of_a_product_or_the_cast() -> None:
    class CastInCode(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8, dtype=BF16))
            self.up = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (
                nn.functional.linear((x * self.scale.float()).bfloat16(), self.up.weight.bfloat16())
                .float()
                .sum()
            )

    in_code = traced(CastInCode(), {"x": torch.ones(2, 8)})
    (finding,) = found(RULE, on(in_code, "t4"))
    assert finding.cause is not None
    assert finding.cause.startswith("a cast to bfloat16 at test_ist601.py:")
    weights = traced(
        nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)).to(BF16), {"input": torch.ones(2, 8, dtype=BF16)}
    )
    (finding,) = found(RULE, on(weights, "t4"))
    assert finding.cause == "1.weight is bfloat16"


def test_the_estimate_takes_float32s_rate(autocast: Trace) -> None:
    # The lower bound cannot exceed the ratio of the rates.
    (finding,) = found(RULE, on(autocast, "t4"))
    assert finding.cost is not None
    assert finding.cost.slowdown is not None
    assert 1.0 <= finding.cost.slowdown <= 65.0 / 8.1


def test_bfloat16_at_half_of_float16s_rate_on_an_mi100(autocast: Trace) -> None:
    (finding,) = found(RULE, on(autocast, "mi100"))
    assert finding.message.startswith(
        "bfloat16 matmuls run 2 times slower than float16 on AMD Instinct MI100"
    )
    assert finding.cost is not None
    assert finding.cost.slowdown is not None
    assert 1.0 <= finding.cost.slowdown <= 184.6 / 92.3
    (half,) = finding.fixes  # float32 would be slower still
    assert half.description == "run the step in float16 with a GradScaler"


@pytest.mark.parametrize(
    ("running", "words"),
    [
        (
            BF16,
            "run the step in float16 with a GradScaler and set the compute dtype of the quantized layers to float16",
        ),
        (FP16, "set the compute dtype of the quantized layers to float16"),
    ],
)
def test_a_fix_names_the_compute_dtype_of_quantized_layers(running: torch.dtype, words: str) -> None:
    product = call("aten.mm.default", operand(BF16), flops=300, module=LAYER)
    step = trace([packed(BF16, BF16), norm(FP32)], [product], autocast=running, scaler=running == FP16)
    (finding,) = found(RULE, on(step, "t4"))
    assert finding.fixes[0].description == words


@pytest.mark.parametrize("device", ["a100", "h100", "mi300x"])
def test_devices_with_bfloat16(autocast: Trace, device: str) -> None:
    assert found(RULE, on(autocast, device)) == []


def test_other_dtypes_on_a_t4() -> None:
    assert found(RULE, on(of_llama(FP16, autocast=FP16), "t4")) == []
    assert found(RULE, on(of_llama(FP32), "t4")) == []


def test_an_optimizer_that_computes_in_bfloat16_in_a_float16_step() -> None:
    """Muon orthogonalizes its updates in bfloat16: no setting of the step changes this."""
    update = call("aten.mm.default", operand(BF16), operand(BF16), flops=300, phase="optimizer")
    step = trace(calls=[update], autocast=FP16, scaler=True, optimizer="Muon")
    (finding,) = found(RULE, on(step, "t4"))
    assert finding.cause == "the step of Muon computes in bfloat16"
    (fix,) = finding.fixes
    assert fix.description == "choose an optimizer without matmuls in bfloat16, such as AdamW"


def test_a_cast_in_the_code_is_the_cause() -> None:
    hidden = replace(operand(BF16), origin=Origin("cast", BF16, "to", source="model.py:7"))
    (finding,) = found(RULE, on(trace(calls=[call("aten.mm.default", hidden, hidden, flops=300)]), "t4"))
    assert finding.cause == "a cast to bfloat16 at model.py:7"


def wide_result(dtype: torch.dtype) -> Trace:
    """A step with one product of `dtype` operands that is asked for in float32."""
    asked = call("aten.mm.dtype", operand(dtype), operand(dtype), result=FP32)
    return trace(calls=[asked, asked], compute=FP32)


def test_a_float32_result_of_bfloat16_operands_on_a_t4() -> None:
    (finding,) = found(RULE, on(wide_result(BF16), "t4"))
    assert finding.severity == "error"
    assert finding.message == "NVIDIA T4 does not support bfloat16 matmuls with a float32 result"
    assert finding.cause == "a product of bfloat16 operands has a float32 result at model.py:1"
    assert [fix.description for fix in finding.fixes] == [
        "run the step in float16 with a GradScaler",
        "run the step in float32: float32 is as fast as emulated bfloat16 or faster, but slower than float16",
    ]


@pytest.mark.parametrize(
    ("op", "batch", "kernel"), [("mm", 2, "gemm"), ("bmm", 2, "bgemm"), ("bmm", 1, "gemm")]
)
def test_the_kernel_that_torch_names(op: str, batch: int, kernel: str) -> None:
    product = call(f"aten.{op}.dtype", operand(BF16, shape=(batch, 4, 4)), operand(BF16), result=FP32)
    (finding,) = found(RULE, on(trace(calls=[product], compute=FP32), "t4"))
    assert (
        f"torch raises: {kernel} input type at::BFloat16 and output type float is only supported for CUDA devices with "
        "compute capability 8.0 or higher" in finding.notes
    )


@pytest.mark.parametrize("device", ["a100", "h100"])
def test_a_float32_result_where_bfloat16_is_native(device: str) -> None:
    assert found(RULE, on(wide_result(BF16), device)) == []
    assert found(RULE, on(wide_result(FP16), "t4")) == []


def test_inputs_follow_the_weights() -> None:
    model, given = nn.Sequential(nn.Linear(8, 8, dtype=BF16)), {"input": torch.ones(2, 8, dtype=BF16)}
    (finding,) = found(RULE, on(traced(model, given), "mps"))
    assert all(
        Action("input", "", action) in fix.actions
        for fix, action in zip(finding.fixes, ("float16", "float32"), strict=True)
    )
    (finding,) = found(RULE, on(of_llama(), "mps"))
    assert not any(action.kind == "input" for fix in finding.fixes for action in fix.actions)


def test_the_dtype_in_which_fsdp2_gathers_the_weights() -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 64))
    with fake_process_group(1) as mesh:
        fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
        (finding,) = found(RULE, on(traced(model, {"input": torch.ones(64, 16)}), "v100"))
    assert (
        finding.cause
        == "FSDP2 gathers the weights in bfloat16, by MixedPrecisionPolicy(param_dtype=torch.bfloat16)"
    )
    assert [fix.description for fix in finding.fixes] == [
        "pass MixedPrecisionPolicy(param_dtype=torch.float16), and scale the loss by a GradScaler",
        "pass MixedPrecisionPolicy(param_dtype=torch.float32)",
    ]
