"""RMSNorms are found by what they compute, and compute it against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from isotype.lora.fuse import fuse, unfuse
from isotype.lora.norms import NormParts, is_norm, norm_parts, rms_norm
from isotype.model.boundary import BoundarySettings, set_boundary
from tests.models import quiet
from tests.pairwise import pairwise
from tests.without_float64 import WithoutFloat64

# Relative error of a tensor's norm: one rounding to b digits is off by at most 2^-b (b: 9 in bfloat16, 12 in float16), the
# arithmetic is float32's.
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    difference = (found.detach().double() - wanted.detach()).norm()
    return float(difference / wanted.detach().norm()) if wanted.numel() else 0.0


@pairwise(
    "offset, shape, dtype, wide",
    [0.0, 1.0],
    [(2, 5, 33), (1, 1), (0, 7), (3, 576), (4, 2, 3, 16)],
    TOLERANCES,
    [False, True],
)
def test_values_and_gradients(dtype: torch.dtype, shape: tuple[int, ...], offset: float, wide: bool) -> None:
    torch.manual_seed(0)
    weight = (torch.rand(shape[-1]) + 0.5).to(torch.float32 if wide else dtype).requires_grad_()
    x = (3 * torch.randn(shape)).to(dtype).requires_grad_()
    parts = NormParts(1e-5, offset)
    y = rms_norm(x, weight, parts)
    assert y.dtype == torch.promote_types(dtype, weight.dtype)
    grad = torch.randn(shape).to(y.dtype)
    x64, weight64 = (t.detach().double().requires_grad_() for t in (x, weight))
    y64 = x64 * (x64.square().mean(-1, keepdim=True) + parts.eps).rsqrt() * (offset + weight64)
    found = [y, *torch.autograd.grad(y, [x, weight], grad)]
    wanted = [y64, *torch.autograd.grad(y64, [x64, weight64], grad.double())]
    for one, other in zip(found, wanted, strict=True):
        assert (
            error(one, other) < 2 * TOLERANCES[dtype]
            or float((one.detach().double() - other).abs().max()) < 1e-5
        )
    assert (found[1].dtype, found[2].dtype) == (dtype, weight.dtype)


def test_large_values_do_not_overflow() -> None:
    x = torch.full((1, 8), 60000.0, dtype=torch.float16)
    y = rms_norm(x, torch.ones(8, dtype=torch.float16), NormParts(1e-5, 0.0))
    torch.testing.assert_close(y, torch.ones(1, 8, dtype=torch.float16))


def test_a_backward_can_be_repeated_and_leaves_its_gradient_alone() -> None:
    x, weight = torch.randn(3, 8, requires_grad=True), torch.ones(8)
    y = rms_norm(x, weight, NormParts(1e-5, 0.0))
    grad = torch.ones(3, 8)
    first = torch.autograd.grad(y, x, grad, retain_graph=True)
    y.mul_(2)
    torch.testing.assert_close(torch.autograd.grad(y, x, grad)[0], 2 * first[0])
    assert grad.eq(1).all()


@pytest.mark.parametrize(
    ("norm", "wanted"),
    [
        (LlamaRMSNorm(16, eps=1e-5), NormParts(1e-5, 0.0)),
        (LlamaRMSNorm(16, eps=1e-5).bfloat16(), NormParts(1e-5, 0.0)),
        (GemmaRMSNorm(16, eps=1e-6), NormParts(1e-6, 1.0)),
        (T5LayerNorm(16, eps=1e-6), NormParts(1e-6, 0.0)),
        (nn.RMSNorm(16, eps=1e-5), NormParts(1e-5, 0.0)),
        (nn.RMSNorm(16), None),
        (nn.LayerNorm(16), None),
        (nn.Linear(16, 16), None),
        (LlamaRMSNorm(16, eps=1e-5).to("meta"), NormParts(1e-5, 0.0)),
        (nn.LayerNorm(16).to("meta"), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_one(norm: nn.Module, wanted: NormParts | None) -> None:
    if getattr(norm, "weight", None) is not None and not norm.weight.is_meta:  # type: ignore[union-attr]
        with torch.no_grad():
            norm.weight.add_(0.1 * torch.randn(norm.weight.shape))  # type: ignore[union-attr,operator,arg-type]
    assert norm_parts(norm) == wanted


class ClampedRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states).clamp(max=1.0)


class GatedRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states) * gate


def test_what_computes_something_else_is_none() -> None:
    assert norm_parts(ClampedRMSNorm(16)) is None
    assert norm_parts(GatedRMSNorm(16)) is None


def test_the_norms_of_transformers() -> None:
    for name in ("Llama", "Gemma2", "Qwen3", "Mistral", "Gemma3Text"):
        config: Any = getattr(transformers, f"{name}Config")(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=2,
            vocab_size=64,
            head_dim=16,
        )
        with quiet():
            model = transformers.AutoModelForCausalLM.from_config(config)
        norms = [module for module in model.modules() if is_norm(module)]
        assert norms
        assert all(norm_parts(norm) is not None for norm in norms)


def test_a_boundary_on_top_leaves_what_is_not_fused_to_the_class_below() -> None:
    model = nn.Sequential(LlamaRMSNorm(16))
    x = torch.ones(2, 16, dtype=torch.int64)
    wanted = model(x)
    fuse(model, {"input": torch.randn(2, 16)})
    set_boundary(model[0], BoundarySettings("float32", torch.float32))
    torch.testing.assert_close(model(x), wanted)
    unfuse(model)
    torch.testing.assert_close(model(x), wanted)


class WideRMSNorm(LlamaRMSNorm):
    """Its output stays float32."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states.float()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon) * self.weight.float()


def test_one_that_returns_float32_keeps_its_dtype() -> None:
    assert norm_parts(WideRMSNorm(16, eps=1e-5)) == NormParts(1e-5, 0.0)
    model = nn.Sequential(WideRMSNorm(16, eps=1e-5)).bfloat16()
    assert norm_parts(model[0]) is None
    x = torch.randn(2, 16).bfloat16()
    wanted = model(x)
    assert not fuse(model, {"input": x}).norms
    assert wanted.dtype == torch.float32
    assert torch.equal(model(x), wanted)


def test_a_norm_is_recognised_on_a_device_without_float64() -> None:
    """As on Intel's Arc, where kernels compute norms."""
    norm = LlamaRMSNorm(16, eps=1e-5)
    weight = torch.rand(16) + 0.5
    norm.weight = nn.Parameter(weight.as_subclass(WithoutFloat64), requires_grad=False)
    assert norm_parts(norm) == NormParts(1e-5, 0.0)
