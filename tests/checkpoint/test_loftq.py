"""Adapters initialised from the quantization error, against singular values in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import isotype
from isotype.checkpoint.checkpoint import open_checkpoint
from isotype.checkpoint.loftq import begin_from_error
from isotype.precision.policy import read_moments
from tests.checkpoint.test_damage import linear, matrix
from tests.checkpoint.test_mixed import FORMATS, mixed, moments, weight
from tests.models import tiny_batch, tiny_model

RANK = 4


def tuned(path: Path, policy: isotype.PrecisionPolicy, **lora: Any) -> Any:
    settings = {"r": RANK, "lora_alpha": 6, "target_modules": "all-linear"} | lora
    return isotype.add_lora(isotype.load(path, policy), policy, **settings)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("weighed", [False, True])
def test_the_product_is_the_nearest_of_its_rank(saved: Callable[..., Path], name: str, weighed: bool) -> None:
    path = saved(name)
    policy = mixed(path, name)
    model = tuned(path, policy, use_rslora=weighed)
    before = {key: value.clone() for key, value in model.state_dict().items() if "lora" not in key}
    dense = {key: matrix(layer).float() for key, layer in linear(isotype.load(path, plain(path))).items()}
    known = {key: read_moments(moments(value.shape[1])) for key, value in dense.items()} if weighed else {}
    count = begin_from_error(model, open_checkpoint(path), known)
    four_bits = [key for key in dense if policy.storage_of(key) not in ("int8", "float32")]
    assert count == len(four_bits)
    for key, value in dense.items():
        layer = model.get_base_model().get_submodule(key)
        delta = layer.get_delta_weight("default")
        if key not in four_bits:
            assert not delta.any()
            continue
        roots = known.get(key, torch.ones(value.shape[1])).double().sqrt()
        error = value.double() - weight(layer.get_base_layer())
        delta = (delta.T if layer.fan_in_fan_out and delta.shape != error.shape else delta).double()
        left = ((error - delta) * roots).square().sum()
        least = torch.linalg.svdvals(error * roots)[RANK:].square().sum()
        # Singular vectors from products with random vectors: the rest is up to one percent larger.
        assert least * (1 - 1e-5) <= left <= least * 1.01
        assert left < (error * roots).square().sum()
    after = model.state_dict()
    assert all(torch.equal(value, after[key]) for key, value in before.items())


def plain(path: Path) -> isotype.PrecisionPolicy:
    return isotype.resolve_precision(path, "float32", device="cpu")


def test_fused_and_on_any_base_it_is_nearer_to_the_model_that_was_quantized(
    saved: Callable[..., Path],
) -> None:
    path = saved("llama")
    policy = isotype.resolve_precision(path, "float32", "nf4", "cpu")
    batch = tiny_batch("llama")
    with torch.no_grad():
        wanted = isotype.load(path, plain(path)).eval()(**batch).logits
        model = tuned(path, policy, r=16, lora_alpha=16).eval()
        first = (model(**batch).logits - wanted).norm()
        state = torch.get_rng_state()
        begin_from_error(model, open_checkpoint(path), {})
        assert torch.equal(torch.get_rng_state(), state)
        isotype.fuse(model)
        assert (model(**batch).logits - wanted).norm() < 0.8 * first


def test_a_rank_above_the_layers_own_leaves_nothing(saved: Callable[..., Path]) -> None:
    path = saved("llama")
    policy = isotype.resolve_precision(path, "float32", "nf4", "cpu")
    model = tuned(path, policy, r=80, lora_alpha=80, target_modules=["v_proj"])
    begin_from_error(model, open_checkpoint(path), {})
    dense = linear(tiny_model("llama"))
    for key in dense:
        if key.endswith("v_proj"):
            layer = model.get_base_model().get_submodule(key)
            whole = weight(layer.get_base_layer()) + layer.get_delta_weight("default")
            torch.testing.assert_close(
                whole, isotype.load(path, plain(path)).get_submodule(key).weight, rtol=0, atol=1e-5
            )


def test_a_checkpoint_that_is_saved_quantized_has_no_errors_to_begin_from(
    saved: Callable[..., Path], tmp_path: Path
) -> None:
    policy = isotype.resolve_precision(saved("llama"), "float32", "nf4", "cpu")
    isotype.load(saved("llama"), policy).save_pretrained(tmp_path / "nf4")
    model = tuned(tmp_path / "nf4", policy)
    with pytest.raises(isotype.PrecisionError, match="saved in nf4"):
        begin_from_error(model, open_checkpoint(tmp_path / "nf4"), {})
