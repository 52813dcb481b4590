"""Fused parts with inputs of no rows or no tokens: the shapes and gradients that PEFT has.

Whole text models of transformers 5.23 raise for them, with PEFT as without; their parts do not, and mixtures of experts and code of
one's own call parts with nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from isotype.lora.fuse import fuse
from isotype.lora.loss.log_probs import log_probs
from isotype.lora.loss.logits import head_of
from tests.adapters import adapted
from tests.lora.test_fuse import VARIANTS, under
from tests.models import tiny_model
from tests.pairwise import few, pairwise

SHAPES = ((0, 6), (2, 0), (0, 0))


def parts(model: Any) -> list[Any]:
    """LoRA layers that run together and alone, a gated MLP, a norm; all take hidden states."""
    layer = model.base_model.model.model.layers[0]
    attention = layer.self_attn
    return [attention.q_proj, attention.k_proj, attention.o_proj, layer.mlp, layer.input_layernorm]


def results(model: Any, shape: tuple[int, int]) -> list[Any]:
    dtype = next(model.parameters()).dtype
    found = []
    for part in parts(model):
        model.zero_grad()
        x = torch.zeros(*shape, 64, dtype=dtype, requires_grad=True)
        out = part(x)
        out.sum().backward()
        assert x.grad is not None
        grads = {n: p.grad.clone() for n, p in part.named_parameters() if p.grad is not None}
        found.append((out.shape, out.dtype, x.grad.shape, grads))
    return found


def assert_same(model: Any, plain: Any) -> None:
    for shape in SHAPES:
        for result, wanted in zip(results(model, shape), results(plain, shape), strict=True):
            assert result[:3] == wanted[:3]
            assert result[3].keys() == wanted[3].keys()
            for name, grad in wanted[3].items():
                assert torch.equal(result[3][name], grad), name


@few("variant", list(VARIANTS), "lora", "dora")
def test_variants(variant: str) -> None:
    settings = {"target_modules": "all-linear", **VARIANTS[variant]}
    model = adapted("llama-tied-bias", **settings).train()
    plain = copy.deepcopy(model)
    fuse(model)
    assert_same(model, plain)


@pairwise("budget, quantization", [0, 1 << 30], [None, "nf4"], strength=1)
def test_bases(saved: Callable[..., Path], quantization: str | None, budget: int) -> None:
    model, _ = under(saved, "bfloat16", quantization)
    plain = copy.deepcopy(model)
    fuse(model, budget=budget)
    assert_same(model, plain)


@pytest.mark.parametrize("outputs", [(), ("entropy", "logsumexp", "is_top1")])
def test_the_loss(outputs: tuple[str, ...]) -> None:
    hidden = torch.zeros(0, 64, requires_grad=True)
    targets = torch.zeros(0, dtype=torch.int64)
    gradients = ("log_probs", *(name for name in outputs if name != "is_top1"))
    found = log_probs(head_of(tiny_model("llama")), hidden, targets, outputs, gradients=gradients)
    assert found.log_probs.shape == (0,)
    found.log_probs.sum().backward()  # type: ignore[no-untyped-call]
    assert hidden.grad is not None
