"""Routers of experts that choose in float32 under a policy of 16 bits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

import isotype
from isotype.model.walk import is_router
from tests.checkpoint.test_stacks import gguf_checkpoint
from tests.models import tiny_batch
from tests.pairwise import pairwise
from tests.policy import assert_policy_holds, train

Saved = Callable[..., Path]


def routers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if is_router(module)]


@pairwise(
    "name, quantization, dtype",
    ["qwen3-moe", "gpt-oss", "deepseek-v3"],
    [None, "nf4"],
    ["bfloat16", "float16"],
    strength=1,
)
def test_experts_are_chosen_as_in_float32(
    saved: Saved, name: str, quantization: str | None, dtype: str
) -> None:
    policy = isotype.resolve_precision(saved(name, torch.bfloat16), dtype, quantization, device="cpu")
    assert policy.routers
    assert any(role == "routers of experts" and to == "float32" for role, to, _ in policy.rows())
    model = isotype.load(saved(name, torch.bfloat16), policy)
    assert_policy_holds(model, policy)
    router = routers(model)[0]
    exact = copy.deepcopy(router).double()
    x = torch.randn(512, router.weight.shape[1], generator=torch.Generator().manual_seed(0)).to(
        policy.compute
    )
    with torch.autocast("cpu", policy.compute):
        logits, scores, chosen = router(x)
    wanted, _, experts = exact.original.forward(exact, x.double())  # type: ignore[operator]
    assert (logits.dtype, scores.dtype) == (torch.float32, torch.float32)
    assert (logits - wanted).abs().max() < 1e-6 * wanted.abs().max()
    assert torch.equal(chosen.sort().values, experts.sort().values)
    losses = train(isotype.add_lora(model, policy, r=4), policy, tiny_batch(name))
    assert losses[-1] < losses[0]


def test_a_policy_without_float32_routers_leaves_them(saved: Saved) -> None:
    path = saved("qwen3-moe", torch.bfloat16)
    policy = isotype.resolve_precision(path, "bfloat16", device="cpu")
    before = replace(policy, routers=False)
    (logits, *_) = routers(isotype.load(path, before))[0](torch.ones(1, 2, 32, dtype=torch.bfloat16))
    assert logits.dtype == torch.bfloat16
    assert not isotype.resolve_precision(path, "float32", device="cpu").routers
    saved_policy = isotype.PrecisionPolicy.from_dict(before.to_dict())
    assert saved_policy == before


def test_routers_of_gguf_files_and_of_adapters(saved: Saved, tmp_path: Path) -> None:
    path = gguf_checkpoint(tmp_path)
    policy = isotype.resolve_precision(path, "bfloat16", device="cpu")
    assert policy.routers
    model = isotype.load(path, policy)
    assert_policy_holds(model, policy)
    policy = isotype.resolve_precision(saved("qwen3-moe", torch.bfloat16), "bfloat16", "nf4", device="cpu")
    adapted = isotype.add_lora(isotype.load(saved("qwen3-moe", torch.bfloat16), policy), policy, r=4)
    adapted.save_pretrained(tmp_path / "adapter")
    for each in (model, isotype.load(tmp_path / "adapter")):
        assert {router.weight.dtype for router in routers(each)} == {torch.float32}
