from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from isotype.preflight.check import check
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
        "attention with float32 queries uses a slower kernel: flash kernels accept only bfloat16 and float16"
    )
    assert "input_layernorm.weight is float32" in finding.cause
    (finding,) = found(RULE, on(wide, "a100", attention="flash_attention_2"))
    assert finding.severity == "error"
    assert "attention with float32 queries raises" in finding.message
    (finding,) = found(RULE, on(wide, "a100", attention="flex_attention"))
    assert finding.message == "FlexAttention runs in float32, but is faster in bfloat16 and float16"


def test_a_float32_model_has_no_flash_kernel_to_lose() -> None:
    assert found(RULE, on(of_llama(FP32), "a100", attention="sdpa")) == []
    assert found(RULE, on(of_llama(FP32, lora=False, autocast=BF16), "a100", attention="sdpa")) == []


class Restricted(nn.Module):
    """lucidrains/denoising-diffusion-pytorch #239, lucidrains/x-transformers #143: attention by the named kernels only."""

    def __init__(self, kernels: list[SDPBackend], masked: bool) -> None:
        super().__init__()
        self.heads, self.kernels = nn.Linear(8, 24), kernels
        self.mask = torch.ones(4, 4, dtype=torch.bool) if masked else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.heads(x).view(1, 4, 1, 24).transpose(1, 2).chunk(3, -1)
        with sdpa_kernel(self.kernels):
            return scaled_dot_product_attention(query, key, value, self.mask).float().mean()


FLASH, EFFICIENT, MATH = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH


@pytest.mark.parametrize(
    ("kernels", "device", "autocast", "masked", "fixes"),
    [
        ([FLASH], "a100", None, False, [True, False]),  # a cast to bfloat16, or another kernel
        ([FLASH], "v100", "float16", False, [False]),
        ([FLASH], "a100", "bfloat16", True, [False]),
        ([FLASH], "a100", "bfloat16", False, None),
        ([EFFICIENT], "v100", "float16", True, None),
        ([FLASH, MATH], "v100", None, True, None),
        ([EFFICIENT], "mi300x", None, False, None),  # which kernel takes the call is not known
    ],
)
def test_code_that_disables_kernels(
    kernels: list[SDPBackend], device: str, autocast: str | None, masked: bool, fixes: list[bool] | None
) -> None:
    inputs = {"x": torch.ones(1, 4, 8)}
    errors = check(Restricted(kernels, masked), inputs, device=device, autocast=autocast, wiring=False).errors
    assert [finding.code for finding in errors] == (["IST604"] if fixes else [])
    for finding in errors:
        assert finding.notes == ("the device raises: No available kernel. Aborting execution.",)
        assert [fix.verified for fix in finding.fixes] == fixes
