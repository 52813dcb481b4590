"""enforce on models that something else has touched."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn

import isotype
from isotype.model.enforce import Change, enforce_model, policy_of, summarize
from isotype.model.walk import kind_of, places
from isotype.precision.policy import PrecisionPolicy, is_pinned
from tests.adapters import loaded
from tests.models import CONFIGS, tiny_batch, tiny_model
from tests.pairwise import pairwise
from tests.policy import assert_policy_holds, train
from tests.refusals import refused

Saved = Callable[..., Path]
MODELS = ("llama", "gemma3", "gpt-oss", "gemma3-vision")


def float_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: b.clone() for name, b in model.named_buffers() if b.is_floating_point()}


def rotary_scalings(model: nn.Module) -> dict[str, Any]:
    return {
        f"{name}.{key}": value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if key.endswith("attention_scaling")
    }


@pairwise(
    "name, cast, quantization", MODELS, [torch.bfloat16, torch.float16], [None, "nf4", "int8"], strength=1
)
def test_a_blanket_cast_is_undone(
    saved: Saved, name: str, cast: torch.dtype, quantization: str | None
) -> None:
    model, policy = loaded(saved(name), "bfloat16", quantization, modules_to_save=["lm_head"])
    buffers, scalings = float_buffers(model), rotary_scalings(model)
    nn.Module.to(model, cast)  # transformers refuses it for quantized models, a PeftModel passes it by
    changes = isotype.enforce(model)
    assert changes
    assert_policy_holds(model, policy)
    for buffer, before in buffers.items():
        if "inv_freq" in buffer:
            assert torch.equal(model.get_buffer(buffer), before), buffer
    assert rotary_scalings(model) == scalings
    assert isotype.enforce(model) == ()
    losses = train(model, policy, tiny_batch(name))
    assert losses[-1] < losses[0] - 0.05


def test_rotary_frequencies_come_back_bit_for_bit_and_it_is_said(saved: Saved) -> None:
    model, _ = loaded(saved("gemma3"), "bfloat16")
    rotary = model.base_model.model.model.rotary_emb
    names = [name for name, buffer in rotary.named_buffers() if "inv_freq" in name]
    assert sorted(names) == [
        "full_attention_inv_freq",
        "full_attention_original_inv_freq",
        "sliding_attention_inv_freq",
        "sliding_attention_original_inv_freq",
    ]
    before = {name: rotary.get_buffer(name).clone() for name in names}
    rotary.half()
    changes = isotype.enforce(model)
    assert {str(change) for change in changes} == {
        f"base_model.model.model.rotary_emb.{name}: float16 -> float32, computed again" for name in names
    }
    assert all(torch.equal(rotary.get_buffer(name), before[name]) for name in names)
    assert not set(names) & set(rotary.state_dict())  # they stay non-persistent


def test_rotary_frequencies_that_cannot_be_computed_again() -> None:
    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("inv_freq", torch.ones(2, dtype=torch.bfloat16))

    model = nn.ModuleDict({"rotary": Rotary()})
    assert refused(
        isotype.PrecisionError, enforce_model, model, PrecisionPolicy(torch.bfloat16, "bfloat16")
    ) == (
        "rotary frequencies were rounded\n"
        "  - rotary (Rotary) has 16-bit inv_freq, but no config from which to compute it again\n"
        "    expected  float32 frequencies\n"
        "    fix       do not cast the whole model with .to(dtype); load it with isotype.load"
    )


@pairwise("quantization, name", ["nf4", "int8"], ["llama", "gpt-oss"], strength=1)
def test_kbit_preparation_is_undone(saved: Saved, name: str, quantization: str) -> None:
    policy = isotype.resolve_precision(saved(name), "bfloat16", quantization, device="cpu")
    model = isotype.load(saved(name), policy)
    model = peft.prepare_model_for_kbit_training(
        model, use_gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False}
    )
    assert model.get_input_embeddings().weight.dtype == torch.float32
    model = isotype.add_lora(model, policy, r=4)
    assert_policy_holds(model, policy)
    losses = train(model, policy, tiny_batch(name))
    assert losses[-1] < losses[0] - 0.05


def test_trl_casts_masters_and_enforce_makes_them_float32_again(saved: Saved) -> None:
    model, policy = loaded(saved("llama"), "float16", "nf4")
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.bfloat16)  # as TRL 1.16 does
    changes = isotype.enforce(model)
    assert summarize(changes) == ["bfloat16 -> float32 (28 places)"]
    assert_policy_holds(model, policy)


def test_gradients_follow_their_parameter(saved: Saved) -> None:
    model, policy = loaded(saved("llama"), "bfloat16")
    model(**tiny_batch("llama")).loss.backward()
    for parameter in model.parameters():
        if parameter.requires_grad:
            grad, parameter.grad = parameter.grad, None
            parameter.data = parameter.data.half()
            parameter.grad = grad.half()
    isotype.enforce(model)
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(grads) == 28
    assert {grad.dtype for grad in grads} == {torch.float32}
    assert math.isfinite(train(model, policy, tiny_batch("llama"), steps=3)[-1])


@pairwise("dtype, name", ["bfloat16", "float16"], sorted(set(CONFIGS) - {"t5"}), strength=1)
def test_any_module_can_be_brought_under_a_policy(name: str, dtype: str) -> None:
    model = tiny_model(name)
    policy = isotype.resolve_precision(model, dtype, device="cpu")
    model.requires_grad_(False)
    assert isotype.enforce(model, policy)
    assert_policy_holds(model, policy)
    assert isotype.enforce(model) == ()
    assert math.isfinite(model(**tiny_batch(name)).loss.item())


def test_from_one_policy_to_another_and_back(saved: Saved) -> None:
    model, policy = loaded(saved("gpt-oss"), "bfloat16", "nf4", modules_to_save=["lm_head"])
    half = isotype.resolve_precision(saved("gpt-oss"), "float16", "nf4", device="cpu")
    full = isotype.resolve_precision(saved("gpt-oss"), "float32", "nf4", device="cpu")
    for other in (half, full, policy):
        isotype.enforce(model, other)
        assert policy_of(model) == other
        assert_policy_holds(model, other)
        assert math.isfinite(train(model, other, tiny_batch("gpt-oss"), steps=3)[-1])
        model(**tiny_batch("gpt-oss")).loss.backward()


def test_a_shared_parameter_takes_float32_if_one_of_its_modules_wants_it() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(8, 4)
            self.head = nn.Linear(4, 8, bias=False)
            self.head.weight = self.embed.weight

    model = Tied().to(torch.bfloat16).requires_grad_(False)
    policy = PrecisionPolicy(torch.bfloat16, "bfloat16", pinned=("head.weight",))
    assert [str(change) for change in enforce_model(model, policy)] == [
        "embed.weight: bfloat16 -> float32",
        "embed: float32 boundary set",
        "head: float32 boundary set",
    ]
    assert model.head.weight is model.embed.weight
    assert enforce_model(model, policy) == ()
    assert model.head(model.embed(torch.tensor([1]))).dtype == torch.bfloat16


def test_pinned_buffers_are_float32_again() -> None:
    model = nn.Module()
    model.register_buffer("e_score_correction_bias", torch.ones(4, dtype=torch.bfloat16))
    model.register_buffer("other", torch.ones(4, dtype=torch.bfloat16))
    policy = PrecisionPolicy(torch.bfloat16, "bfloat16", pinned=("e_score_correction_bias",))
    assert enforce_model(model, policy) == (Change("e_score_correction_bias", "bfloat16 -> float32"),)
    assert model.other.dtype == torch.bfloat16


def test_places_in_nested_adapters(saved: Saved) -> None:
    model, _ = loaded(saved("qwen3-moe"), "bfloat16", modules_to_save=["lm_head"])
    found = {place.name.removeprefix("base_model.model."): place for place in places(model)}
    experts = "model.layers.0.mlp.experts"
    q_proj = "model.layers.0.self_attn.q_proj"
    expected = {  # (kind, tuner, adapter)
        q_proj: ("other", False, False),
        f"{q_proj}.base_layer": ("linear", False, False),
        f"{q_proj}.lora_A.default": ("linear", True, True),
        experts: ("other", False, False),
        f"{experts}.lora_A.default": ("linear", True, True),
        f"{experts}.base_layer": ("other", False, False),
        f"{experts}.base_layer.lora_B.default": ("linear", True, True),
        f"{experts}.base_layer.base_layer": ("other", False, False),
        "model.layers.0.input_layernorm": ("norm", False, False),
        "model.embed_tokens": ("embedding", False, False),
        "lm_head.original_module": ("linear", False, False),
        "lm_head.modules_to_save.default": ("linear", False, True),
    }
    assert {n: (found[n].kind, found[n].tuner, found[n].adapter) for n in expected} == expected


def test_kinds_of_layers_from_elsewhere() -> None:
    import bitsandbytes
    from transformers.pytorch_utils import Conv1D

    kinds = {
        "linear4bit": bitsandbytes.nn.LinearNF4(8, 8),
        "linear8bit": bitsandbytes.nn.Linear8bitLt(8, 8),
        "linear": Conv1D(8, 8),
        "norm": nn.GroupNorm(2, 4),
        "other": nn.MultiheadAttention(8, 2),
    }
    assert {kind: kind_of(module) for kind, module in kinds.items()} == {kind: kind for kind in kinds}


def test_pins_match_as_transformers_matches_them() -> None:
    assert is_pinned("model.layers.3.mlp.gate.weight", ["mlp.gate.weight"])
    assert is_pinned("model.layers.3.mlp.gate.weight", ["layers.*.gate"])
    assert not is_pinned("model.layers.3.mlp.gate_proj.weight", ["mlp.gate.weight"])
    assert not is_pinned("lm_head.weight", [])


@pytest.mark.parametrize(
    ("lies", "storage", "found"),
    [
        ("nf4", "int8", "nf4 weights"),
        ("nf4", "bfloat16", "nf4 weights"),
        ("int8", "fp4", "int8 weights"),
        (None, "nf4", "float weights in every linear layer"),
    ],
)
def test_a_policy_for_other_weights_is_refused(
    saved: Saved, lies: str | None, storage: str, found: str
) -> None:
    policy = isotype.resolve_precision(saved("llama"), "bfloat16", lies, device="cpu")
    model = isotype.load(saved("llama"), policy)
    assert refused(isotype.PrecisionError, isotype.enforce, model, replace(policy, storage=storage)) == (
        "the weights have another format than the policy's storage\n"
        f"  - LlamaForCausalLM with {found} under a policy with storage {storage}\n"
        "    expected  the format in which the weights are stored\n"
        "    fix       resolve the policy for this model: isotype.resolve_precision(model, …); to quantize a float "
        "checkpoint, give isotype.load its path and the policy"
    )
    assert policy_of(model) == policy


def test_a_quantizing_policy_where_there_is_nothing_to_quantize() -> None:
    policy = PrecisionPolicy(torch.bfloat16, "nf4")
    enforce_model(nn.Embedding(4, 2), policy)
    skipped = tiny_model("llama")
    skipped.config.quantization_config = {"load_in_4bit": True, "llm_int8_skip_modules": ["model", "lm_head"]}
    enforce_model(skipped.requires_grad_(False), policy)
    assert_policy_holds(skipped, policy)


def test_frozen_weights_stay_as_they_lie_where_the_policy_says_so(saved: Saved) -> None:
    model, base = loaded(saved("llama"), "bfloat16")
    head = model.get_submodule("base_model.model.lm_head")
    norm = model.get_submodule("base_model.model.model.norm")
    head.float(), norm.float()
    before = head.weight.clone()
    changes = isotype.enforce(model, replace(base, keep_frozen=True))
    assert {str(change) for change in changes} == {
        "base_model.model.lm_head: compute boundary set",
        "base_model.model.model.norm: float32 boundary set",
    }
    assert torch.equal(head.weight, before)
    assert model(**tiny_batch("llama")).logits.dtype == torch.bfloat16
    assert isotype.enforce(model) == ()


def test_without_a_policy() -> None:
    assert refused(isotype.PrecisionError, isotype.enforce, nn.Linear(2, 2)) == (
        "no policy to enforce\n"
        "  - Linear without a precision_policy\n"
        "    expected  a policy\n"
        "    fix       pass a policy: isotype.enforce(model, isotype.resolve_precision(model, …))"
    )


@pairwise(
    "dtype, part",
    ["bfloat16", "float16"],
    ["sinks", "router", "mlp.experts.down_proj", "self_attn.k_proj.bias", "embed_tokens", "layernorm"],
    strength=1,
)
def test_any_base_parameter_may_be_trained(saved: Saved, part: str, dtype: str) -> None:
    """Attention sinks, routers and experts are parameters of modules that nobody but their author knows."""
    policy = isotype.resolve_precision(saved("gpt-oss"), dtype, device="cpu")
    model = isotype.load(saved("gpt-oss"), policy)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(part in name)
    isotype.enforce(model)
    assert_policy_holds(model, policy)
    losses = train(model, policy, tiny_batch("gpt-oss"))
    assert all(math.isfinite(loss) for loss in losses)
    loss = model(**tiny_batch("gpt-oss")).loss
    loss.backward()
    assert math.isfinite(loss.item())
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}


class OnePlusRMSNorm(nn.Module):
    """As Gemma's, but what it returns stays float32: an architecture that is written for autocast."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(0.1 * torch.randn(size)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.float()
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return normed * (1.0 + self.weight.float())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_norms_that_return_float32_meet_16_bit_neighbours(dtype: str) -> None:
    torch.manual_seed(0)
    model = tiny_model("llama", torch.float32)
    for layer in model.model.layers:
        layer.input_layernorm = OnePlusRMSNorm(model.config.hidden_size)
        layer.post_attention_layernorm = OnePlusRMSNorm(model.config.hidden_size)
    batch = tiny_batch("llama")
    wanted = model(**batch).logits.detach()
    model.to(getattr(torch, dtype))
    with pytest.raises(RuntimeError, match="dtype"):
        model(**batch)
    policy = isotype.resolve_precision(model, dtype=dtype, device="cpu")
    model = isotype.add_lora(model, policy, r=4)
    assert not isotype.enforce(model, policy), "add_lora has put the model under the policy already"
    for fused in (False, True):
        if fused:
            assert len(isotype.fuse(model).norms) == 1, "the last one, which is Llama's own"
        logits = model(**batch).logits
        assert logits.dtype == getattr(torch, dtype)
        # Two blocks of roundings to 8 bits (bfloat16) or 11.
        bound = {"bfloat16": 5e-2, "float16": 5e-3}[dtype]
        assert float((logits.detach().float() - wanted).norm() / wanted.norm()) < bound
    assert not enforce_model(model, policy)
