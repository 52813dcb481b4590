from __future__ import annotations

import pytest

from isotype.records.trace import Trace
from tests.rules.traces import BF16, FP32, batch, cast, found, llama, of_llama, on, traced

RULE = "ist604_attention"


@pytest.fixture(scope="module")
def trace() -> Trace:
    return of_llama()


@pytest.fixture(scope="module")
def wide() -> Trace:
    """A float32 attention in a bfloat16 model: the norm of its queries' layer and the layer itself are float32."""
    model = cast(llama(), FP32, ("input_layernorm", "q_proj", "k_proj", "v_proj"))
    return traced(model, batch())


@pytest.mark.parametrize("device", ["t4", "v100", "cpu-generic", "mps"])
def test_flash_attention_where_there_is_none(trace: Trace, device: str) -> None:
    (finding,) = found(RULE, on(trace, device, attention="flash_attention_2"))
    assert finding.severity == "error"
    assert finding.message == f"flash_attention_2 does not run on {on(trace, device).setup.profile.title}"
    assert finding.cause == "the model's config asks for flash_attention_2"


@pytest.mark.parametrize("attention", ["flash_attention_2", "sdpa", None])
def test_a_bfloat16_model_on_an_a100(trace: Trace, attention: str | None) -> None:
    assert found(RULE, on(trace, "a100", attention=attention)) == []


def test_sdpa_on_a_t4(trace: Trace) -> None:
    assert found(RULE, on(trace, "t4", attention="sdpa")) == []


def test_float32_queries(wide: Trace) -> None:
    (finding,) = found(RULE, on(wide, "a100", attention="sdpa"))
    assert finding.severity == "warning"
    assert finding.message == (
        "attention with float32 queries falls back to a slower kernel: flash kernels take bfloat16 and float16"
    )
    assert "input_layernorm.weight is float32" in finding.cause
    (finding,) = found(RULE, on(wide, "a100", attention="flash_attention_2"))
    assert finding.severity == "error"
    assert "attention with float32 queries raises" in finding.message


def test_a_float32_model_has_no_flash_kernel_to_lose() -> None:
    assert found(RULE, on(of_llama(FP32), "a100", attention="sdpa")) == []
    assert found(RULE, on(of_llama(FP32, lora=False, autocast=BF16), "a100", attention="sdpa")) == []
