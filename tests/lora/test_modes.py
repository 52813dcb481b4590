"""Fused models in the modes that torch has: inference, no gradients, autocast, `torch.func`; copied, pickled, saved; one after another.

PEFT's own path is the reference. In float32 both differ by the order of sums. In 16 bits PEFT rounds a LoRA layer's output several
times, a fused one once: on these models that is about one percent of the logits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch.func import functional_call, grad, jvp, vmap

from isotype.lora.attention.plan import plan_of_mask
from isotype.lora.fuse import fuse
from isotype.lora.loss.trl_head import put_head
from isotype.lora.weights import DenseWeights
from tests.adapters import adapted, moved, relative, step
from tests.lora.test_fuse import VARIANTS, Pair, under
from tests.lora.watched import copies_of
from tests.models import one_layer, quiet, tiny_batch
from tests.pairwise import pairwise
from tests.zoo import ARCHITECTURES

Saved = Callable[..., Path]
EXACT, ROUNDED = 1e-4, 3e-2
MODES: dict[str, Callable[[], Any]] = {
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "grad": torch.enable_grad,
}
ORDER = ("inference_mode", "grad", "no_grad", "inference_mode", "grad")
"""What is kept from one mode must do in the next."""


def padded(name: str = "llama") -> dict[str, torch.Tensor]:
    """A batch whose second row is padded on the left, where queries read nothing."""
    batch = tiny_batch(name)
    batch["attention_mask"][1, :5] = 0
    return batch


def logits(model: Any, batch: dict[str, torch.Tensor], mode: str, low: torch.dtype | None = None) -> Any:
    with MODES[mode](), torch.autocast("cpu", low or torch.bfloat16, enabled=low is not None):
        return model(**batch).logits


def assert_every_mode(
    model: Any, plain: Any, batch: dict[str, torch.Tensor], low: torch.dtype | None, tolerance: float
) -> None:
    for mode in ORDER:
        assert relative(logits(model, batch, mode, low), logits(plain, batch, mode, low)) < tolerance, mode
    result, wanted = step(model, batch, low), step(plain, batch, low)
    assert result.keys() == wanted.keys()
    for name, value in wanted.items():
        assert relative(result[name], value) < (10 * tolerance if tolerance > EXACT else EXACT), name


@pairwise(
    ["low", "dtype, quantization, budget"],
    [None, torch.bfloat16],
    [
        ("float32", None, 0),
        ("bfloat16", None, 0),
        ("bfloat16", "nf4", 0),
        pytest.param("bfloat16", "nf4", 1 << 30, marks=pytest.mark.exhaustive),
        pytest.param("bfloat16", "int8", 0, marks=pytest.mark.exhaustive),
        ("bfloat16", "int8", 1 << 30),
        ("float32", "nf4", 1 << 30),
        pytest.param("float32", "fp4", 0, marks=pytest.mark.exhaustive),
        pytest.param("float16", None, 0, marks=pytest.mark.exhaustive),
    ],
    strength=1,
)
def test_bases(
    saved: Saved, dtype: str, quantization: str | None, budget: int, low: torch.dtype | None
) -> None:
    model = one_layer(under(saved, dtype, quantization)[0])
    plain = copy.deepcopy(model)
    fuse(model, budget=budget)
    exact = dtype == "float32" and low is None and quantization != "int8"
    assert_every_mode(model, plain, padded(), low, EXACT if exact else ROUNDED)


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(name, marks=pytest.mark.exhaustive) if name in ("rslora", "lora-bias") else name
        for name in VARIANTS
        if name != "dropout"
    ],
)
def test_variants(variant: str) -> None:
    model = one_layer(adapted("llama-tied-bias", **VARIANTS[variant])).train()
    plain = copy.deepcopy(model)
    fuse(model)
    assert_every_mode(model, plain, padded(), None, EXACT)


@pytest.mark.parametrize("name", ["gemma3", "gpt2", "qwen3-moe", "t5"])
def test_architectures(name: str) -> None:
    model = adapted(name).eval()
    plain = copy.deepcopy(model)
    with quiet():
        fuse(model)
        assert_every_mode(model, plain, padded(name), None, EXACT)


@pytest.mark.parametrize("name", ["llama", "bart"])
def test_generation(name: str) -> None:
    if name == "llama":
        model = one_layer(adapted(name)).eval()
    else:
        config = peft.LoraConfig(r=4, target_modules="all-linear")
        model = moved(peft.get_peft_model(ARCHITECTURES["bart-s2s"].build(torch.float32), config)).eval()
    batch = padded()
    asked = {"attention_mask": batch["attention_mask"], "max_new_tokens": 6, "do_sample": False}
    with quiet():
        wanted = model.generate(batch["input_ids"], **asked)
        fuse(model)
        for mode in ORDER:
            with MODES[mode]():
                assert torch.equal(model.generate(batch["input_ids"], **asked), wanted)


@pytest.mark.parametrize("side", ["right", "left"])
def test_the_head_and_batches_without_padding(side: str) -> None:
    model = one_layer(adapted("llama")).eval()
    put_head(model)
    batch = padded()
    if side == "right":
        batch["attention_mask"] = batch["attention_mask"].flip(-1)
    batch["labels"] = batch["labels"].masked_fill(batch["attention_mask"] == 0, -100)
    batch["labels"][:, :6] = -100
    wanted = model(**batch, fused_lm_head=True).log_probs
    fuse(model)
    for mode in ORDER:
        with MODES[mode]():
            assert relative(model(**batch, fused_lm_head=True).log_probs, wanted) < EXACT
    model(**batch, fused_lm_head=True).loss.backward()


def test_inputs_of_one_mode_in_another() -> None:
    """Token ids and a mask of every pair that were made under inference_mode, in a step that is trained."""
    model = one_layer(adapted("llama")).train()
    plain = copy.deepcopy(model)
    fuse(model)
    batch = padded()
    length = batch["input_ids"].shape[1]
    with torch.inference_mode():
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        mask = causal & batch["attention_mask"].bool()[:, None, None, :]
        assert mask.is_inference()
    batch["attention_mask"] = mask
    for mode in ORDER:
        assert relative(logits(model, batch, mode), logits(plain, batch, mode)) < EXACT
    result, wanted = step(model, batch), step(plain, batch)
    assert all(relative(result[name], value) < EXACT for name, value in wanted.items())


@pytest.mark.parametrize("quantization", [None, "nf4", "int8"])
def test_models_made_under_inference_mode(saved: Saved, quantization: str | None) -> None:
    dtype = "float32" if quantization is None else "bfloat16"
    wanted = logits(one_layer(under(saved, dtype, quantization)[0]).eval(), padded(), "no_grad")
    with torch.inference_mode():
        model = one_layer(under(saved, dtype, quantization)[0]).eval()
        fuse(model)
        assert next(model.parameters()).is_inference()
    tolerance = EXACT if quantization is None else ROUNDED
    for mode in ("inference_mode", "no_grad", "inference_mode"):
        assert relative(logits(model, padded(), mode), wanted) < tolerance
    if quantization is None:
        with torch.inference_mode():
            model.merge_adapter()
        assert relative(logits(model, padded(), "no_grad"), wanted) < EXACT


@pytest.mark.parametrize("quantization", [None, "nf4"])
def test_copies_of_a_model_that_has_run_under_inference_mode(saved: Saved, quantization: str | None) -> None:
    model = one_layer(under(saved, "float32", quantization)[0])
    plain = copy.deepcopy(model)
    fuse(model)
    logits(model, padded(), "inference_mode")
    with torch.inference_mode():
        inside = copies_of(model)
    for other in (*copies_of(model), model):
        assert_every_mode(other, plain, padded(), None, EXACT)
    for other in inside:  # their weights keep no version
        for mode in ("inference_mode", "no_grad"):
            assert relative(logits(other, padded(), mode), logits(plain, padded(), mode)) < EXACT


def test_a_mask_that_is_written_to_under_inference_mode_is_read_again() -> None:
    with torch.inference_mode():
        mask = torch.ones(2, 1, 8, 8, dtype=torch.bool).tril()
        first = plan_of_mask(mask, 2, 32)
        assert plan_of_mask(mask, 2, 32) is first
        mask[..., 0] = False
        assert plan_of_mask(mask, 2, 32) is not first
        assert plan_of_mask(mask, 2, 32).blocks[0].rows == (1, 8)
        one = torch.ones(1, 1, 8, 8, dtype=torch.bool)
        shared = one.expand(4, -1, -1, -1)
        second = plan_of_mask(shared, 4, 32)
        assert plan_of_mask(shared, 4, 32) is second
        one[:, :, :, 7] = False
        assert plan_of_mask(shared, 4, 32).blocks[0].keys == (0, 7)


def test_an_input_that_is_written_to_under_inference_mode_is_read_again() -> None:
    model = moved(peft.get_peft_model(Pair(), peft.LoraConfig(target_modules=["one", "two"])))
    plain = copy.deepcopy(model)
    report = fuse(model, {"x": torch.randn(2, 8)})
    assert report.together
    with torch.inference_mode():
        for how in ("both", "changed", "both", "swapped", "changed", "first", "changed", "second"):
            x = torch.randn(3, 8)
            torch.testing.assert_close(model(x.clone(), how), plain(x.clone(), how))


def test_a_weight_that_is_written_to_under_inference_mode_is_read_again() -> None:
    weights = DenseWeights(1 << 20)
    with torch.inference_mode():
        layer = torch.nn.Linear(8, 8).to(torch.bfloat16)
        for factor in (1, 3):
            layer.weight.mul_(factor)
            weights.kept(layer, torch.float32)
            assert weights.copies == 0


def loss_of(model: Any, batch: dict[str, torch.Tensor]) -> Callable[..., torch.Tensor]:
    def loss(parameters: Any, ids: torch.Tensor) -> torch.Tensor:
        given = {"input_ids": ids, "labels": ids, "use_cache": False}
        if len(ids) == len(batch["attention_mask"]):
            given["attention_mask"] = batch["attention_mask"]
        result: torch.Tensor = functional_call(model, parameters, args=(), kwargs=given).loss
        return result

    return loss


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "functional_call": lambda loss, parameters, ids: {"loss": loss(parameters, ids)},
    "grad": lambda loss, parameters, ids: grad(loss)(parameters, ids),
    "gradients of each row": lambda loss, parameters, ids: vmap(grad(loss), in_dims=(None, 0))(
        parameters, ids[:, None]
    ),
    "vmap over models": lambda loss, parameters, ids: {
        "loss": vmap(lambda factor: loss({name: p * factor for name, p in parameters.items()}, ids[:1]))(
            torch.tensor([1.0, 2.0])
        )
    },
    "jvp": lambda loss, parameters, ids: {
        "loss": jvp(lambda p: loss(p, ids), (parameters,), (parameters,))[1]
    },
}


# torch 2.15 warns of the `torch.jit.script` that its own forward derivatives are made with.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")
@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated:DeprecationWarning"
)  # by torch's own jvp
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_of_torch_func(transform: str) -> None:
    model = one_layer(adapted("llama")).eval()
    if transform not in ("functional_call", "grad"):
        model.set_attn_implementation(
            "eager"
        )  # torch's own kernel has neither batching nor a forward derivative on a CPU
    plain, batch = copy.deepcopy(model), padded()
    fuse(model)
    parameters = {name: p.detach() for name, p in model.named_parameters() if "lora_" in name}
    wanted, result = (
        TRANSFORMS[transform](loss_of(each, batch), parameters, batch["input_ids"]) for each in (plain, model)
    )
    assert result.keys() == wanted.keys()
    for name, value in wanted.items():
        assert relative(result[name], value) < EXACT, name
