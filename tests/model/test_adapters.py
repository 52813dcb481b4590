"""Adapters in every shape PEFT has: biases, whole modules, norms, several at once, saved and read back."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

import isotype
from isotype.model.boundary import Boundary
from isotype.model.enforce import enforce_model
from isotype.model.quantized import keep_training_layout
from tests.adapters import loaded
from tests.models import tiny_batch, tiny_model
from tests.pairwise import few, pairwise
from tests.policy import assert_policy_holds, autocast, train
from tests.refusals import refused
from tests.train.test_matrix import generate
from tests.zoo import ARCHITECTURES

Saved = Callable[..., Path]
LOW = ("bfloat16", "float16")
STORAGES = (None, "nf4", "int8")


def assert_trains_and_evaluates(model: Any, policy: isotype.PrecisionPolicy, name: str) -> None:
    assert_policy_holds(model, policy)
    losses = train(model, policy, tiny_batch(name))
    assert losses[-1] < losses[0] - 0.05
    loss = model(**tiny_batch(name)).loss
    loss.backward()
    assert math.isfinite(loss.item())
    generate(model, tiny_batch(name))
    assert_policy_holds(model, policy)
    assert enforce_model(model, policy) == ()


def trained_names(model: torch.nn.Module, part: str) -> list[str]:
    return [name for name, p in model.named_parameters() if p.requires_grad and part in name]


@pairwise("dtype, quantization, bias", LOW, STORAGES, ["all", "lora_only"], strength=1)
def test_trained_biases_stay_float32(saved: Saved, dtype: str, quantization: str | None, bias: str) -> None:
    model, policy = loaded(saved("llama-tied-bias"), dtype, quantization, bias=bias)
    names = trained_names(model, ".bias")
    assert len(names) == 2 * 4  # q, k, v, o of two layers
    before = {name: p.detach().clone() for name, p in model.named_parameters() if name in names}
    assert_trains_and_evaluates(model, policy, "llama-tied-bias")
    for name, parameter in model.named_parameters():
        if name in names:
            assert parameter.dtype == torch.float32
            # Adam's first steps move each number by about the learning rate: more digits than 16 bits hold.
            assert not torch.equal(parameter, parameter.to(policy.compute).float())
            assert not torch.equal(parameter, before[name])


@pairwise("quantization, dtype", STORAGES, LOW, strength=1)
def test_frozen_biases_lie_in_the_compute_dtype_and_are_left_alone(
    saved: Saved, dtype: str, quantization: str | None
) -> None:
    model, policy = loaded(saved("llama-tied-bias"), dtype, quantization)
    frozen = {
        n: p.detach().clone() for n, p in model.named_parameters() if n.endswith("proj.base_layer.bias")
    }
    assert {p.dtype for p in frozen.values()} == {policy.compute}
    assert_trains_and_evaluates(model, policy, "llama-tied-bias")
    for name, parameter in model.named_parameters():
        assert name not in frozen or torch.equal(parameter, frozen[name])


@pairwise(
    "part, dtype, quantization",
    [
        ("llama", ["lm_head"]),
        ("llama", ["embed_tokens", "lm_head"]),
        ("llama", ["input_layernorm", "norm"]),
        ("qwen3", ["q_norm", "k_norm"]),
        ("gemma2", ["embed_tokens"]),  # its embedding scales its output
        ("gpt-oss", ["router"]),
    ],
    LOW,
    [None, "nf4"],
    strength=1,
)
def test_modules_trained_whole(
    saved: Saved, part: tuple[str, list[str]], dtype: str, quantization: str | None
) -> None:
    name, modules = part
    targets = ["q_proj", "v_proj"]
    model, policy = loaded(saved(name), dtype, quantization, modules_to_save=modules, target_modules=targets)
    assert trained_names(model, "modules_to_save")
    assert_trains_and_evaluates(model, policy, name)


@pairwise("weight_tying, dtype", [False, True], LOW, strength=1)
def test_tied_embeddings_trained_whole(saved: Saved, dtype: str, weight_tying: bool) -> None:
    model, policy = loaded(
        saved("llama-tied-bias"),
        dtype,
        target_modules=["q_proj"],
        modules_to_save=["embed_tokens", "lm_head"],
        ensure_weight_tying=weight_tying,
    )
    copies = [p for n, p in model.named_parameters(remove_duplicate=False) if ".modules_to_save." in n]
    assert len({id(copy) for copy in copies}) == (1 if weight_tying else 2)
    assert_trains_and_evaluates(model, policy, "llama-tied-bias")


@pytest.mark.parametrize("quantization", STORAGES)
def test_unfrozen_norms_and_head_of_the_base_model(saved: Saved, quantization: str | None) -> None:
    model, policy = loaded(saved("phi"), "bfloat16", quantization)
    for name, parameter in model.named_parameters():
        if "norm" in name or "lm_head" in name:
            parameter.requires_grad_(True)
    changed = isotype.enforce(model)
    assert {str(change) for change in changed} >= {
        "base_model.model.lm_head.weight: bfloat16 -> float32",
        "base_model.model.lm_head: compute boundary set",
        "base_model.model.model.final_layernorm.bias: bfloat16 -> float32",
        "base_model.model.model.final_layernorm: float32 boundary set",
    }
    assert_trains_and_evaluates(model, policy, "phi")


@pairwise("dora, dtype", [False, True], LOW, strength=1)
def test_lora_on_an_embedding(saved: Saved, dtype: str, dora: bool) -> None:
    model, policy = loaded(saved("gemma2"), dtype, target_modules=["embed_tokens", "q_proj"], use_dora=dora)
    assert trained_names(model, "lora_embedding_A")
    assert_trains_and_evaluates(model, policy, "gemma2")


@pytest.mark.parametrize("dtype", LOW)
def test_the_first_magnitudes_of_dora_are_not_rounded(dtype: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 8)).to(getattr(torch, dtype))
    with torch.no_grad():
        model[0].weight.uniform_(-(2.0**14), 2.0**14)  # norms pass float16's largest number
    expected = torch.linalg.norm(model[0].weight.detach().double(), dim=1)
    policy = isotype.resolve_precision(model, dtype, device="cpu")
    adapted = isotype.add_lora(model, policy, target_modules=["0"], use_dora=True)
    (magnitude,) = [p for name, p in adapted.named_parameters() if "magnitude" in name]
    assert magnitude.requires_grad
    assert magnitude.dtype == torch.float32
    torch.testing.assert_close(magnitude.detach().double(), expected, rtol=1e-6, atol=0)


def test_dora_on_a_row_of_zeros_is_named() -> None:
    """DoRA divides by the row's norm: 0 / 0. xLSTM begins with gates whose weights are zero."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    torch.nn.init.zeros_(model[1].weight[2].detach())
    policy = isotype.resolve_precision(model, "float32", device="cpu")
    with pytest.warns(UserWarning, match="some weight rows of 1 are zero") as caught:
        adapted = isotype.add_lora(model, policy, target_modules=["0", "1"], use_dora=True)
    assert adapted(torch.ones(1, 4)).isnan().any()
    assert adapted.adapter_notes[-1] == str(caught[0].message)


@pytest.mark.parametrize(
    ("name", "settings", "layer"),
    [
        ("inkling_text", {"trainable_token_indices": {"embed_tokens": [5]}}, "model.embed_tokens"),
        ("inkling_text", {"target_modules": ["embed_tokens"]}, "model.embed_tokens"),
        ("bert-generation", {"trainable_token_indices": {"word_embeddings": [5]}}, "lm_head.decoder"),
    ],
)
def test_a_layer_whose_forward_peft_replaces_is_named(
    name: str, settings: dict[str, Any], layer: str
) -> None:
    """Inkling normalizes the rows of its embedding. BertGeneration's output layer is tied, and has a bias."""
    model, batch = ARCHITECTURES[name].build(torch.float32), ARCHITECTURES[name].batch()
    for bias in [p for n, p in model.named_parameters() if n.endswith("bias")]:
        torch.nn.init.ones_(bias)
    policy = isotype.resolve_precision(model, "float32", device="cpu")
    with pytest.warns(UserWarning, match="a merged model has other outputs") as caught:
        adapted = isotype.add_lora(
            model, policy, **{"target_modules": ["q_proj", "query"], **settings}
        ).eval()
    assert layer in adapted.adapter_notes[-1] == str(caught[0].message)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
        trained = adapted(**batch).logits
        merged = adapted.merge_and_unload()(**batch).logits
    assert not torch.allclose(trained, merged, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", LOW)
def test_trained_token_rows(saved: Saved, dtype: str) -> None:
    model, policy = loaded(saved("llama"), dtype, target_modules=["q_proj"], trainable_token_indices=[5, 6])
    (delta,) = [p for n, p in model.named_parameters() if "trainable_tokens_delta" in n]
    assert delta.dtype == torch.float32
    losses = []
    batch = tiny_batch("llama")
    batch["input_ids"][:, :2] = torch.tensor([5, 6])
    losses = train(model, policy, batch)
    assert losses[-1] < losses[0]
    model(**batch).loss.backward()
    assert_policy_holds(model, policy)


@pairwise(
    "quantization, lora",
    STORAGES,
    [{"use_rslora": True}, {"lora_dropout": 0.1}, {"lora_bias": True}],
    strength=1,
)
def test_other_variants(saved: Saved, lora: dict[str, Any], quantization: str | None) -> None:
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]  # the layers that have a bias
    model, policy = loaded(saved("llama-tied-bias"), "bfloat16", quantization, target_modules=targets, **lora)
    assert_trains_and_evaluates(model, policy, "llama-tied-bias")


@few(
    "quantization, name",
    list(product(STORAGES, ["llama", "qwen3-moe"])),
    (None, "llama"),
    ("nf4", "qwen3-moe"),
)
def test_several_adapters(saved: Saved, name: str, quantization: str | None) -> None:
    model, policy = loaded(saved(name), "bfloat16", quantization, modules_to_save=["lm_head"])
    config = copy.deepcopy(model.peft_config["default"])
    assert isotype.add_lora(model, policy, config, adapter_name="second") is model
    for active in ("default", "second", "default"):
        model.set_adapter(active)
        isotype.enforce(model)
        copies = [(n, p) for n, p in model.named_parameters() if "lora_" in n or ".modules_to_save." in n]
        assert {p.dtype for _, p in copies} == {torch.float32}
        assert {p.requires_grad for n, p in copies if f".{active}" in n} == {True}
        assert {p.requires_grad for n, p in copies if f".{active}" not in n} == {False}
        assert math.isfinite(train(model, policy, tiny_batch(name), steps=3)[-1])
        model(**tiny_batch(name)).loss.backward()
        assert_policy_holds(model, policy)
        assert enforce_model(model, policy) == ()
    with model.disable_adapter():
        generate(model, tiny_batch(name))


def test_the_adapter_added_last_is_active_and_each_is_saved_with_the_policy(
    saved: Saved, tmp_path: Path
) -> None:
    model, policy = loaded(saved("llama"), "bfloat16")
    assert model.active_adapters == ["default"]
    isotype.add_lora(model, policy, adapter_name="second", r=2)
    assert model.active_adapters == ["second"]
    assert {n.split(".")[-2] for n in trained_names(model, "lora_")} == {"second"}
    model.save_pretrained(tmp_path / "all")
    assert isotype.PrecisionPolicy.read(tmp_path / "all") == policy
    assert isotype.PrecisionPolicy.read(tmp_path / "all" / "second") == policy
    model.save_pretrained(tmp_path / "one", selected_adapters=["second"])
    assert isotype.PrecisionPolicy.read(tmp_path / "one" / "second") == policy
    assert isotype.PrecisionPolicy.read(tmp_path / "one") is None


def test_a_model_that_peft_wrapped_is_saved_with_the_policy_too(saved: Saved, tmp_path: Path) -> None:
    policy = isotype.resolve_precision(saved("llama"), "bfloat16", device="cpu")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    model = peft.get_peft_model(isotype.load(saved("llama"), policy), config, adapter_name="theirs")
    isotype.add_lora(model, policy, adapter_name="ours", r=2)
    model.save_pretrained(tmp_path)
    assert [isotype.PrecisionPolicy.read(tmp_path / name) for name in ("theirs", "ours")] == [policy] * 2


def test_inactive_masters_keep_their_digits(saved: Saved) -> None:
    model, policy = loaded(saved("llama"), "bfloat16")
    train(model, policy, tiny_batch("llama"), steps=3)
    before = {n: p.detach().clone() for n, p in model.named_parameters() if ".default" in n}
    isotype.add_lora(model, policy, adapter_name="second", r=2)
    model.set_adapter("second")
    isotype.enforce(model)
    for name, parameter in model.named_parameters():
        assert name not in before or torch.equal(parameter, before[name])


@pairwise(
    ["quantization", "modules, tolerance"],
    [None, "nf4"],
    [(None, 0.0), (["lm_head", "norm"], 3 * 2**-8)],
    strength=1,
)
def test_saved_adapters_are_plain_peft(
    saved: Saved, tmp_path: Path, quantization: str | None, modules: list[str] | None, tolerance: float
) -> None:
    model, policy = loaded(saved("llama"), "bfloat16", quantization, modules_to_save=modules)
    train(model, policy, tiny_batch("llama"), steps=3)
    model.eval().save_pretrained(tmp_path)
    assert isotype.PrecisionPolicy.read(tmp_path) == policy

    ours = peft.PeftModel.from_pretrained(isotype.load(saved("llama"), policy), tmp_path)
    isotype.enforce(ours, policy)
    # PEFT reads modules to save into copies in the base's dtype; the masters want their digits.
    peft.set_peft_model_state_dict(ours, peft.utils.load_peft_weights(str(tmp_path), device="cpu"))
    assert list(ours.state_dict()) == list(model.state_dict())
    plain = peft.PeftModel.from_pretrained(plain_base(saved("llama"), policy), tmp_path)
    for layer in plain.modules():
        keep_training_layout(layer)  # a CPU with AVX512-BF16 would repack 64 rows of 96, and raise: IST407
    assert not any(isinstance(module, Boundary) for module in plain.modules())
    with torch.no_grad(), autocast(policy):
        expected, again, logits = (m(**tiny_batch("llama")).logits.float() for m in (model, ours, plain))
    assert torch.equal(again, expected)
    assert (logits - expected).abs().max() <= tolerance * expected.abs().max()


def plain_base(directory: Path, policy: isotype.PrecisionPolicy) -> Any:
    import transformers

    quantization = None
    if policy.quantized:
        quantization = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type=policy.storage, bnb_4bit_compute_dtype=policy.compute
        )
    return transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=policy.compute, quantization_config=quantization
    )


def test_names_do_not_change(saved: Saved) -> None:
    model, _ = loaded(saved("gpt-oss"), "bfloat16", modules_to_save=["norm"])
    reference = peft.get_peft_model(
        plain_base(saved("gpt-oss"), isotype.resolve_precision(saved("gpt-oss"), "bfloat16", device="cpu")),
        copy.deepcopy(model.peft_config["default"]),
    )
    assert list(model.state_dict()) == list(reference.state_dict())
    assert [n for n, _ in model.named_modules()] == [n for n, _ in reference.named_modules()]
    assert {type(m).__name__ for m in model.modules()} == {type(m).__name__ for m in reference.modules()}


@pytest.mark.parametrize(
    ("name", "value"),
    [("use_dora", True), *(("init_lora_weights", s) for s in ("orthogonal", "olora", "pissa"))],
)
def test_experts_are_left_out_where_peft_cannot_adapt_them_and_it_is_said(
    saved: Saved, name: str, value: Any
) -> None:
    policy = isotype.resolve_precision(saved("qwen3-moe"), "bfloat16", device="cpu")
    model = isotype.load(saved("qwen3-moe"), policy)
    with pytest.warns(UserWarning, match="stacked expert") as caught:
        model = isotype.add_lora(model, policy, **{name: value}, lora_dropout=0.05)
    assert [str(warning.message) for warning in caught if warning.category is UserWarning] == [
        "adapters are on 8 linear layers (k_proj, o_proj, q_proj, v_proj: 33 % of all values); not on 4 stacked expert "
        f"weights (down_proj, gate_up_proj: 66 % of all values): PEFT cannot adapt them with {name} {value}; "
        "not on 2 routers (gate: 0.69 % of all values): routers get adapters only if the targets name them"
    ]
    assert not any("experts" in name for name in trained_names(model, "lora_"))
    assert model.adapter_notes == (str(caught[0].message),)
    plain, _ = loaded(saved("llama"), "bfloat16", use_dora=True)
    assert plain.adapter_notes == ()


def test_experts_drop_out_and_the_config_is_one_that_peft_reads(saved: Saved, tmp_path: Path) -> None:
    model, _ = loaded(saved("qwen3-moe"), "float32", r=4, lora_dropout=0.25)
    rates = {layer.lora_dropout["default"].p for layer in model.modules() if hasattr(layer, "lora_A")}
    assert rates == {0.25}
    assert sum("experts" in name for name in trained_names(model, "lora_A")) == 4
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.2)
    model.save_pretrained(tmp_path)
    base = transformers.AutoModelForCausalLM.from_pretrained(saved("qwen3-moe"), dtype=torch.float32)
    plain = peft.PeftModel.from_pretrained(base, tmp_path)
    ids = torch.arange(1, 9)[None]
    torch.testing.assert_close(model.eval()(ids).logits, plain.eval()(ids).logits)


def test_settings_given_twice(saved: Saved) -> None:
    policy = isotype.resolve_precision(saved("llama"), "bfloat16", device="cpu")
    assert refused(
        isotype.UsageError, isotype.add_lora, object(), policy, peft.LoraConfig(), r=4, lora_alpha=8
    ) == (
        "adapter settings given twice\n"
        "  - config=… and r, lora_alpha\n"
        "    expected  one of the two\n"
        "    fix       put them into the LoraConfig, or omit the config"
    )


def test_no_adapter_where_every_weight_is_trained(saved: Saved) -> None:
    policy = isotype.resolve_precision(saved("llama"), "bfloat16", device="cpu", trainable="full")
    assert refused(isotype.PrecisionError, isotype.add_lora, object(), policy) == (
        "the policy trains every weight, so it has no adapters\n"
        "  - trainable='full'\n"
        "    expected  trainable='lora'\n"
        "    fix       resolve the policy with trainable='lora'"
    )


def test_nothing_is_said_of_names_that_libraries_have_for_each_other() -> None:
    model = tiny_model("llama", torch.bfloat16)
    policy = isotype.resolve_precision(model, dtype="bfloat16", device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        isotype.add_lora(model, policy, r=4)
