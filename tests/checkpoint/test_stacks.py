"""Stacked experts that are stored quantized: read one expert at a time, saved, loaded again, and planned."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.nn import parametrize as bnb
from safetensors.torch import load_file, save_file

import isotype
from isotype.checkpoint.checkpoint import open_model
from isotype.checkpoint.facts import facts_of_module
from isotype.checkpoint.weightless import skeleton, store
from isotype.core.errors import CheckpointError, PrecisionError
from isotype.model.experts.quantize import quantize_parts
from isotype.model.experts.stack import QuantizedStack, codes_of, quantized_stack, stacked_weights
from tests.checkpoint.test_load import fp8_checkpoint, mxfp4_checkpoint
from tests.models import CONFIGS, quiet, tiny_batch, tiny_config, tiny_model
from tests.pairwise import pairwise
from tests.policy import assert_policy_holds, train

Saved = Callable[..., Path]
STORAGES = ["nf4", "fp4", "int8"]


def stacks(model: Any) -> dict[str, tuple[QuantizedStack, torch.Tensor]]:
    """Return (parametrization, codes) of each stacked weight by name; all are quantized."""
    held = {}
    for path, module, name in stacked_weights(model):
        stack = quantized_stack(module, name)
        assert stack is not None, f"{path}.{name}"
        held[f"{path}.{name}"] = stack, codes_of(module, name)
    return held


def assert_equal(model: Any, other: Any) -> None:
    wanted = stacks(other)
    assert wanted
    for name, (stack, codes) in stacks(model).items():
        assert torch.equal(codes, wanted[name][1]), name
        for own, value in stack.named_buffers():
            assert torch.equal(value, wanted[name][0].get_buffer(own)), f"{name} {own}"


@pairwise(
    "name, storage, double, dtype",
    ["qwen3-moe", "gpt-oss", "deepseek-v3"],
    STORAGES,
    [False, True],
    ["bfloat16", "float32"],
    strength=1,
)
def test_codes_are_those_of_the_dense_weight(
    saved: Saved, name: str, storage: str, double: bool, dtype: str
) -> None:
    path, four = saved(name, torch.bfloat16), storage != "int8"
    asked = {"double_quant": double} if four else {}
    policy = isotype.resolve_precision(path, dtype, storage, device="cpu", **asked)
    model = isotype.load(path, policy)
    assert assert_policy_holds(model, policy)["stack"] >= 2
    dense = isotype.load(path, isotype.resolve_precision(path, dtype, device="cpu"))
    for full, (stack, codes) in stacks(model).items():
        owner, _, own = full.rpartition(".")
        weight = dense.get_parameter(full).to(policy.plain)
        turned = name == "gpt-oss"
        wanted, expected = quantize_parts(
            [weight], weight.shape, storage, policy.plain, double_quant=double and four, transposed=turned
        )
        assert torch.equal(codes, wanted), full
        assert (stack.nested, stack.transposed) == (double and four, turned)
        assert torch.equal(getattr(model.get_submodule(owner), own), expected(wanted).to(policy.compute))
    assert math.isfinite(model(**tiny_batch(name)).loss.item())


@pairwise("name, storage", ["qwen3-moe", "gpt-oss"], STORAGES, strength=1)
def test_saved_and_loaded_again(saved: Saved, tmp_path: Path, name: str, storage: str) -> None:
    policy = isotype.resolve_precision(saved(name), "bfloat16", storage, device="cpu")
    model = isotype.load(saved(name), policy)
    with quiet():
        model.save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors")
    stacked = next(iter(stacks(model)))
    assert {key for key in names if key.startswith(f"{stacked}.")} == {
        f"{stacked}.{end}"
        for end in (
            ["SCB"] if storage == "int8" else ["absmax", "quant_map", f"quant_state.bitsandbytes__{storage}"]
        )
    }
    again = isotype.load(tmp_path, isotype.resolve_precision(tmp_path, "bfloat16", device="cpu"))
    assert_equal(again, model)


def test_a_checkpoint_that_bitsandbytes_wrote(saved: Saved, tmp_path: Path) -> None:
    """A checkpoint from bitsandbytes' state-dict hook, which stores the same tensors as isotype's."""
    policy = isotype.resolve_precision(saved("gpt-oss"), "bfloat16", "nf4", device="cpu")
    model = isotype.load(saved("gpt-oss"), policy)
    theirs = tiny_model("gpt-oss").to(torch.bfloat16)
    for path, module, name in list(stacked_weights(theirs)):
        bnb.replace_parameter_4bit(module, name)
        state = model.state_dict()
        full = f"{path}.{name}"
        for key, value in theirs.state_dict().items():
            if key.startswith(full) and (key == full or key[len(full)] == "."):
                assert torch.equal(state[key], value), key
    with quiet():
        model.save_pretrained(tmp_path, state_dict={**model.state_dict(), **_stacked(theirs)})
    assert_equal(isotype.load(tmp_path, policy), model)


def _stacked(model: Any) -> dict[str, torch.Tensor]:
    return {
        key: value for key, value in model.state_dict().items() if "experts." in key and "bias" not in key
    }


def gguf_checkpoint(directory: Path) -> Path:
    """Save a Qwen3-MoE with experts in Q8_0 as GGUF; transformers 5.23 always reads an expert size of 768."""
    import gguf
    from gguf import GGMLQuantizationType as Kind

    from isotype.checkpoint.mapping.weight_map import gguf_names

    with pytest.MonkeyPatch.context() as changed:
        changed.setitem(CONFIGS, "wide", lambda: tiny_config("Qwen3MoeConfig", head_dim=16, num_experts=4))
        model = tiny_model("wide")
    config, weights = model.config, model.state_dict()
    writer = gguf.GGUFWriter(directory / "tiny.gguf", "qwen3moe")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    for name, own in gguf_names(model, "qwen3moe").items():
        if own not in weights or name.endswith("_exps.bias"):
            continue
        value = weights[own].float()
        if "_gate_exps" in name or "_up_exps" in name:
            value = value.chunk(2, dim=1)[int("_up_exps" in name)].contiguous()
        if value.ndim == 3:
            codes = gguf.quants.quantize(value.numpy(), Kind.Q8_0)
            writer.add_tensor(f"{name.removesuffix('.weight')}.weight", codes, raw_dtype=Kind.Q8_0)
        else:
            writer.add_tensor(name, value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return directory / "tiny.gguf"


SOURCES: dict[str, Callable[[Path, Saved], Path]] = {
    "a list of modules": lambda directory, saved: saved("qwen3-moe"),
    "stacked": lambda directory, saved: saved("gpt-oss"),
    "mxfp4": lambda directory, saved: mxfp4_checkpoint(directory)[0],
    "fp8": lambda directory, saved: (fp8_checkpoint(directory, 32, 32), directory)[1],
    "GGUF": lambda directory, saved: gguf_checkpoint(directory),
}


@pytest.mark.parametrize("source", SOURCES)
def test_one_expert_at_a_time(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    path = SOURCES[source](tmp_path, saved)
    policy = replace(isotype.resolve_precision(path, "bfloat16", "nf4", device="cpu"), experts="")
    dense = isotype.load(path, isotype.resolve_precision(path, "bfloat16", device="cpu"))
    sizes: list[int] = []

    def counted(parts: Any, *args: Any, **settings: Any) -> Any:
        return quantize_parts((sizes.append(len(part)) or part for part in parts), *args, **settings)

    monkeypatch.setattr("isotype.model.experts.quantize.quantize_parts", counted)
    model = isotype.load(path, policy)
    held = stacks(model)
    assert sizes == [1] * sum(stack.shape[0] for stack, _ in held.values())
    for full, (_, codes) in held.items():
        weight = dense.get_parameter(full)
        assert torch.equal(codes, quantize_parts([weight], weight.shape, "nf4", torch.bfloat16)[0]), full


@pytest.mark.parametrize("storage", STORAGES)
def test_a_model_without_weights_has_the_same_bytes(saved: Saved, storage: str) -> None:
    path = saved("qwen3-moe")
    policy = isotype.resolve_precision(path, "bfloat16", storage, device="cpu")
    foreseen = facts_of_module(store(skeleton(open_model(path).model_config, policy), policy))
    facts = facts_of_module(isotype.load(path, policy))
    assert foreseen.parameter_bytes == facts.parameter_bytes
    assert foreseen.parameters == facts.parameters
    dense = facts_of_module(isotype.load(path, isotype.resolve_precision(path, "bfloat16", device="cpu")))
    assert facts.parameters == dense.parameters


def test_an_expert_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    model = tiny_model("gpt-oss")
    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.experts.down_proj")[2, 3, 4] = math.nan
    with quiet():
        model.save_pretrained(tmp_path)
    policy = isotype.resolve_precision(tmp_path, "bfloat16", "nf4", device="cpu")
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.experts\.down_proj"):
        isotype.load(tmp_path, policy)


def test_modules_that_are_left_out_stay_dense(saved: Saved) -> None:
    from transformers import BitsAndBytesConfig

    policy = isotype.resolve_precision(saved("qwen3-moe"), "bfloat16", "nf4", device="cpu")
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        llm_int8_skip_modules=["lm_head", "layers.0.mlp.experts"],
    )
    model = isotype.load(saved("qwen3-moe"), policy, quantization_config=config)
    dense = [path for path, module, own in stacked_weights(model) if quantized_stack(module, own) is None]
    assert set(dense) == {"model.layers.0.mlp.experts"}


# ------------------------------------------------------------------------------------------------------- mxfp4


@pairwise("quantization, dtype", ["mxfp4", "nf4", "int8"], ["float32", "bfloat16", "float16"], strength=1)
def test_mxfp4_is_kept_bit_for_bit(tmp_path: Path, quantization: str, dtype: str) -> None:
    path, dense = mxfp4_checkpoint(tmp_path)
    policy = isotype.resolve_precision(path, dtype, quantization, device="cpu")
    assert (policy.experts, policy.quantization) == ("mxfp4", quantization)
    model = isotype.load(path, policy)
    assert assert_policy_holds(model, policy)["stack"] == 4
    files = load_file(path / "model.safetensors")
    for full, (stack, codes) in stacks(model).items():
        assert torch.equal(codes, files[f"{full}_blocks"])
        assert torch.equal(stack.get_buffer("scales"), files[f"{full}_scales"])
        assert torch.equal(stack(codes), dense[full].to(policy.compute)), full
        assert torch.equal(stack.part(codes, 1, 3), dense[full][1:3].to(policy.compute)), full
    blank = store(skeleton(open_model(path).model_config, policy), policy)
    assert facts_of_module(blank).parameter_bytes == facts_of_module(model).parameter_bytes
    assert {name: (p.shape, p.dtype) for name, p in blank.named_parameters()} == {
        name: (p.shape, p.dtype) for name, p in model.named_parameters()
    }


def test_mxfp4_computes_what_the_dequantized_model_does(tmp_path: Path) -> None:
    path, _ = mxfp4_checkpoint(tmp_path)
    losses = []
    for quantization in ("mxfp4", None):
        policy = isotype.resolve_precision(path, "float32", quantization, device="cpu")
        torch.manual_seed(0)
        model = isotype.add_lora(isotype.load(path, policy), policy, r=4)
        isotype.fuse(model)
        losses.append(train(model, policy, tiny_batch("gpt-oss")))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert losses[0][-1] < losses[0][0] - 0.05


@pytest.mark.parametrize("quantization", ["mxfp4", "nf4"])
def test_mxfp4_is_saved_and_loaded_again(tmp_path: Path, quantization: str) -> None:
    import transformers

    path, _ = mxfp4_checkpoint(tmp_path / "base")
    policy = isotype.resolve_precision(path, "bfloat16", quantization, device="cpu")
    model = isotype.load(path, policy)
    assert facts_of_module(model).quantization.experts == "mxfp4"  # type: ignore[union-attr]
    with quiet():
        model.save_pretrained(tmp_path / "saved")
    again = isotype.load(
        tmp_path / "saved", isotype.resolve_precision(tmp_path / "saved", "bfloat16", quantization, "cpu")
    )
    assert_equal(again, model)
    if quantization == "mxfp4":
        other = copy.deepcopy(model)
        for _, codes in stacks(other).values():
            codes.zero_()
        other.load_state_dict(model.state_dict())
        assert_equal(other, model)
        with quiet():
            plain = transformers.AutoModelForCausalLM.from_pretrained(
                tmp_path / "saved", dtype=torch.bfloat16
            )
        policy = isotype.resolve_precision(path, "bfloat16", device="cpu")
        dense = isotype.load(path, replace(policy, routers=False))  # computed by transformers
        with torch.no_grad():
            batch = tiny_batch("gpt-oss")
            assert torch.equal(plain(**batch).logits, dense(**batch).logits)


def test_mxfp4_is_asked_of_what_stores_it(saved: Saved) -> None:
    with pytest.raises(PrecisionError, match="stores its weights in bfloat16"):
        isotype.resolve_precision(saved("gpt-oss", torch.bfloat16), "bfloat16", "mxfp4", device="cpu")
    policy = isotype.resolve_precision(saved("gpt-oss", torch.bfloat16), "bfloat16", device="cpu")
    with pytest.raises(CheckpointError, match="weights cannot be converted to mxfp4"):
        isotype.load(saved("gpt-oss", torch.bfloat16), replace(policy, experts="mxfp4"))


def test_an_exponent_that_is_no_number_is_refused(tmp_path: Path) -> None:
    path, _ = mxfp4_checkpoint(tmp_path)
    weights = load_file(path / "model.safetensors")
    weights["model.layers.1.mlp.experts.down_proj_scales"][2, 3, 1] = 255
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    policy = isotype.resolve_precision(path, "bfloat16", "mxfp4", device="cpu")
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.experts\.down_proj"):
        isotype.load(path, policy)
