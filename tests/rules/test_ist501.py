from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from isotype.precision.policy import PrecisionPolicy
from isotype.records.trace import Trace
from tests.rules.samples import packed, trace, weight
from tests.rules.traces import BF16, FP16, FP32, batch, found, llama, of_llama, on, traced

RULE = "ist501_checkpoint_dtype"


@pytest.fixture(scope="module")
def widened() -> Trace:
    """A bfloat16 model after `.float()`."""
    return traced(llama(BF16).float(), batch())


def test_a_bfloat16_checkpoint_in_float32(widened: Trace) -> None:
    (finding,) = found(RULE, on(widened, "a100", checkpoint_dtype=BF16))
    assert finding.severity == "warning"
    assert finding.message == (
        "the checkpoint's config names bfloat16, but the frozen weights are float32: 92.0 KiB more memory"
    )
    assert finding.cause == "base_model.model.model.embed_tokens.weight is float32"
    assert finding.cost is not None
    assert finding.cost.memory_bytes == 2 * (30720 + 2 * 128 * 64)
    assert finding.cost.flops_share == 1.0
    assert finding.cost.slowdown is not None
    assert finding.cost.slowdown > 1.0
    assert finding.fixes[0].safety == "safe"  # the values came from bfloat16


def test_a_bfloat16_checkpoint_in_float16() -> None:
    (finding,) = found(RULE, on(of_llama(FP16), "a100", checkpoint_dtype=BF16))
    assert finding.message == "the checkpoint's config names bfloat16, but the frozen weights are float16"
    assert "values above 65,504 become infinite, and small values become zero" in finding.notes
    assert finding.fixes[0].safety == "unsafe"


@pytest.mark.parametrize(("said", "device"), [(None, "a100"), (FP32, "a100"), (BF16, "t4")])
def test_nothing_said_or_nothing_lost_or_no_such_hardware(
    widened: Trace, said: torch.dtype | None, device: str
) -> None:
    assert found(RULE, on(widened, device, checkpoint_dtype=said)) == []


def test_what_the_policy_asked_for(widened: Trace) -> None:
    policy = PrecisionPolicy(compute=FP32, storage="float32")
    assert found(RULE, on(widened, "a100", checkpoint_dtype=BF16, policy=policy)) == []


def test_trainable_weights_are_masters() -> None:
    trace = traced(llama(BF16, lora=False).float(), batch())
    assert found(RULE, on(trace, "a100", checkpoint_dtype=BF16)) == []


@pytest.mark.parametrize(("layers", "reported"), [(1, True), (30, False)])
def test_what_is_float32_beside_quantized_weights_is_another_rule(layers: int, reported: bool) -> None:
    """`prepare_model_for_kbit_training` casts the embeddings, which are a small part of the model, to float32."""
    embedding = weight("model.embed_tokens.weight", FP32, kind="embedding", shape=(128, 64))
    made = trace([embedding, replace(packed(), repeats=layers)], device="a100", checkpoint_dtype=BF16)
    assert bool(found(RULE, made)) == reported
