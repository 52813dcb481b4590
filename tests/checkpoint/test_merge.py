"""isotype merge: the sum against an independent reference, its rounding, its files and its errors."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import resource
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import peft
import pytest
import torch
import transformers
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from isotype.checkpoint.adapter import load_for_inference
from isotype.checkpoint.load import load
from isotype.checkpoint.merge import write
from isotype.checkpoint.merge.merge import merge_adapter
from isotype.checkpoint.merge.report import (
    Form,
    LogitsDifference,
    MergeReport,
    WeightLoss,
    compare_logits,
    rounding_loss,
)
from isotype.checkpoint.resolve import resolve_precision
from isotype.core.errors import CheckpointError, PrecisionError, SaveError, UsageError
from isotype.core.files import directory_lock, remove_abandoned
from isotype.model.adapters import add_lora
from isotype.precision.policy import POLICY_FILE, ModuleException
from isotype.report.inspect import show_merge
from tests.adapters import save_trained
from tests.checkpoint.test_quantized import AWQ, in_awq
from tests.pairwise import few, pairwise
from tests.refusals import refused
from tests.zoo import ARCHITECTURES

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

WORDS = (
    "[UNK]",
    "[PAD]",
    "[EOS]",
    "a",
    "careful",
    "decides",
    "digits",
    "dtype",
    "engineer",
    "matrix",
    "tensor",
)
TARGETS = ["q_proj", "down_proj"]
Q = "model.layers.0.self_attn.q_proj"
Make = Callable[..., Path]


def tokenizer() -> Any:
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="[UNK]", pad_token="[PAD]", eos_token="[EOS]"
    )


def save_base(directory: Path, dtype: torch.dtype = torch.float32, **config: Any) -> Path:
    settings = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "attention_bias": True,
        "eos_token_id": 2,
        "pad_token_id": 1,
        "initializer_range": 0.2,
    }
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(settings | config))).to(dtype)
    model.save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The adapters on `base` that were saved before, by their settings."""
    return {"": tmp_path_factory.mktemp("adapters")}


@pytest.fixture
def make(base: Path, adapters: dict[str, Path], tmp_path: Path) -> Make:
    """Save an adapter on `base` with random trained values."""

    def copied(*arguments: Any, on: Path = base, **settings: Any) -> Path:
        if on != base:
            return save(tmp_path / "adapter", *arguments, on=on, **settings)
        key = repr((arguments, sorted(settings.items())))
        if key not in adapters:
            adapters[key] = save(adapters[""] / str(len(adapters)), *arguments, on=base, **settings)
        return Path(shutil.copytree(adapters[key], tmp_path / "adapter"))

    def save(
        directory: Path,
        storage: str | None = None,
        dtype: str = "float32",
        *,
        on: Path,
        scale: float = 0.02,
        **lora: Any,
    ) -> Path:
        policy = resolve_precision(on, dtype, storage, "cpu")
        settings: dict[str, Any] = {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": TARGETS,
            "task_type": "CAUSAL_LM",
        } | lora
        model = add_lora(load(on, policy), policy, **settings)
        return save_trained(model, directory, seed=1, scale=scale)

    return copied


def stored(base: Path, name: str, storage: str | None, compute: torch.dtype = torch.float32) -> Any:
    """Return the weight that a layer with this storage computes with, by bitsandbytes' functions."""
    from bitsandbytes import functional as bnb

    weight = load_file(base / "model.safetensors")[f"{name}.weight"]
    if storage == "int8":  # the codes come from the checkpoint's values
        codes, constants, _ = bnb.int8_vectorwise_quant(weight.half())
        return codes.double() * constants.double()[:, None] / 127
    weight = weight.to(compute)
    if storage is None:
        return weight
    return bnb.dequantize_4bit(*bnb.quantize_4bit(weight, quant_type=storage))


def reference(base: Path, adapter: Path, name: str, storage: str | None, **kwargs: Any) -> Any:
    """Return W + scaling * B A in float64; for DoRA m * (W + D) / ||W + D|| by rows (https://arxiv.org/abs/2402.09353)."""
    saved = load_file(adapter / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    key = f"base_model.model.{name}.lora_"
    rank = config["r"]
    scaling = config["lora_alpha"] / (rank**0.5 if config["use_rslora"] else rank)
    delta = scaling * saved[f"{key}B.weight"].double() @ saved[f"{key}A.weight"].double()
    merged = stored(base, name, storage, **kwargs).double() + delta
    if not config["use_dora"]:
        return merged
    return saved[f"{key}magnitude_vector"].double()[:, None] * merged / merged.norm(dim=1, keepdim=True)


def plain(directory: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(directory).eval()


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model(input_ids=torch.arange(1, 17)[None]).logits.double()


# ----------------------------------------------------------------------------------------------------- the sum


@pairwise(
    "dora, storage",
    [pytest.param(False, id="lora"), pytest.param(True, id="dora")],
    [None, "nf4", pytest.param("fp4", marks=pytest.mark.exhaustive), "int8"],
    strength=1,
)
def test_the_sum_is_the_references(
    base: Path, make: Make, tmp_path: Path, storage: str | None, dora: bool
) -> None:
    adapter = make(storage, use_dora=dora)
    report = merge_adapter(adapter, tmp_path / "merged")
    merged = plain(tmp_path / "merged")
    for name in (Q, "model.layers.0.mlp.down_proj"):
        expected = reference(base, adapter, name, storage)
        torch.testing.assert_close(
            merged.get_parameter(f"{name}.weight").double(), expected, atol=2e-6, rtol=2e-6
        )
    kept = "model.layers.0.self_attn.k_proj"
    torch.testing.assert_close(
        merged.get_parameter(f"{kept}.weight").double(),
        stored(base, kept, storage).double(),
        atol=1e-6,
        rtol=0,
    )
    trained, _, _ = load_for_inference(adapter)
    # LLM.int8 also rounds its inputs to 8 bits; other layers differ only by the order of float32 sums.
    tolerance = 0.3 if storage == "int8" else 2e-4
    torch.testing.assert_close(logits(merged), logits(trained), atol=tolerance, rtol=0)
    assert report.logits is not None
    assert report.logits.max_abs < tolerance
    assert (report.storage, report.dtype, report.vanished) == (storage or "float32", torch.float32, 0)
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())


@few("storage", [None, "nf4", "int8"], "nf4")
def test_the_sum_is_rounded_once_and_right_on_average(
    base: Path, make: Make, tmp_path: Path, storage: str | None
) -> None:
    adapter = make(storage, "bfloat16")
    report = merge_adapter(adapter, tmp_path / "merged")
    found = load_file(tmp_path / "merged" / "model.safetensors")[f"{Q}.weight"]
    exact = reference(base, adapter, Q, storage, compute=torch.bfloat16)
    assert found.dtype == torch.bfloat16
    # Each entry is one of its two neighbours in bfloat16, at most 2^-7 of its value apart.
    assert ((found.double() - exact).abs() <= exact.abs() * 2**-7 + 2e-7).all()
    delta = exact - stored(base, Q, storage, torch.bfloat16).double()
    # The error is the step times a draw with a variance of at most 1/4: its mean along the update is within 5 standard deviations.
    spread = float((delta * exact * 2**-7).norm()) / 2
    assert abs(float(((found.double() - exact) * delta).sum())) < 5 * spread
    [loss] = [weight for weight in report.weights if weight.name == f"{Q}.weight"]
    assert loss.relative_error == pytest.approx(
        float((found.double() - exact).norm() / delta.norm()), rel=1e-2
    )
    merge_adapter(adapter, tmp_path / "again")
    assert torch.equal(load_file(tmp_path / "again" / "model.safetensors")[f"{Q}.weight"], found)


def test_float32_weights_of_a_training_under_autocast_keep_their_digits(base: Path, tmp_path: Path) -> None:
    policy = resolve_precision(base, "bfloat16", device="cpu", storage="float32")
    model = add_lora(load(base, policy), policy, r=4, target_modules=TARGETS, task_type="CAUSAL_LM")
    adapter = save_trained(model, tmp_path / "adapter", seed=1, scale=0.02)
    merge_adapter(adapter, tmp_path / "merged", dtype="float32")
    merged = plain(tmp_path / "merged")
    kept = "model.layers.0.self_attn.k_proj"
    assert torch.equal(merged.get_parameter(f"{kept}.weight"), stored(base, kept, None))
    sums = merged.get_parameter(f"{Q}.weight").double()
    torch.testing.assert_close(sums, reference(base, adapter, Q, None), atol=2e-6, rtol=2e-6)


@few("storage", [None, "nf4"], "nf4")
def test_biases_and_whole_modules_are_merged_with_every_digit(
    make: Make, tmp_path: Path, storage: str | None
) -> None:
    adapter = make(
        storage, "bfloat16", bias="all", modules_to_save=["lm_head", "embed_tokens"], use_rslora=True
    )
    report = merge_adapter(adapter, tmp_path / "merged", dtype="float32")
    saved = load_file(adapter / "adapter_model.safetensors")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    for name in ("lm_head.weight", "model.embed_tokens.weight", f"{Q}.bias"):
        key = f"base_model.model.{name}"
        value = saved.get(key, saved.get(key.replace(".bias", ".base_layer.bias")))
        assert value is not None
        assert value.dtype == torch.float32
        assert torch.equal(merged[name], value), name
        assert not torch.equal(value, value.bfloat16().float()), "the test needs digits that bfloat16 has not"
    assert {"lm_head.weight", "model.embed_tokens.weight", f"{Q}.bias", f"{Q}.weight"} <= {
        weight.name for weight in report.weights
    }


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning")
def test_a_second_rank_pattern_and_an_adapted_embedding(base: Path, make: Make, tmp_path: Path) -> None:
    adapter = make(target_modules=["q_proj", "embed_tokens"], rank_pattern={"q_proj": 2}, lora_bias=False)
    report = merge_adapter(adapter, tmp_path / "merged")
    saved = load_file(adapter / "adapter_model.safetensors")
    key = "base_model.model.model.embed_tokens.lora_embedding_"
    delta = 2.0 * (saved[f"{key}B"].double() @ saved[f"{key}A"].double()).T
    before = load_file(base / "model.safetensors")["model.embed_tokens.weight"].double()
    merged = load_file(tmp_path / "merged" / "model.safetensors")["model.embed_tokens.weight"].double()
    torch.testing.assert_close(merged, before + delta, atol=1e-6, rtol=1e-6)
    assert [weight.name for weight in report.weights] == ["model.embed_tokens.weight", f"{Q}.weight"]


KINDS: dict[str, dict[str, Any]] = {
    "IA3Config": {"feedforward_modules": []},
    "LoHaConfig": {},
    "OFTConfig": {"r": 0, "oft_block_size": 8},  # PEFT's default rank
    "HiraConfig": {"r": 4},  # its merge writes into the weight
    "VBLoRAConfig": {
        "num_vectors": 16,
        "vector_length": 16,
        "r": 4,
    },  # all layers share a parameter, saved once
    "LNTuningConfig": {"target_modules": ["input_layernorm"]},
}


def save_kind(base: Path, directory: Path, kind: str, dtype: str = "float32", **more: Any) -> Path:
    policy = resolve_precision(base, dtype, None, "cpu")
    common = {"target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    model = add_lora(load(base, policy), policy, getattr(peft, kind)(**{**common, **more}))
    return save_trained(model, directory, seed=2, scale=0.05)


@pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning")  # of norms
@few("kind", list(KINDS), "OFTConfig", "VBLoRAConfig", "HiraConfig", "LNTuningConfig")
def test_other_kinds_of_adapter(tmp_path: Path, kind: str) -> None:
    base = save_base(tmp_path / "base", num_hidden_layers=2)
    adapter = save_kind(base, tmp_path / "adapter", kind, **KINDS[kind])
    report = merge_adapter(adapter, tmp_path / "merged")
    assert report.logits is not None
    assert report.logits.max_abs < 5e-4
    name = "input_layernorm" if kind == "LNTuningConfig" else "self_attn.q_proj"
    assert [weight.name for weight in report.weights] == [f"model.layers.{i}.{name}.weight" for i in range(2)]
    theirs = peft.PeftModel.from_pretrained(plain(base), adapter).eval()
    torch.testing.assert_close(logits(plain(tmp_path / "merged")), logits(theirs), atol=5e-4, rtol=0)


@pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning")
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("LNTuningConfig", {"target_modules": ["input_layernorm", "norm"]}),
        ("PromptTuningConfig", {"num_virtual_tokens": 4}),
    ],
)
def test_adapters_that_wrap_no_linear_layer_run_in_16_bits(
    base: Path, tmp_path: Path, kind: str, more: dict[str, Any]
) -> None:
    model = peft.get_peft_model(plain(base), getattr(peft, kind)(task_type="CAUSAL_LM", **more))
    adapter = save_trained(model, tmp_path / "adapter", seed=2, scale=0.05)
    ours, _, _ = load_for_inference(adapter, "bfloat16")
    theirs = peft.PeftModel.from_pretrained(plain(base), adapter).eval()
    expected = logits(theirs)
    # A rounding is at most 2^-9 of a value; the residual stream and its products have fewer than 16 in one layer.
    assert float((logits(ours) - expected).norm() / expected.norm()) < 16 * 2**-9


# -------------------------------------------------------------------------------------------- tied embeddings


def tied_adapter(make: Make, directory: Path, **lora: Any) -> Path:
    return make("nf4", on=save_base(directory, tie_word_embeddings=True), **lora)


def test_tied_embeddings_stay_tied(make: Make, tmp_path: Path) -> None:
    report = merge_adapter(tied_adapter(make, tmp_path / "base"), tmp_path / "merged")
    merged = plain(tmp_path / "merged")
    assert merged.lm_head.weight is merged.model.embed_tokens.weight
    assert "lm_head.weight" not in load_file(tmp_path / "merged" / "model.safetensors")
    assert report.notes == ()


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning")
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@few("how", ["target_modules", "modules_to_save"], "modules_to_save")
def test_tied_embeddings_that_were_trained_apart_are_both_stored(
    make: Make, tmp_path: Path, how: str
) -> None:
    lora = (
        {"target_modules": ["q_proj", "lm_head"]}
        if how == "target_modules"
        else {"modules_to_save": ["lm_head"]}
    )
    adapter = tied_adapter(make, tmp_path / "base", **lora)
    report = merge_adapter(adapter, tmp_path / "merged")
    merged = plain(tmp_path / "merged")
    embeddings = load_file(tmp_path / "base" / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(merged.model.embed_tokens.weight, embeddings)
    assert not torch.equal(merged.lm_head.weight, embeddings)
    trained, _, _ = load_for_inference(adapter)
    torch.testing.assert_close(logits(merged), logits(trained), atol=2e-4, rtol=0)
    assert report.notes == (
        "the base ties input and output embeddings, and the adapter changes them differently: the merged model stores "
        "both (tie_word_embeddings is false)",
    )


@few("name", ["bart-s2s", "m2m_100-s2s", "t5-s2s"], "bart-s2s")
def test_an_encoder_and_a_decoder_that_share_an_embedding_store_it(name: str, tmp_path: Path) -> None:
    """A model that unties its output embedding no longer ties the embeddings of its encoder and decoder either."""
    architecture = ARCHITECTURES[name]
    base = architecture.build(torch.float32)
    base.save_pretrained(tmp_path / "base")
    policy = resolve_precision(tmp_path / "base", "float32", device="cpu")
    model = add_lora(load(tmp_path / "base", policy), policy, r=2, modules_to_save=["lm_head"])
    save_trained(model, tmp_path / "adapter")
    merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    merged = type(base).from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    with torch.no_grad():
        result, expected = (m(**architecture.batch()).logits for m in (merged, model.eval()))
    torch.testing.assert_close(result, expected, atol=1e-4, rtol=1e-4)


# ------------------------------------------------------------------------------------------------ base and dtype


def test_another_base_is_taken_as_it_is_stored(make: Make, tmp_path: Path) -> None:
    original = save_base(tmp_path / "original", torch.bfloat16)
    adapter = make("nf4", "bfloat16", on=original)
    report = merge_adapter(adapter, tmp_path / "merged", base=original)
    found = load_file(tmp_path / "merged" / "model.safetensors")[f"{Q}.weight"]
    exact = reference(original, adapter, Q, None, compute=torch.bfloat16)
    assert ((found.double() - exact).abs() <= exact.abs() * 2**-7 + 2e-7).all()
    assert (report.storage, report.base) == ("bfloat16", str(original))
    assert report.notes == (
        "the adapter was trained on nf4 weights and merged into others: the logits also differ because nf4 rounds the weights",
    )
    assert report.logits is not None
    assert report.logits.mean_kl > 0


def test_a_trained_base_that_is_gone_is_no_obstacle_to_another_one(make: Make, tmp_path: Path) -> None:
    adapter = make(on=save_base(tmp_path / "trained"))
    (tmp_path / "trained").rename(tmp_path / "moved")
    report = merge_adapter(adapter, tmp_path / "merged", base=tmp_path / "moved")
    assert report.logits is None
    assert report.notes == (
        "logits were not compared: the adapter's base model cannot be opened "
        f"({adapter}/adapter_config.json names {tmp_path}/trained (no such model: model {tmp_path}/trained))",
    )
    torch.testing.assert_close(
        load_file(tmp_path / "merged" / "model.safetensors")[f"{Q}.weight"].double(),
        reference(tmp_path / "moved", adapter, Q, None),
        atol=2e-6,
        rtol=2e-6,
    )


def test_the_dtype_is_never_float16_unless_it_was_trained_from_float16(make: Make, tmp_path: Path) -> None:
    adapter = make("nf4", "float16", on=save_base(tmp_path / "bf16", torch.bfloat16))
    report = merge_adapter(adapter, tmp_path / "merged")
    assert report.dtype == torch.bfloat16
    assert report.dtype_reason == (
        "the dtype of the base checkpoint: the adapter was trained in float16, which cannot represent every bfloat16 value"
    )
    asked = merge_adapter(adapter, tmp_path / "asked", dtype="float16")
    assert (asked.dtype, asked.dtype_reason) == (torch.float16, "as requested")
    assert json.loads((tmp_path / "asked" / "config.json").read_text())["dtype"] == "float16"


def test_without_a_policy_the_base_is_as_it_is_stored(make: Make, tmp_path: Path) -> None:
    adapter = make("nf4", "bfloat16", on=save_base(tmp_path / "bf16", torch.bfloat16))
    (adapter / POLICY_FILE).unlink()
    report = merge_adapter(adapter, tmp_path / "merged")
    assert report.dtype == torch.bfloat16
    assert (
        report.dtype_reason
        == "the dtype of the base checkpoint, because the adapter has no precision_policy.json"
    )
    assert report.notes[0].startswith(
        "the adapter has no precision_policy.json: the base was used as it is stored, in "
    )


def test_a_base_saved_in_nf4_is_dequantized(base: Path, make: Make, tmp_path: Path) -> None:
    policy = resolve_precision(base, "float32", "nf4", "cpu")
    quantized = load(base, policy)
    quantized.save_pretrained(tmp_path / "nf4")
    tokenizer().save_pretrained(tmp_path / "nf4")
    adapter = make(on=tmp_path / "nf4")
    report = merge_adapter(adapter, tmp_path / "merged")
    assert report.storage == "nf4"
    torch.testing.assert_close(
        load_file(tmp_path / "merged" / "model.safetensors")[f"{Q}.weight"].double(),
        reference(base, adapter, Q, "nf4"),
        atol=2e-6,
        rtol=2e-6,
    )


def test_an_awq_base_is_dequantized(base: Path, make: Make, tmp_path: Path) -> None:
    path = Path(shutil.copytree(base, tmp_path / "awq"))
    tensors = load_file(path / "model.safetensors")
    before, wanted = tensors[f"{Q}.weight"].double(), dict[str, torch.Tensor]()
    in_awq(32, wanted)(tensors)
    save_file(
        {name: each.contiguous() for name, each in tensors.items()},
        path / "model.safetensors",
        {"format": "pt"},
    )
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": AWQ}))
    adapter = make(on=path)
    report = merge_adapter(adapter, tmp_path / "merged")
    assert report.logits is not None
    assert report.logits.max_abs < 1e-3
    merged = load_file(tmp_path / "merged" / "model.safetensors")[f"{Q}.weight"].double()
    expected = reference(base, adapter, Q, None) - before + wanted[f"{Q}.weight"]
    torch.testing.assert_close(merged, expected, atol=2e-6, rtol=2e-6)
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())


@few("storage", [None, "nf4"], "nf4")
def test_a_classifier_is_merged_with_its_head(base: Path, tmp_path: Path, storage: str | None) -> None:
    policy = resolve_precision(base, "float32", storage, "cpu")
    model = load(base, policy, model_class=transformers.AutoModelForSequenceClassification, num_labels=3)
    model = add_lora(model, policy, r=4, target_modules=TARGETS, task_type="SEQ_CLS")
    model.save_pretrained(tmp_path / "adapter")
    report = merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    merged = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    head = model.base_model.model.score.modules_to_save.default.weight
    assert torch.equal(merged.score.weight, head)
    assert report.logits is not None
    assert report.logits.max_abs < 1e-5


def test_pinned_parameters_stay_float32(tmp_path: Path) -> None:
    config = transformers.T5Config(
        vocab_size=64, d_model=64, d_kv=16, d_ff=64, num_layers=1, num_heads=4, decoder_start_token_id=1
    )
    torch.manual_seed(6)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    tokenizer().save_pretrained(tmp_path / "t5")
    policy = resolve_precision(tmp_path / "t5", "bfloat16", None, "cpu")
    assert policy.pinned == ("wo",)
    model = add_lora(
        load(tmp_path / "t5", policy), policy, target_modules=["q", "wo"], task_type="SEQ_2_SEQ_LM"
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data += 0.02
    model.save_pretrained(tmp_path / "adapter")
    report = merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    dtypes = {
        name: tensor.dtype for name, tensor in load_file(tmp_path / "merged" / "model.safetensors").items()
    }
    pinned = {name for name, dtype in dtypes.items() if dtype == torch.float32}
    assert pinned == {name for name in dtypes if ".wo." in name}
    assert len(pinned) == 2
    assert report.logits is not None
    lost = {weight.name: weight.relative_error for weight in report.weights}
    assert all((error == 0) == (".wo." in name) for name, error in lost.items())
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_float16_overflow_is_an_error_that_names_the_weights(make: Make, tmp_path: Path) -> None:
    adapter = make(modules_to_save=["lm_head"])
    file = adapter / "adapter_model.safetensors"
    saved = load_file(file)
    saved["base_model.model.lm_head.weight"][3, 3] = 1e5
    save_file(saved, file, {"format": "pt"})
    assert refused(PrecisionError, merge_adapter, adapter, tmp_path / "merged", dtype="fp16") == (
        "float16 cannot represent the merged weights\n"
        "  - lm_head.weight: values up to 1e+05\n"
        "    expected  at most 65504\n"
        "    fix       set --dtype bfloat16 or float32"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter"]


# ------------------------------------------------------------------------------------------------------- files


def test_the_output_is_whole_and_takes_the_adapters_tokenizer(base: Path, make: Make, tmp_path: Path) -> None:
    adapter = make("nf4", "bfloat16")
    own = tokenizer()
    own.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    own.save_pretrained(adapter)
    (tmp_path / "merged").mkdir()
    report = merge_adapter(adapter, tmp_path / "merged")
    names = {path.name for path in (tmp_path / "merged").iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= names
    assert report.bytes == sum(path.stat().st_size for path in (tmp_path / "merged").iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "merged"]
    back = transformers.AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert back.chat_template == own.chat_template
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert (config["dtype"], config["architectures"]) == ("bfloat16", ["LlamaForCausalLM"])
    assert {tensor.dtype for tensor in load_file(tmp_path / "merged" / "model.safetensors").values()} == {
        torch.bfloat16
    }


def test_without_a_tokenizer_the_merge_says_what_it_left_out(make: Make, tmp_path: Path) -> None:
    bare = save_base(tmp_path / "bare")
    for file in bare.glob("token*"):
        file.unlink()
    report = merge_adapter(make(on=bare), tmp_path / "merged")
    assert report.logits is None
    assert report.notes == ("logits were not compared, because neither adapter nor base has a tokenizer",)
    assert (tmp_path / "merged" / "model.safetensors").is_file()


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning")
def test_added_tokens_bring_the_vocabulary_along(base: Path, tmp_path: Path) -> None:
    policy = resolve_precision(base, "float32", None, "cpu")
    model = load(base, policy)
    model.resize_token_embeddings(70, mean_resizing=False)
    model = add_lora(
        model,
        policy,
        r=4,
        target_modules=TARGETS,
        modules_to_save=["embed_tokens", "lm_head"],
        task_type="CAUSAL_LM",
    )
    report = merge_adapter(save_trained(model, tmp_path / "adapter"), tmp_path / "merged")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    trained = model.base_model.model.model.embed_tokens.modules_to_save.default.weight
    assert trained.shape == (70, 64)
    assert torch.equal(merged["model.embed_tokens.weight"], trained)
    assert merged["lm_head.weight"].shape == (70, 64)
    assert report.logits is not None


@contextmanager
def largest_file(limit: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_write_that_fails_leaves_nothing(make: Make, tmp_path: Path) -> None:
    adapter = make()
    with largest_file(50_000), pytest.raises(SaveError) as caught:
        merge_adapter(adapter, tmp_path / "merged")
    assert re.fullmatch(
        rf"the merged model cannot be written\n  - {tmp_path}/merged: .*File too large.*\n"
        r"    expected  a writable directory on a disk with free space\n"
        r"    fix       free some space, or set --output on another disk\n"
        r"  = the adapter and its base are unchanged, and no partial file remains: run the same command again",
        str(caught.value),
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter"]


def test_a_full_disk_is_found_before_the_first_byte(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = make()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))
    assert refused(SaveError, merge_adapter, adapter, tmp_path / "merged") == (
        "the merged model cannot be written\n"
        f"  - {tmp_path}: 0 B are free\n"
        "    expected  178 KiB for the weights\n"
        "    fix       free some space, or set --output on another disk\n"
        "  = the adapter and its base are unchanged, and no partial file remains: run the same command again"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter"]


def test_a_disk_without_room_for_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = os.strerror(errno.ENOSPC)
    monkeypatch.setattr(write, "why_unusable", lambda folder: full)
    with pytest.raises(SaveError, match="the merged model cannot be written") as caught:
        merge_adapter(tmp_path / "no adapter", tmp_path / "merged")
    assert caught.value.problems[0].given == f"{tmp_path / 'merged'}: {full}"


def test_what_a_killed_merge_left_is_removed_and_what_a_living_one_builds_is_not(
    make: Make, tmp_path: Path
) -> None:
    adapter = make()
    left, lives = (tmp_path / f".{name}.0a1b.isotype-merging" for name in ("other", "merged"))
    for each in (left, lives):
        each.mkdir()
        (each / "model.safetensors").write_bytes(bytes(100))
    with directory_lock(lives):
        merge_adapter(adapter, tmp_path / "merged")
        assert sorted(path.name for path in tmp_path.iterdir()) == [lives.name, "adapter", "merged"]
    remove_abandoned([lives])
    assert not lives.exists()


# ------------------------------------------------------------------------------------------------------ errors


def test_an_output_that_cannot_be_made_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write to the output directory") as caught:
        merge_adapter(tmp_path / "no adapter", tmp_path / "file" / "below" / "merged")
    assert caught.value.problems[0].given == f"--output {tmp_path}/file/below/merged: Not a directory"


def test_an_output_that_is_taken(base: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    assert refused(UsageError, merge_adapter, tmp_path, tmp_path / "file") == (
        "the output directory already exists\n"
        f"  - --output {tmp_path}/file: a file\n"
        "    expected  a directory that does not exist yet, or an empty one\n"
        "    fix       use another directory, or remove this one first"
    )
    with pytest.raises(UsageError, match=f"--output {base}: a directory with files in it"):
        merge_adapter(tmp_path, base)


def test_no_adapter(base: Path, tmp_path: Path) -> None:
    assert refused(CheckpointError, merge_adapter, tmp_path / "nowhere", tmp_path / "merged") == (
        "no such adapter\n"
        f"  - adapter {tmp_path}/nowhere\n"
        "    expected  a directory that exists\n"
        "    fix       check the path"
    )
    assert refused(CheckpointError, merge_adapter, base, tmp_path / "merged") == (
        "not an adapter\n"
        f"  - the directory {base} holds config.json, generation_config.json, model.safetensors, tokenizer.json, "
        "tokenizer_config.json\n"
        "    expected  adapter_config.json and adapter_model.safetensors\n"
        "    fix       pass the directory of an adapter; this directory contains a whole model, which needs no merge"
    )


def test_an_adapter_without_weights(make: Make, tmp_path: Path) -> None:
    adapter = make()
    (adapter / "adapter_model.safetensors").unlink()
    (adapter / "README.md").unlink(missing_ok=True)
    assert refused(CheckpointError, merge_adapter, adapter, tmp_path / "merged") == (
        "an adapter without weights\n"
        f"  - the directory {adapter} holds adapter_config.json, precision_policy.json\n"
        "    expected  adapter_model.safetensors\n"
        "    fix       pass the --output_dir of a training run that has ended, or one of its checkpoint folders"
    )


def edit_config(adapter: Path, **values: Any) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_base_that_is_gone(make: Make, tmp_path: Path) -> None:
    adapter = make()
    edit_config(adapter, base_model_name_or_path=str(tmp_path / "gone"))
    assert refused(CheckpointError, merge_adapter, adapter, tmp_path / "merged") == (
        "the adapter's base model cannot be opened\n"
        f"  - {adapter}/adapter_config.json names {tmp_path}/gone (no such model: model {tmp_path}/gone)\n"
        "    expected  the model that the adapter was trained on\n"
        "    fix       correct base_model_name_or_path in that file (isotype merge also accepts --base)"
    )
    edit_config(adapter, base_model_name_or_path=None)
    with pytest.raises(CheckpointError, match="the adapter names no base model"):
        merge_adapter(adapter, tmp_path / "merged")


def test_a_base_of_another_shape(make: Make, tmp_path: Path) -> None:
    adapter = make(target_modules=["q_proj"])
    other = save_base(tmp_path / "wide", hidden_size=128)
    assert refused(CheckpointError, merge_adapter, adapter, tmp_path / "merged", base=other) == (
        f"the adapter {adapter} does not fit the base model, a LlamaForCausalLM\n"
        f"  - {Q}.lora_A.weight of shape (4, 64)\n"
        "    expected  shape (4, 128), for this base model\n"
        "    fix       use the base model that the adapter was trained on\n"
        f"  - {Q}.lora_B.weight of shape (64, 4)\n"
        "    expected  shape (128, 4), for this base model\n"
        "    fix       use the base model that the adapter was trained on"
    )


def test_a_base_of_another_depth(make: Make, tmp_path: Path) -> None:
    deep = save_base(tmp_path / "deep", num_hidden_layers=2)
    assert "no tensor model.layers.1.self_attn.q_proj.lora_A.weight" in refused(
        CheckpointError, merge_adapter, make(), tmp_path / "merged", base=deep
    )
    adapter = make(on=deep)
    shallow = save_base(tmp_path / "shallow")
    with pytest.raises(CheckpointError) as caught:
        merge_adapter(adapter, tmp_path / "merged", base=shallow)
    assert (
        "tensor model.layers.1.self_attn.q_proj.lora_A.weight\n    expected  a module with this name"
        in str(caught.value)
    )


def test_names_without_the_prefix_of_the_base_are_one_problem(make: Make, tmp_path: Path) -> None:
    """huggingface/peft #1579: every tensor has another name than the base model's, for the same reason."""
    adapter = make(target_modules=["q_proj"])
    file = adapter / "adapter_model.safetensors"
    weights = {name.replace("model.model.", "model."): value for name, value in load_file(file).items()}
    save_file(weights, file)
    assert refused(CheckpointError, merge_adapter, adapter, tmp_path / "merged") == (
        f"the adapter {adapter} does not fit the base model, a LlamaForCausalLM\n"
        "  - the prefix '' instead of 'model.' in the names of 2 tensors\n"
        f"    expected  names as in the base model: {Q}.lora_A.weight\n"
        "    fix       use the base model that the adapter was trained on, or rename the tensors in the file: "
        f"base_model.model.{Q.removeprefix('model.')}.lora_A.weight to base_model.model.{Q}.lora_A.weight"
    )


def test_a_base_of_another_architecture(make: Make, tmp_path: Path) -> None:
    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    adapter = make()
    with pytest.raises(CheckpointError) as caught:
        merge_adapter(adapter, tmp_path / "merged", base=tmp_path / "gpt2")
    assert caught.value.headline == f"the adapter {adapter} does not fit the base model, a GPT2LMHeadModel"
    assert "not found in the base model" in caught.value.problems[0].given


def test_another_model_into_which_the_adapter_would_fit(base: Path, make: Make, tmp_path: Path) -> None:
    other = save_base(
        tmp_path / "other", num_attention_heads=8, head_dim=8, num_key_value_heads=4, vocab_size=80
    )
    with pytest.raises(CheckpointError) as caught:
        merge_adapter(make(), tmp_path / "merged", base=other)
    assert caught.value.headline == "the base is not the model that the adapter was trained on"
    differ = [problem.given.removeprefix(f"--base {other}: ") for problem in caught.value.problems]
    assert differ == ["num_attention_heads 8", "num_key_value_heads 4", "head_dim 8", "vocab_size 80"]
    assert caught.value.problems[-1].expected == f"vocab_size 64, as in {base}, the base of the training"
    assert not (tmp_path / "merged").exists()


def test_kinds_that_cannot_be_merged(base: Path, make: Make, tmp_path: Path) -> None:
    policy = resolve_precision(base, "float32", None, "cpu")
    config = peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    add_lora(load(base, policy), policy, config).save_pretrained(tmp_path / "prompt")
    assert refused(UsageError, merge_adapter, tmp_path / "prompt", tmp_path / "merged") == (
        "this adapter cannot be merged\n"
        f"  - {tmp_path}/prompt: a PROMPT_TUNING adapter; it adds virtual tokens to the input, and changes no weight\n"
        "    expected  an adapter that adds to weights: LoRA, DoRA, LoHa, LoKr, OFT, IA3, …\n"
        f"    fix       use it together with its base: isotype chat {tmp_path}/prompt"
    )
    adapter = make(alora_invocation_tokens=[3, 4])
    with pytest.raises(UsageError, match="an activated LoRA acts only after its invocation tokens"):
        merge_adapter(adapter, tmp_path / "merged")
    edit_config(adapter, peft_type="NONSENSE")
    with pytest.raises(CheckpointError, match="peft_type 'NONSENSE'"):
        merge_adapter(adapter, tmp_path / "merged")


# ------------------------------------------------------------------------------------------------------ figures


@given(
    st.lists(
        st.tuples(st.floats(-4, 4, width=32), st.floats(-0.125, 0.125, width=32)), min_size=1, max_size=40
    ),
    st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
)
@example([(0.0, 9.760183933868783e-41)], torch.bfloat16)  # the square underflows in float32
def test_rounding_loss_counts_as_plain_python_does(
    pairs: list[tuple[float, float]], dtype: torch.dtype
) -> None:
    old = torch.tensor([w for w, _ in pairs])
    new = old + torch.tensor([d for _, d in pairs])
    loss = rounding_loss("w", old, new, new.to(dtype), dtype)

    def rounded(value: float) -> float:
        return torch.tensor(value).to(dtype).item()

    triples = [(w, m, rounded(m)) for w, m in zip(old.tolist(), new.tolist(), strict=True) if w != m]
    assert loss.entries == len(triples)
    assert loss.vanished == sum(r == rounded(w) for w, _, r in triples)
    moved = sum((m - w) ** 2 for w, m, _ in triples)
    lost = sum((rounded(m) - m) ** 2 for m in new.tolist())
    assert loss.relative_error == pytest.approx((lost / moved) ** 0.5 if moved else 0.0, rel=1e-6)


def test_an_update_below_half_a_unit_vanishes_whole() -> None:
    old, dtype = torch.ones(1000), torch.bfloat16
    for update, error, vanished in ((2**-10, 1.0, 1000), (2**-7, 0.0, 0)):
        loss = rounding_loss("w", old, old + update, (old + update).to(dtype), dtype)
        assert loss == WeightLoss("w", error, 1000, vanished)


def test_compare_logits_by_hand() -> None:
    trained = torch.tensor([[0.0, 0.0]], dtype=torch.float64)
    merged = torch.tensor([[0.0, torch.log(torch.tensor(3.0, dtype=torch.float64))]], dtype=torch.float64)
    difference = compare_logits(trained, merged)
    # KL((1/2, 1/2) || (1/4, 3/4)) = 1/2 ln 2 + 1/2 ln(2/3)
    assert difference.mean_kl == pytest.approx(0.5 * 0.6931471805599453 + 0.5 * -0.40546510810816444)
    assert difference.tokens == 1
    assert difference.max_abs == pytest.approx(1.0986122886681098)
    assert compare_logits(trained, trained).mean_kl == 0


def report(vanished: int, stored: str | None = None) -> MergeReport:
    weights = (
        WeightLoss("a.weight", 0.25, 600, vanished),
        WeightLoss("b.weight", 0.5, 400, 0),
        WeightLoss("c.weight", 0.1, 1000, 0),
    )
    logits = LogitsDifference(30, 0.5, 0.0125, 0.1, (3.0, 2.0, 2.25), "held-back rows of t.jsonl (8)")
    return MergeReport(
        Path("adapter"),
        Path("merged"),
        "base",
        "nf4",
        torch.bfloat16,
        "as requested",
        weights,
        logits,
        2_000_000,
        ("so",),
        stored=stored,
        cheapest=Form("--gguf q8_0", 8.5, 0.9949),
    )


def test_the_report_warns_where_too_little_is_kept() -> None:
    fix = "merge with --gguf q8_0 (8.5 bits a weight, keeps 99.4 %)"
    few = report(600)
    assert few.warnings == (f"the merged model keeps 87.5 % of what was learned; {fix}",)
    assert few.logits is not None
    enough = replace(few, logits=replace(few.logits, mean_kl=0.001))
    assert enough.logits is not None
    assert (enough.logits.kept, enough.logits.fall, enough.warnings) == (0.99, 0.75, ())
    nothing = replace(few.logits, mean_kl=0.0999)
    coded = replace(
        few, stored="nf4", logits=nothing, weights=(WeightLoss("a", 1.1, 1000, 999),), cheapest=None
    )
    assert coded.warnings == (
        "the merged model keeps 0.1 % of what was learned; keep the adapter separate from its base",
    )
    assert (
        replace(coded, logits=replace(nothing, mean_kl=0.2))
        .warnings[0]
        .startswith("the merged model keeps less than 0 % of what was learned; ")
    )


@pairwise(
    "dtype, known",
    ["float16", "bfloat16", pytest.param("float32", marks=pytest.mark.exhaustive)],
    [True, False],
    strength=1,
)
def test_a_dtype_that_cannot_hold_the_ranges_is_warned_of(
    base: Path, tmp_path: Path, dtype: str, known: bool
) -> None:
    decided = replace(resolve_precision(base, "float16", device="cpu"), wide_residual=False, exceptions=())
    how: list[Literal["scale", "adapters"]] = ["scale", "adapters"]
    wide = replace(
        decided,
        wide_residual=True,
        reasons={"residual": "values reach 104,000"},
        exceptions=tuple(ModuleException("model.layers.0.mlp.down_proj", each, reason=each) for each in how),
    )
    policy = wide if known else decided
    adapter = save_trained(add_lora(load(base, policy), policy, r=2), tmp_path / "adapter")
    report = merge_adapter(adapter, tmp_path / "merged", dtype=dtype)
    expected = (
        "the merged model is float16 and may overflow, because the training used hidden states in float32 (values reach 104,000); "
        "model.layers.*.mlp.down_proj scaled by powers of two (0): scale. Merge with --dtype bfloat16 or float32, "
        "or keep the adapter separate, with its policy"
    )
    assert report.warnings == ((expected,) if known and dtype == "float16" else ())


def test_logits_that_are_not_finite_are_no_agreement() -> None:
    found = compare_logits(torch.zeros(3, 4).double(), torch.full((3, 4), torch.nan).double())
    assert math.isnan(found.max_abs)
    assert math.isnan(found.mean_kl)


def test_what_the_terminal_shows() -> None:
    console = Console(record=True, width=100, file=None, quiet=False)
    with console.capture() as captured:
        show_merge(console, report(600))
    lines = [line.rstrip() for line in captured.get().splitlines()]
    assert lines == [
        "adapter           adapter",
        "base              base (dequantized from nf4)",
        "dtype             bfloat16 (as requested)",
        "merged            3 weights, 2,000 entries changed",
        "lost to rounding  25.00 % of a weight's update (median), 50.00 % in b.weight",
        "unchanged         600 of these entries have the base model's values (30.00 %) after rounding",
        "kept              87.5 % of what was learned: 1 - KL(trained || merged) / KL(trained || base), on",
        "                  held-back rows of t.jsonl (8) (30 tokens)",
        "logits            differ from the logits of the trained model by at most 0.5 (KL 0.0125 nats); the",
        "                  logits of the base model differ by KL 0.1 nats",
        "loss              base 3.0000, trained 2.0000, merged 2.2500 (75.0 % of the reduction)",
        "smallest          format that keeps 98.0 % of what was learned: --gguf q8_0 (8.5 bits a weight,",
        "                  keeps 99.4 %)",
        "output            merged (1.91 MiB)",
        "note: so",
        "warning: the merged model keeps 87.5 % of what was learned; merge with --gguf q8_0 (8.5 bits a",
        "weight, keeps 99.4 %)",
        "",
        "try it:",
        "    isotype chat merged",
    ]


def test_a_merged_model_that_takes_pictures_is_tried_with_one() -> None:
    console = Console(width=100)
    merged = report(0)
    assert merged.logits is not None
    with console.capture() as captured:
        show_merge(console, replace(merged, logits=replace(merged.logits, pictured=3)))
    assert (
        "try it, with the path of an image for FILE:\n    isotype chat merged --image FILE" in captured.get()
    )


# --------------------------------------------------------------------------------------- quantized, and for llama.cpp


@few("stored_as", ["nf4", "fp4", "int8"], "nf4")
def test_a_merged_model_in_bitsandbytes_format(stored_as: str, make: Make, tmp_path: Path) -> None:
    adapter = make(dtype="bfloat16")
    dense = merge_adapter(adapter, tmp_path / "dense")
    report = merge_adapter(adapter, tmp_path / "merged", stored=stored_as)
    assert report.stored == stored_as
    assert report.bytes < dense.bytes
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert plain.config.quantization_config.to_dict()[
        "load_in_8bit" if stored_as == "int8" else "load_in_4bit"
    ]
    layer = plain.get_submodule(Q)
    if stored_as == "int8":
        found = layer.weight.data.double() * layer.weight.SCB.double()[:, None] / 127
    else:
        assert layer.weight.quant_state.quant_type == stored_as
        from bitsandbytes import functional as bnb

        found = bnb.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    expected = stored(tmp_path / "dense", Q, stored_as, torch.bfloat16)
    assert torch.equal(found, expected.to(found.dtype))
    policy = resolve_precision(tmp_path / "merged", device="cpu")
    assert policy.storage == stored_as
    assert load(tmp_path / "merged", policy) is not None


@few("kind", ["f16", "bf16", "q8_0"], "q8_0")
def test_a_merged_model_as_gguf(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.checkpoint.test_gguf_export import byte_level

    monkeypatch.setenv("ISOTYPE_CACHE", str(tmp_path / "cache"))
    base = save_base(tmp_path / "base", vocab_size=384, attention_bias=False)
    byte_level("smollm").save_pretrained(base)
    policy = resolve_precision(base, "bfloat16", "nf4", "cpu")
    model = add_lora(load(base, policy), policy, r=4, target_modules=TARGETS)
    save_trained(model, tmp_path / "adapter", scale=0.05)
    report = merge_adapter(tmp_path / "adapter", tmp_path / "merged", stored=kind)
    assert [path.name for path in (tmp_path / "merged").iterdir()] == [f"model-{kind}.gguf"]
    assert report.logits is not None
    assert report.logits.mean_kl < 5e-3
    merged_layer = reference(base, tmp_path / "adapter", Q, "nf4", compute=torch.bfloat16)
    opened = load(
        tmp_path / "merged" / f"model-{kind}.gguf", resolve_precision(base, "float32", device="cpu")
    )
    found = opened.get_submodule(Q).weight.double()
    # Merged weights are rounded at random to one of their two neighbours, which are a whole step apart; q8_0 to the nearest.
    bound = {"f16": merged_layer.abs() * 2**-10, "bf16": merged_layer.abs() * 2**-7}.get(
        kind, merged_layer.abs().max() / 250
    )
    assert ((found - merged_layer).abs() <= bound + 2**-24).all()
    console = Console(width=100)
    with console.capture() as captured:
        show_merge(console, report)
    assert f"stored as         {kind}" in captured.get()


@pytest.mark.usefixtures("every_format")
def test_ways_to_store_that_do_not_exist(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = make()
    with pytest.raises(UsageError, match="stored as iq2_xs"):
        merge_adapter(adapter, tmp_path / "merged", stored="iq2_xs")
    with pytest.raises(UsageError, match="--dtype float32 and --gguf f16"):
        merge_adapter(adapter, tmp_path / "merged", stored="f16", dtype="float32")
    with monkeypatch.context() as patch:
        patch.setattr("isotype.checkpoint.merge.merge.learned", None)  # refused before the model is run
        with pytest.raises(UsageError, match="a tokenizer of the kind WordLevel"):
            merge_adapter(adapter, tmp_path / "merged", stored="f16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter"]
    # So neither a command for it is printed, nor one that names it as the smallest format.
    merged = merge_adapter(adapter, tmp_path / "merged")
    assert not merged.exportable
    assert merged.cheapest is not None
    assert "--gguf" not in merged.cheapest.arguments


def test_a_gguf_that_cannot_be_written_to_the_end_leaves_nothing(tmp_path: Path) -> None:
    from tests.checkpoint.test_gguf_export import byte_level

    base = save_base(tmp_path / "base", vocab_size=384, attention_bias=False)
    byte_level().save_pretrained(base)
    policy = resolve_precision(base, "float32", device="cpu")
    add_lora(load(base, policy), policy, r=4).save_pretrained(tmp_path / "adapter")
    with largest_file(50_000), pytest.raises(SaveError, match="the merged model cannot be written"):
        merge_adapter(tmp_path / "adapter", tmp_path / "merged", stored="f16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]


def test_biases_of_an_adapter_on_layers_without_bias_are_refused(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", attention_bias=False)
    policy = resolve_precision(base, "float32", device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT says that it cannot merge these biases
        model = add_lora(load(base, policy), policy, r=4, target_modules=["q_proj"], lora_bias=True)
        adapter = save_trained(model, tmp_path / "adapter")
    with pytest.raises(
        UsageError, match=r"adds a bias to model\.layers\.0\.self_attn\.q_proj, which has none"
    ):
        merge_adapter(adapter, tmp_path / "merged")


def test_rows_of_an_embedding_are_merged_into_a_quantized_model(make: Make, tmp_path: Path) -> None:
    adapter = make(target_modules=["q_proj"], trainable_token_indices=[1, 5])
    report = merge_adapter(adapter, tmp_path / "merged", stored="nf4")
    assert any("embed_tokens" in loss.name for loss in report.weights)


def test_an_adapter_in_a_folder_of_the_named_one_is_suggested(make: Make, tmp_path: Path) -> None:
    adapter = make()
    with pytest.raises(CheckpointError, match=f"a folder in it that contains an adapter: {adapter}"):
        merge_adapter(tmp_path, tmp_path / "merged")


def test_an_adapter_without_effect_has_learned_nothing_that_is_kept() -> None:
    assert LogitsDifference(30, 2e-7, 3e-16, 7e-16).kept is None
    assert LogitsDifference(30, 0.5, 1e-7, 1e-6).kept == pytest.approx(0.9)


def test_what_can_be_done_with_a_merged_model() -> None:
    """A model with scores cannot chat, and only exportable models get a command for the export."""

    def said(**changes: object) -> list[str]:
        console = Console(width=200)
        with console.capture() as captured:
            show_merge(console, replace(report(0), **changes), ("isotype", "merge", "a", "-o", "m.gguf"))
        return [line.strip() for line in captured.get().splitlines() if line.startswith("    isotype")]

    chat, export = "isotype chat merged", "isotype merge a -o m.gguf --gguf q8_0"
    assert said(exportable=True) == [chat, export]
    assert said(exportable=True, cheapest=None) == [chat, export]
    wide = Form("--dtype bfloat16", 16, 0.99)
    assert said(exportable=True, cheapest=wide) == [chat, export.replace("q8_0", "bf16")]
    assert said(exportable=False) == [chat]
    assert said(answers=False) == []
