"""Models of different dtypes in one process: one after the other, interleaved, and from two threads at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from isotype.precision.policy import PrecisionPolicy
from tests.adapters import loaded
from tests.models import tiny_batch
from tests.pairwise import few
from tests.policy import assert_policy_holds, autocast, train
from tests.train.test_matrix import generate

Saved = Callable[..., Path]
NAME = "gpt-oss"  # pinned norms, so that boundaries are at work too


def adapted(saved: Saved, dtype: str, quantization: str | None) -> tuple[Any, PrecisionPolicy]:
    return loaded(saved(NAME), dtype, quantization, modules_to_save=["lm_head"])


def work(model: Any, policy: PrecisionPolicy, steps: int = 4) -> tuple[list[float], torch.Tensor]:
    """Train, evaluate without autocast, generate: the losses and the tokens."""
    losses = train(model, policy, tiny_batch(NAME), steps)
    loss = model(**tiny_batch(NAME)).loss
    loss.backward()
    model.zero_grad()
    return [*losses, loss.item()], generate(model, tiny_batch(NAME))


@few("quantization", [None, "nf4"], "nf4")
def test_bfloat16_float16_bfloat16(saved: Saved, quantization: str | None) -> None:
    results = []
    for dtype in ("bfloat16", "float16", "bfloat16"):
        model, policy = adapted(saved, dtype, quantization)
        results.append(work(model, policy))
        assert_policy_holds(model, policy)
    (first, tokens), (other, _), (again, same_tokens) = results
    assert again == first
    assert torch.equal(tokens, same_tokens)
    assert other != first
    assert other[-1] < other[0] - 0.05


@few("quantization", [None, "nf4"], None)
def test_two_interleaved(saved: Saved, quantization: str | None) -> None:
    pairs = [adapted(saved, dtype, quantization) for dtype in ("bfloat16", "float16")]
    batch = tiny_batch(NAME)
    for _ in range(2):
        losses = []
        for model, policy in pairs:
            with autocast(policy):
                losses.append(model(**batch).loss)
        for loss in losses:  # both graphs are alive at once
            loss.backward()
            assert math.isfinite(loss.item())
        for model, policy in pairs:
            generate(model, batch)
            model.train()
            model(**batch).loss.backward()
            assert_policy_holds(model, policy)


@pytest.mark.exhaustive  # three threads of fused models run every time, in lora/test_fuse.py
@pytest.mark.parametrize("quantization", [None, "nf4", "int8"])
def test_two_threads(saved: Saved, quantization: str | None) -> None:
    """Each thread has its own autocast and boundaries hold no shared state, so the results are those of one thread."""
    pairs = [adapted(saved, dtype, quantization) for dtype in ("bfloat16", "float16")]
    expected = [work(*adapted(saved, dtype, quantization), steps=3) for dtype in ("bfloat16", "float16")]
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda pair: work(*pair, steps=3), pairs))
    for (losses, tokens), (expected_losses, expected_tokens) in zip(results, expected, strict=True):
        assert losses == expected_losses
        assert torch.equal(tokens, expected_tokens)
