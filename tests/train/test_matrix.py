"""Pairs of architecture, compute dtype, quantization and LoRA or DoRA: each trains under its policy."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import isotype
from isotype.model.enforce import enforce_model
from isotype.model.experts.stack import quantized_stack, stacked_weights
from tests.models import tiny_batch
from tests.pairwise import pairwise
from tests.policy import assert_policy_holds, train

MODELS = (
    "llama",
    "qwen3",
    "gemma2",
    "gemma3",
    "gemma3-vision",
    "mistral",
    "phi",
    "phi3",
    "gpt-oss",
    "qwen3-moe",
)
DTYPES = ("float32", "bfloat16", "float16")
QUANTIZATIONS = (None, "nf4", "fp4", "int8")

STACKED_EXPERTS = {
    # bitsandbytes quantizes nn.Linear only; these architectures hold all experts of a layer in one parameter.
    "gpt-oss": ("gate_up_proj", "down_proj"),
    "qwen3-moe": ("gate_up_proj", "down_proj"),
}
"""Weights that cannot be quantized, by model: they lie in the compute dtype under every quantization."""

PLAIN_LORA_ONLY = ("qwen3-moe", "gpt-oss")
"""Models whose experts PEFT adapts by reparametrization, which has no DoRA: its DoRA goes on the other layers."""


def generate(model: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    model.eval()
    with torch.no_grad():
        return model.generate(**inputs, max_new_tokens=3, min_new_tokens=3, do_sample=False)


PRECISIONS = pairwise(
    "dtype, quantization, dora",
    DTYPES,
    QUANTIZATIONS,
    [False, True],
    ids=lambda value: {None: "dense", False: "lora", True: "dora"}.get(value, value),
).args[1]
"""Any two of dtype, storage and variant meet; what a model's own layers make of a storage is in `tests/model` and `tests/checkpoint`."""


@pairwise(["name", "dtype, quantization, dora"], MODELS, PRECISIONS, strength=1)
def test_trains_under_its_policy(
    saved: Callable[..., Path], name: str, dtype: str, quantization: str | None, dora: bool
) -> None:
    batch = tiny_batch(name)
    policy = isotype.resolve_precision(saved(name), dtype=dtype, quantization=quantization, device="cpu")
    model = isotype.load(saved(name), policy)
    with warnings.catch_warnings():
        if dora and name in PLAIN_LORA_ONLY:
            warnings.filterwarnings("ignore", message="adapters are on")
        model = isotype.add_lora(model, policy, r=4, use_dora=dora)

    seen = assert_policy_holds(model, policy)
    assert seen["master"] > 0
    assert ("linear4bit" in seen) == (quantization in ("nf4", "fp4"))
    assert ("linear8bit" in seen) == (quantization == "int8")
    assert bool(seen.get("pinned")) == (name in ("gpt-oss",) and dtype != "float32")
    assert_experts_stored(model, name, policy)

    losses = train(model, policy, batch)
    assert all(math.isfinite(loss) for loss in losses), losses
    assert losses[-1] < losses[0] - 0.05, losses
    assert_policy_holds(model, policy)

    # Evaluation code knows nothing of autocast: no mismatch may wait there.
    loss = model(**batch).loss
    loss.backward()
    assert math.isfinite(loss.item())
    assert loss.item() < losses[0]
    assert generate(model, batch).shape[1] >= 3
    assert_policy_holds(model, policy)
    assert enforce_model(model, policy) == ()


def assert_experts_stored(model: torch.nn.Module, name: str, policy: isotype.PrecisionPolicy) -> None:
    for own in STACKED_EXPERTS.get(name, ()):
        held = [module for _, module, stacked in stacked_weights(model) if stacked == own]
        assert held, f"{name} has no {own} any more"
        for module in held:
            stack = quantized_stack(module, own)
            if policy.quantized:
                assert stack is not None
                assert stack.storage == policy.storage
            else:
                weight = module.get_parameter(own)
                assert (weight.ndim, weight.dtype) == (3, policy.plain)
