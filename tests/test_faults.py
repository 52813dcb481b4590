"""Every kind of fault is injected and run: the real step ends where it is written here, and the check predicts that end.

`benchmarks/agreement.py` does the same with every architecture of the zoo, in every dtype, plain and under autocast.
"""

from __future__ import annotations

import pytest
import torch

from tests.faults import FAULTS, HEALTHY, Setup
from tests.pairwise import few
from tests.prediction import check_of, own_name, predicted_end
from tests.reality import real_step
from tests.zoo import ARCHITECTURES

BF16, FP16 = torch.bfloat16, torch.float16
MATMUL = "expected m1 and m2 to have the same dtype"
ATTENTION = "Expected query, key, and value to have the same dtype"
UNSCALE = "Attempting to unscale FP16 gradients"
LAYER = "model.layers.1"
QUERY, FIRST_QUERY = f"{LAYER}.self_attn.q_proj", "model.layers.0.self_attn.q_proj"
VALUE = "model.layers.0.self_attn.v_proj"

# Faults without a place in a llama, or that change nothing in one.
ARCHITECTURE = {
    "norm-bias-wide": "gpt2",
    "one-bias-wide": "bert-cls",
    "routers-wide": "qwen3_moe",
    "experts-wide": "qwen3_moe",
    "bare-parameters-wide": "qwen3_moe",
    "convolution-wide": "llava-vl",
    "tower-wide": "llava-vl",
    "float-inputs-wide": "llava-vl",
}
# Model and autocast, where it is no plain step in bfloat16.
PRECISION: dict[str, tuple[torch.dtype, torch.dtype | None]] = {
    "scaler": (FP16, None),
    "scaler-narrow-adapters": (FP16, None),
    "scaler-frozen-body": (FP16, None),
    "fused-optimizer-mixed": (BF16, BF16),
}
# fault -> phase, module and words of the real error; what is in neither table ends without one.
CRASHES = {
    "norms-wide": ("forward", FIRST_QUERY, MATMUL),
    "one-norm-wide": ("forward", QUERY, MATMUL),
    "last-norm-wide": ("forward", "lm_head", MATMUL),
    "norm-bias-wide": ("forward", "transformer.h.1.ln_1", "expected scalar type BFloat16 but found Float"),
    "embeddings-wide": ("forward", FIRST_QUERY, MATMUL),
    "head-wide": ("forward", "lm_head", MATMUL),
    "one-weight-wide": ("forward", QUERY, MATMUL),
    "one-bias-wide": ("forward", "bert.encoder.layer.1.attention.self.query", "must have the same dtype"),
    "one-weight-double": ("forward", QUERY, MATMUL),
    "queries-wide": ("forward", FIRST_QUERY, MATMUL),
    "down-projection-other": ("forward", f"{LAYER}.mlp.down_proj", MATMUL),
    "second-half-other": ("forward", QUERY, MATMUL),
    "convolution-wide": ("forward", "model.vision_tower.pre_layrnorm", "mixed dtype"),
    "routers-wide": ("forward", "model.layers.0.mlp.gate", MATMUL),
    "tower-wide": ("forward", "model.multi_modal_projector.linear_1", MATMUL),
    "bare-parameters-wide": ("forward", "model.layers.0.mlp.gate", MATMUL),
    "raw-lora": ("forward", QUERY, MATMUL),
    "raw-lora-other": ("forward", QUERY, MATMUL),
    "output-wide": ("forward", f"{LAYER}.self_attn", ATTENTION),
    "output-other": ("forward", f"{LAYER}.self_attn", ATTENTION),
    "input-wide": ("forward", f"{QUERY}.base", MATMUL),
    "constant-wide": ("forward", f"{LAYER}.self_attn", ATTENTION),
    "bmm-wide": ("forward", QUERY, "expected scalar type Float but found BFloat16"),
    "attention-values-wide": ("forward", QUERY, ATTENTION),
    "backward-wide": ("backward", "", MATMUL),
    "write-index-put": ("forward", QUERY, "Index put requires the source and destination dtypes match"),
    "write-index-add": ("forward", QUERY, "must have the same scalar type"),
    "write-index-copy": ("forward", QUERY, "self and source expected to have the same dtype"),
    "write-scatter": ("forward", QUERY, "Expected self.dtype to be equal to src.dtype"),
    "write-masked-scatter": ("forward", QUERY, "expected self and source to have same dtypes"),
    "lora-uncast": ("forward", f"{VALUE}.lora_A.default", MATMUL),
    "lora-b-wide": ("forward", f"{VALUE}.lora_B.default", MATMUL),
    "lora-base-wide": ("forward", f"{VALUE}.base_layer", MATMUL),
    "saved-copy-wide": ("forward", "lm_head.modules_to_save.default", MATMUL),
    "scaler-narrow-adapters": ("unscale", "", UNSCALE),
    "nf4-weight-raw": ("forward", QUERY, "shapes cannot be multiplied"),
    "embeds-wide": ("forward", FIRST_QUERY, MATMUL),
    "checkpointing-norms-wide": ("forward", FIRST_QUERY, MATMUL),
    "scaler": ("unscale", "", UNSCALE),
    "scaler-frozen-body": ("unscale", "", UNSCALE),
}
RUNS = {
    "experts-wide",
    "buffer-double",
    "buffers-other",
    "rotary-rounded",
    "write-slice",
    "lora-float32",
    "dora-magnitude-other",
    "nf4",
    "nf4-compute-wide",
    "nf4-state-stale",
    "nf4-lora",
    "int8",
    "float-inputs-wide",
    "mask-float",
    "mask-square",
    "checkpointing",
    "fused-optimizer-mixed",
}


EACH_KIND = (
    *(
        "norms-wide",
        "norm-bias-wide",
        "one-bias-wide",
        "output-wide",
    ),
    *(
        "attention-values-wide",
        "backward-wide",
        "write-index-put",
        "lora-uncast",
        "scaler-frozen-body",
    ),
    *(
        "nf4-weight-raw",
        "nf4-state-stale",
        "int8",
        "mask-float",
        "checkpointing",
        "fused-optimizer-mixed",
        "dora-magnitude-other",
    ),
)
"""One fault of each way a step ends by; the others are `exhaustive`, and `benchmarks/agreement.py` runs them too."""


def _setup(fault: str) -> Setup:
    architecture = ARCHITECTURES[ARCHITECTURE.get(fault, "llama")]
    dtype, autocast = PRECISION.get(fault, (BF16, None))
    return Setup(architecture.build(dtype), architecture.batch(dtype=dtype), dtype, autocast)


@pytest.mark.real_cpu
@pytest.mark.filterwarnings("ignore")  # peft warns of layers it finds unusual
@few("fault", list(FAULTS), *EACH_KIND)
def test_the_step_ends_as_predicted(fault: str) -> None:
    setup = _setup(fault)
    assert FAULTS[fault].inject(setup)
    verdict, phase, module = predicted_end(check_of(setup))
    outcome = real_step(setup.model, setup.batch, setup.autocast, setup.scaler, setup.optimizer)
    if fault in RUNS:
        assert (outcome.error, verdict) == (None, "runs")
        return
    expected_phase, expected_module, words = CRASHES[fault]  # each fault is in one of the two
    assert words in str(outcome.error)
    assert (outcome.phase, own_name(outcome.module)) == (expected_phase, expected_module)
    assert (verdict, phase) == ("crashes", expected_phase)
    assert phase != "forward" or own_name(module) == expected_module


@pytest.mark.real_cpu
def test_no_fault_is_no_fault() -> None:
    setup = _setup("nothing")
    assert HEALTHY.inject(setup) == "LlamaForCausalLM as it is"
    assert real_step(setup.model, setup.batch).error is None


def test_a_fault_without_a_place_changes_nothing() -> None:
    """What `benchmarks/agreement.py` counts as absent: a llama has no router, no experts, no convolution, no tower."""
    setup = _setup("nothing")
    before = {name: tensor.dtype for name, tensor in setup.model.state_dict().items()}
    for fault in ("routers-wide", "experts-wide", "convolution-wide", "tower-wide"):
        assert FAULTS[fault].inject(setup) is None
    assert {name: tensor.dtype for name, tensor in setup.model.state_dict().items()} == before
