"""Loading every kind of checkpoint: pinned weights are not rounded, and quantized checkpoints follow the policy."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bitsandbytes
import gguf
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

import isotype
from isotype.checkpoint.checkpoint import open_model
from isotype.checkpoint.fill import Filler
from isotype.checkpoint.weightless import skeleton, store
from isotype.compat.bitsandbytes import dequantize_4bit
from isotype.model.boundary import original_class
from isotype.model.quantize import quantize_4bit, quantize_int8
from isotype.model.quantized import row_scales
from isotype.precision.policy import ModuleException, is_pinned
from tests.checkpoint.test_gguf import write_gguf
from tests.models import quiet, save_tiny, tiny_batch, tiny_model
from tests.pairwise import few, pairwise
from tests.policy import assert_policy_holds, train
from tests.refusals import refused
from tests.train.test_matrix import generate

Saved = Callable[..., Path]
LOW = ("bfloat16", "float16")

PINNED = {  # pinned parameters of each model, by their names in the checkpoint
    "gpt-oss": ("norm.weight", "input_layernorm.weight", "post_attention_layernorm.weight"),
    "t5": ("wo.weight",),
    "deepseek-v3": ("gate.e_score_correction_bias",),
    "ernie4_5-moe": ("gate.weight", "moe_statics.e_score_correction_bias"),
}

# transformers renames this parameter while it loads.
_RENAMED = {
    "model.layers.1.mlp.moe_statics.e_score_correction_bias": "model.layers.1.mlp.gate.moe_statics.e_score_correction_bias"
}


def mixed_checkpoint(name: str, directory: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """Save a bfloat16 checkpoint whose pinned tensors are float32, as such models are published."""
    with quiet():
        tiny_model(name, torch.bfloat16).save_pretrained(directory)
    weights = load_file(directory / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    for key, value in weights.items():
        if key.endswith(PINNED[name]):
            weights[key] = value.float() + 0.01 * torch.rand(value.shape, generator=generator)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory, {key: value for key, value in weights.items() if key.endswith(PINNED[name])}


def tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@pairwise("name, dtype, quantization", sorted(PINNED), LOW, [None, "nf4", "int8"], strength=1)
def test_pinned_weights_keep_every_digit(
    tmp_path: Path, name: str, dtype: str, quantization: str | None
) -> None:
    directory, pinned = mixed_checkpoint(name, tmp_path)
    policy = isotype.resolve_precision(directory, dtype, quantization, device="cpu")
    assert all(is_pinned(key, policy.pinned) for key in pinned)
    model = isotype.load(directory, policy)
    loaded = tensors(model)
    assert pinned
    for key, value in pinned.items():
        key = _RENAMED.get(key, key)
        assert loaded[key].dtype == torch.float32, key
        assert torch.equal(loaded[key], value), key
    assert_policy_holds(model, policy)
    assert math.isfinite(model(**tiny_batch(name)).loss.item())

    model = isotype.add_lora(model, policy, r=4)
    losses = train(model, policy, tiny_batch(name))
    assert losses[-1] < losses[0] - 0.03
    model(**tiny_batch(name)).loss.backward()
    generate(model, tiny_batch(name))


@pairwise("name, dtype", ["llama", "gpt-oss", "gemma3-vision"], ["float32", *LOW], strength=1)
def test_every_weight_is_the_checkpoint_s_rounded_once(saved: Saved, name: str, dtype: str) -> None:
    policy = isotype.resolve_precision(saved(name), dtype, device="cpu")
    loaded = isotype.load(saved(name), policy)
    reference = tiny_model(name)
    assert list(loaded.state_dict()) == list(reference.state_dict())
    for key, value in reference.state_dict().items():
        wide = (policy.wide_residual and "norm" in key) or (policy.routers and ".router." in key)
        wanted = torch.float32 if wide or is_pinned(key, policy.pinned) else policy.plain
        assert torch.equal(loaded.state_dict()[key], value.to(wanted)), key


def quantized_checkpoint(
    source: Path, directory: Path, storage: str, double_quant: bool = False, packed: str = "uint8"
) -> Path:
    """Save a quantized model with plain transformers, compute dtype bfloat16."""
    if storage == "int8":
        config = transformers.BitsAndBytesConfig(load_in_8bit=True)
    else:
        config = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=storage,
            bnb_4bit_compute_dtype=torch.bfloat16,
            bnb_4bit_use_double_quant=double_quant,
            bnb_4bit_quant_storage=packed,
        )
    with quiet():
        transformers.AutoModelForCausalLM.from_pretrained(
            source, dtype=torch.bfloat16, quantization_config=config
        ).save_pretrained(directory)
    return directory


FORMATS = [
    ("nf4", False, "uint8"),
    ("nf4", True, "uint8"),
    ("fp4", False, "uint8"),
    ("fp4", True, "uint8"),
    ("nf4", False, "bfloat16"),
    ("int8", False, "uint8"),
]


@pairwise(
    "name, form, dtype",
    ["llama-tied-bias", "gpt-oss"],
    FORMATS,
    ["float32", "float16", "bfloat16"],
    strength=1,
)
def test_a_quantized_checkpoint_follows_the_policy(
    saved: Saved, tmp_path: Path, name: str, form: tuple[str, bool, str], dtype: str
) -> None:
    storage, double_quant, packed = form
    directory = quantized_checkpoint(saved(name), tmp_path, storage, double_quant, packed)
    policy = isotype.resolve_precision(directory, dtype, device="cpu")
    assert (policy.storage, policy.double_quant) == (storage, double_quant)
    assert policy.quant_storage == getattr(torch, packed)
    model = isotype.load(directory, policy)
    seen = assert_policy_holds(model, policy)
    assert seen["linear8bit" if storage == "int8" else "linear4bit"] >= 8
    if storage != "int8":
        assert model.config.quantization_config.bnb_4bit_compute_dtype == policy.compute
        assert (
            json.loads(model.config.to_json_string())["quantization_config"]["bnb_4bit_compute_dtype"]
            == dtype
        )
    assert model.config.dtype == policy.plain

    model = isotype.add_lora(model, policy, r=4)
    losses = train(model, policy, tiny_batch(name))
    assert losses[-1] < losses[0] - 0.05
    model(**tiny_batch(name)).loss.backward()
    generate(model, tiny_batch(name))
    assert_policy_holds(model, policy)


def test_a_layer_that_computes_in_float32_is_quantized_from_the_values_of_the_checkpoint(
    saved: Saved, tmp_path: Path
) -> None:
    # float16 has few digits for numbers this small: rounded to it first, each weight would be 4% off.
    weights = load_file(saved("llama") / "model.safetensors")
    name = "model.layers.1.self_attn.o_proj"
    weights[f"{name}.weight"] = small = weights[f"{name}.weight"] * 2.0**-15
    shutil.copytree(saved("llama"), tmp_path / "small")
    save_file(weights, tmp_path / "small" / "model.safetensors", {"format": "pt"})
    policy = isotype.resolve_precision(tmp_path / "small", "float16", "nf4", device="cpu")
    exceptions = (ModuleException(name, "float32"),)
    layer = isotype.load(tmp_path / "small", replace(policy, exceptions=exceptions)).get_submodule(name)
    codes, state = quantize_4bit(small, "nf4", blocksize=64)
    assert torch.equal(layer.weight, codes)
    assert torch.equal(layer.quant_state.absmax, state.absmax)
    # Scales of int8 are float32, so no exception is needed.
    layer = isotype.load(tmp_path / "small", replace(policy, storage="int8")).get_submodule(name)
    codes, scales = quantize_int8(small)
    assert torch.equal(layer.weight.data, codes)
    assert torch.equal(row_scales(layer), scales)


class _LargestFloat32(TorchDispatchMode):  # type: ignore[misc]
    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype == torch.float32:
            self.elements = max(self.elements, result.numel())
        return result


def test_an_int8_weight_is_converted_to_float32_piece_by_piece(saved: Saved) -> None:
    layer: Any = bitsandbytes.nn.Linear8bitLt(1024, 1024, bias=False, has_fp16_weights=False)
    weight = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0)).bfloat16()
    policy = isotype.resolve_precision(saved("llama"), "bfloat16", "int8", device="cpu")
    stored: Any = SimpleNamespace(model=torch.nn.Sequential(layer))
    filler = Filler(stored, policy, {"0.weight"}, (), {}, lambda _: "cpu")
    with _LargestFloat32() as largest:
        filler.place("0.weight", weight)
    assert largest.elements == 1 << 19
    assert torch.equal(layer.weight.CB, quantize_int8(weight.float())[0])


@pytest.mark.parametrize(
    ("name", "module"), [("gpt2", "lm_head"), ("gpt2", "transformer.wte"), ("t5", "encoder.embed_tokens")]
)
def test_a_tied_weight_keeps_the_digits_that_one_of_its_modules_needs(
    saved: Saved, name: str, module: str
) -> None:
    policy = isotype.resolve_precision(saved(name), "float16", device="cpu")
    exceptions = (ModuleException(module, "float32"),)
    weight = isotype.load(saved(name), replace(policy, exceptions=exceptions)).get_submodule(module).weight
    stored = {"gpt2": "transformer.wte.weight", "t5": "shared.weight"}[name]
    assert torch.equal(weight, load_file(saved(name) / "model.safetensors")[stored])


def test_a_state_saved_with_bfloat16_constants(saved: Saved, tmp_path: Path) -> None:
    directory = quantized_checkpoint(saved("llama"), tmp_path, "nf4")
    weights = load_file(directory / "model.safetensors")
    weights = {k: v.to(torch.bfloat16) if k.endswith("absmax") else v for k, v in weights.items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    policy = isotype.resolve_precision(directory, "float16", device="cpu")
    model = isotype.load(directory, policy)
    assert_policy_holds(model, policy)
    assert math.isfinite(model(**tiny_batch("llama")).loss.item())


@few("storage, double_quant, packed", FORMATS, *FORMATS[1:3], *FORMATS[4:])
def test_what_was_loaded_can_be_saved_and_loaded_again(
    saved: Saved, tmp_path: Path, storage: str, double_quant: bool, packed: str
) -> None:
    asked = None if storage == "int8" else {"double_quant": double_quant, "quant_storage": packed}
    policy = isotype.resolve_precision(saved("gpt-oss"), "float16", storage, device="cpu", **(asked or {}))
    model = isotype.load(saved("gpt-oss"), policy)
    with quiet():
        model.save_pretrained(tmp_path)
    again_policy = isotype.resolve_precision(tmp_path, "float16", device="cpu")
    # A model saved in float16 counts as trained in float16.
    assert policy.wide_residual
    assert again_policy == replace(policy, wide_residual=False)
    again = isotype.load(tmp_path, policy)
    assert_policy_holds(again, policy)
    with torch.no_grad():
        assert torch.equal(again(**tiny_batch("gpt-oss")).logits, model(**tiny_batch("gpt-oss")).logits)


# The eight magnitudes of a 4-bit float with a sign, two exponent bits and one mantissa bit (OCP MX, version 1.0).
_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def mxfp4_checkpoint(directory: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """Save a gpt-oss checkpoint with experts in mxfp4; return the dequantized experts."""
    with quiet():
        tiny_model("gpt-oss", torch.bfloat16).save_pretrained(directory)
    weights = load_file(directory / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    dense = {}
    for key in [key for key in weights if key.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = weights.pop(key).shape
        codes = torch.randint(
            0, 16, (experts, outputs, inputs // 32, 32), generator=generator, dtype=torch.uint8
        )
        exponents = torch.randint(-7, -4, (experts, outputs, inputs // 32), generator=generator)
        values = _FP4[(codes & 7).long()] * torch.where(codes > 7, -1.0, 1.0) * 2.0 ** exponents.unsqueeze(-1)
        dense[key] = values.reshape(experts, outputs, inputs).transpose(1, 2)
        weights[f"{key}_blocks"] = codes[..., 0::2] | (codes[..., 1::2] << 4)
        weights[f"{key}_scales"] = (exponents + 127).to(torch.uint8)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": skipped}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory, dense


@few("dtype", ["float32", *LOW], "float32", "bfloat16")
def test_mxfp4_experts_are_dequantized_exactly(tmp_path: Path, dtype: str) -> None:
    directory, dense = mxfp4_checkpoint(tmp_path)
    policy = isotype.resolve_precision(directory, dtype, device="cpu")
    assert policy.storage == dtype
    model = isotype.load(directory, policy)
    assert_policy_holds(model, policy)
    assert len(dense) == 4
    for key, value in dense.items():
        # A 4-bit magnitude times a power of two has at most two mantissa bits: every dtype represents it exactly.
        assert torch.equal(model.get_parameter(key), value.to(policy.plain)), key
    assert getattr(model.config, "quantization_config", None) is None
    model = isotype.add_lora(model, policy, r=4)
    losses = train(model, policy, tiny_batch("gpt-oss"))
    assert losses[-1] < losses[0] - 0.05
    model(**tiny_batch("gpt-oss")).loss.backward()


@pytest.mark.parametrize("experts", ["mxfp4", ""])
def test_mxfp4_beside_nf4(tmp_path: Path, experts: str) -> None:
    """Experts stay in their stored format; under a policy for another format, they are quantized again one by one."""
    directory, dense = mxfp4_checkpoint(tmp_path)
    policy = isotype.resolve_precision(directory, "bfloat16", "nf4", device="cpu")
    assert (policy.storage, policy.experts) == ("nf4", "mxfp4")
    policy = replace(policy, experts=experts)
    model = isotype.load(directory, policy)
    seen = assert_policy_holds(model, policy)
    assert (seen["linear4bit"], seen["stack"]) == (8, 4)
    for key, value in dense.items():
        path, _, own = key.rpartition(".")
        weight = value.to(torch.bfloat16)
        wanted = weight if experts else dequantize_4bit(*quantize_4bit(weight, "nf4"))
        assert torch.equal(getattr(model.get_submodule(path), own), wanted), key
    planned = store(skeleton(open_model(directory).model_config, policy), policy)
    assert {name: (p.shape, p.dtype) for name, p in planned.named_parameters()} == {
        name: (p.shape, p.dtype) for name, p in model.named_parameters()
    }
    assert train(isotype.add_lora(model, policy, r=4), policy, tiny_batch("gpt-oss"))[-1] < 10


def fp8_checkpoint(directory: Path, rows: int, columns: int) -> dict[str, torch.Tensor]:
    """Save a DeepSeek checkpoint with linear weights in e4m3 and a scale per block; return the dequantized weights."""
    with quiet():
        tiny_model("deepseek-v3", torch.bfloat16).save_pretrained(directory)
    weights = load_file(directory / "model.safetensors")
    dense = {}
    for key in [key for key in weights if key.endswith("_proj.weight") or "_proj_with_mqa.weight" in key]:
        weight = weights[key].float()
        scales = torch.zeros(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
        codes = torch.zeros(weight.shape, dtype=torch.float8_e4m3fn)
        made = torch.zeros(weight.shape)
        for row, column in itertools.product(*(range(size) for size in scales.shape)):
            place = (slice(row * rows, (row + 1) * rows), slice(column * columns, (column + 1) * columns))
            scales[row, column] = weight[place].abs().max() / 448
            codes[place] = (weight[place] / scales[row, column]).to(torch.float8_e4m3fn)
            made[place] = codes[place].float() * scales[row, column]
        weights[key], weights[f"{key}_scale_inv"], dense[key] = codes, scales, made
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [rows, columns]}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return dense


@pytest.mark.parametrize(
    ("dtype", "rows", "columns"), [("bfloat16", 32, 32), ("float16", 20, 48), ("float32", 128, 128)]
)
def test_fp8_with_block_scales(tmp_path: Path, dtype: str, rows: int, columns: int) -> None:
    """Blocks at the edges are smaller; transformers 5.23 refuses such weights."""
    dense = fp8_checkpoint(tmp_path, rows, columns)
    policy = isotype.resolve_precision(tmp_path, dtype, device="cpu")
    model = isotype.load(tmp_path, policy)
    assert_policy_holds(model, policy)
    own = [key for key in dense if ".experts." not in key]
    assert len(own) >= 8
    for key in own:
        assert torch.equal(model.get_parameter(key), dense[key].to(policy.plain)), key
    layer = next(key for key in dense if ".experts.0.down_proj" in key).split(".experts.")[0]
    stacked = [dense[f"{layer}.experts.{at}.down_proj.weight"] for at in range(2)]
    assert torch.equal(
        model.get_parameter(f"{layer}.experts.down_proj")[:2], torch.stack(stacked).to(policy.plain)
    )
    assert getattr(model.config, "quantization_config", None) is None
    assert math.isfinite(model(**tiny_batch("deepseek-v3")).loss.item())


def test_fp8_becomes_nf4(tmp_path: Path) -> None:
    dense = fp8_checkpoint(tmp_path, 32, 32)
    policy = isotype.resolve_precision(tmp_path, "bfloat16", "nf4", device="cpu")
    model = isotype.load(tmp_path, policy)
    assert assert_policy_holds(model, policy)["linear4bit"] >= 8
    key = "model.layers.0.self_attn.o_proj.weight"
    codes, state = quantize_4bit(dense[key].to(torch.bfloat16), "nf4", double_quant=policy.double_quant)
    assert torch.equal(model.get_parameter(key), codes)
    assert torch.equal(model.get_parameter(key).quant_state.absmax, state.absmax)


def packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack signed codes into int32 words like compressed-tensors: offset by half of their range, lowest bits first."""
    per = 32 // bits
    rows, columns = codes.shape
    padded = torch.zeros(rows, -(-columns // per) * per, dtype=torch.int64)
    padded[:, :columns] = codes.long() + (1 << (bits - 1))
    words = sum(padded[:, at::per] << (bits * at) for at in range(per))
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


@pytest.mark.parametrize(
    ("form", "bits", "group"),
    [
        ("pack-quantized", 4, 32),
        ("pack-quantized", 8, 64),
        ("float-quantized", 8, 0),
        ("int-quantized", 8, 0),
    ],
)
def test_compressed_tensors(saved: Saved, tmp_path: Path, form: str, bits: int, group: int) -> None:
    directory = shutil.copytree(saved("llama"), tmp_path / "model")
    weights = load_file(directory / "model.safetensors")
    dense = {}
    for key in [key for key in weights if key.endswith("_proj.weight")]:
        weight = weights.pop(key).float()
        rows, columns = weight.shape
        wide = group or columns
        blocks = torch.nn.functional.pad(weight, (0, -columns % wide)).view(rows, -1, wide)
        most = 448 if form == "float-quantized" else (1 << (bits - 1)) - 1
        scales = (blocks.abs().amax(-1, keepdim=True) / most).to(torch.bfloat16)
        codes = blocks / scales.float()
        codes = (
            codes.to(torch.float8_e4m3fn) if form == "float-quantized" else codes.round().clamp(-most, most)
        )
        dense[key] = (codes.float() * scales.float()).view(rows, -1)[:, :columns]
        flat = codes.float().view(rows, -1)[:, :columns]
        if form == "pack-quantized":
            weights[f"{key}_packed"] = packed(flat, bits)
            weights[f"{key}_shape"] = torch.tensor([rows, columns])
        else:
            weights[key] = flat.to(torch.float8_e4m3fn if form == "float-quantized" else torch.int8)
        weights[f"{key}_scale"] = scales.squeeze(-1).contiguous()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    settings = {"num_bits": bits, "symmetric": True, "group_size": group or None}
    settings["type"] = "float" if form == "float-quantized" else "int"
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": settings}},
    }
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    policy = isotype.resolve_precision(directory, "bfloat16", device="cpu")
    model = isotype.load(directory, policy)
    assert_policy_holds(model, policy)
    for key, value in dense.items():
        assert torch.equal(model.get_parameter(key), value.to(torch.bfloat16)), key


@pytest.mark.parametrize("dtype", LOW)
def test_a_gguf_file_has_the_values_that_transformers_reads(tmp_path: Path, dtype: str) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", kind=gguf.GGMLQuantizationType.Q4_0)
    policy = isotype.resolve_precision(path, dtype, device="cpu")
    model = isotype.load(path, policy)
    with quiet():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path,
            gguf_file=path.name,
            dtype=torch.float32,
            quantization_config=transformers.GgufConfig(dequantize=True),
        )
    assert list(tensors(model)) == list(tensors(theirs))
    for key, value in tensors(theirs).items():
        norm = policy.wide_residual and "norm" in key
        assert tensors(model)[key].dtype == (torch.float32 if norm or "inv_freq" in key else policy.plain), (
            key
        )
        assert torch.equal(tensors(model)[key], value.to(tensors(model)[key].dtype)), key
    assert model.name_or_path == str(path)
    assert model.generation_config.to_dict() == theirs.generation_config.to_dict()


@pytest.mark.parametrize("quantization", [None, "nf4"])
def test_a_gguf_file(tmp_path: Path, quantization: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISOTYPE_CACHE", str(tmp_path / "cache"))
    path = write_gguf(tmp_path / "tiny.gguf")
    policy = isotype.resolve_precision(path, "bfloat16", quantization, device="cpu")
    model = isotype.load(path, policy)
    assert_policy_holds(model, policy)
    model = isotype.add_lora(model, policy, r=4)
    assert all(math.isfinite(loss) for loss in train(model, policy, tiny_batch("llama"), steps=3))
    assert_policy_holds(model, policy)


def test_a_sharded_checkpoint(tmp_path: Path) -> None:
    with quiet():
        tiny_model("gpt-oss").save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    policy = isotype.resolve_precision(tmp_path, "bfloat16", "nf4", device="cpu")
    model = isotype.load(tmp_path, policy)
    assert_policy_holds(model, policy)
    norm = model.model.norm.weight
    assert torch.equal(norm, tiny_model("gpt-oss").model.norm.weight)


@pairwise("device_map, quantization", ["cpu", {"": "cpu"}, "auto"], [None, "nf4"], strength=1)
def test_device_maps(saved: Saved, device_map: Any, quantization: str | None) -> None:
    policy = isotype.resolve_precision(saved("gpt-oss"), "bfloat16", quantization, device="cpu")
    model = isotype.load(saved("gpt-oss"), policy, device_map=device_map)
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert_policy_holds(model, policy)
    assert math.isfinite(model(**tiny_batch("gpt-oss")).loss.item())


def test_the_class_is_the_checkpoint_s_or_the_one_asked_for(saved: Saved) -> None:
    policy = isotype.resolve_precision(saved("llama"), "bfloat16", device="cpu")
    for asked, expected in (
        (None, transformers.LlamaForCausalLM),
        (transformers.LlamaModel, transformers.LlamaModel),
        (transformers.AutoModel, transformers.LlamaModel),
        (transformers.AutoModelForCausalLM, transformers.LlamaForCausalLM),
    ):
        model = isotype.load(saved("llama"), policy, model_class=asked)
        assert type(model) is original_class(model) is expected


@pytest.mark.filterwarnings("ignore:Some weights of")
def test_a_class_that_adds_a_head(saved: Saved) -> None:
    policy = isotype.resolve_precision(saved("llama"), "bfloat16", "nf4", device="cpu")
    model = isotype.load(
        saved("llama"), policy, model_class=transformers.AutoModelForSequenceClassification, num_labels=3
    )
    assert type(model) is transformers.LlamaForSequenceClassification
    model = isotype.add_lora(model, policy, r=4, task_type="SEQ_CLS")
    assert [n for n, p in model.named_parameters() if "score" in n and p.requires_grad]
    assert_policy_holds(model, policy)
    batch = {**tiny_batch("llama"), "labels": torch.tensor([0, 2])}
    losses = train(model, policy, batch)
    assert losses[-1] < losses[0] - 0.05
    model(**batch).loss.backward()


def test_no_class_for_the_config(saved: Saved) -> None:
    policy = isotype.resolve_precision(saved("t5"), "bfloat16", device="cpu")
    assert refused(
        isotype.CheckpointError,
        isotype.load,
        saved("t5"),
        policy,
        model_class=transformers.AutoModelForCausalLM,
    ) == (
        "no model class for this checkpoint\n"
        "  - T5Config: model_type 't5' with architectures ['T5ForConditionalGeneration']\n"
        "    expected  a class of AutoModelForCausalLM\n"
        "    fix       use a checkpoint for which transformers has a model class, or pass model_class= in Python"
    )


def test_a_config_without_architectures(saved: Saved, tmp_path: Path) -> None:
    directory = shutil.copytree(saved("t5"), tmp_path / "t5")
    config = json.loads((directory / "config.json").read_text())
    del config["architectures"]
    (directory / "config.json").write_text(json.dumps(config))
    policy = isotype.resolve_precision(directory, "bfloat16", device="cpu")
    assert type(isotype.load(directory, policy)) is transformers.T5ForConditionalGeneration


@pytest.mark.parametrize("storage", ["int8", "fp4", "bfloat16"])
def test_a_policy_for_other_weights_is_refused_before_they_are_read(
    saved: Saved, tmp_path: Path, storage: str
) -> None:
    policy = isotype.resolve_precision(saved("llama"), "bfloat16", "nf4", device="cpu")
    with quiet():
        isotype.load(saved("llama"), policy).save_pretrained(tmp_path)
    other = replace(policy, storage=storage)
    assert refused(isotype.PrecisionError, isotype.load, tmp_path, other) == (
        "the weights have another format than the policy's storage\n"
        f"  - {tmp_path}, saved in nf4, under a policy with storage {storage}\n"
        "    expected  the format in which the weights are stored\n"
        "    fix       resolve the policy for this model: isotype.resolve_precision(model, …); to quantize a float "
        "checkpoint, give isotype.load its path and the policy"
    )


def test_float32_storage_with_bfloat16_compute(saved: Saved) -> None:
    policy = isotype.resolve_precision(saved("llama"), "bfloat16", device="cpu", storage="float32")
    model = isotype.add_lora(isotype.load(saved("llama"), policy), policy, r=4)
    dtypes = {(p.requires_grad, p.dtype) for p in model.parameters()}
    assert dtypes == {(True, torch.float32), (False, torch.float32)}
    seen = []
    layer = model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj.base_layer")
    handle = layer.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    losses = train(model, policy, tiny_batch("llama"))
    assert losses[-1] < losses[0] - 0.05
    assert set(seen) == {torch.bfloat16}
    seen.clear()
    assert model(**tiny_batch("llama")).logits.dtype == torch.float32
    assert seen == [torch.float32]
    handle.remove()
    assert_policy_holds(model, policy)
    assert isotype.enforce(model) == ()


def test_a_pinned_linear_layer_computes_in_float32_under_float32_storage_too(saved: Saved) -> None:
    policy = isotype.resolve_precision(saved("t5"), "bfloat16", device="cpu", storage="float32")
    model = isotype.load(saved("t5"), policy)
    layer = model.encoder.block[0].layer[1].DenseReluDense.wo
    x = torch.randn(3, layer.in_features)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    assert torch.equal(out, x @ layer.weight.T)


def test_base_weights_are_frozen_unless_all_are_trained(saved: Saved) -> None:
    lora = isotype.resolve_precision(saved("llama"), "bfloat16", device="cpu")
    assert not any(p.requires_grad for p in isotype.load(saved("llama"), lora).parameters())
    full = isotype.resolve_precision(saved("gpt-oss"), "bfloat16", device="cpu", trainable="full")
    model = isotype.load(saved("gpt-oss"), full)
    assert {(p.requires_grad, p.dtype) for p in model.parameters()} == {(True, torch.float32)}
    losses = train(model, full, tiny_batch("gpt-oss"), lr=2e-3)
    assert losses[-1] < losses[0] - 0.05


def test_progress_bars_are_as_they_were(saved: Saved) -> None:
    from transformers.utils import logging

    policy = isotype.resolve_precision(saved("llama"), "bfloat16", device="cpu")
    for wanted in (True, False):
        logging.enable_progress_bar() if wanted else logging.disable_progress_bar()
        isotype.load(saved("llama"), policy)
        assert logging.is_progress_bar_enabled() == wanted
    logging.enable_progress_bar()


def test_header_dtypes_of_a_mixed_checkpoint(tmp_path: Path) -> None:
    """The fixture has float32 pinned tensors among bfloat16 tensors."""
    directory, pinned = mixed_checkpoint("gpt-oss", tmp_path)
    with safe_open(directory / "model.safetensors", "pt") as file:
        dtypes = {key: file.get_slice(key).get_dtype() for key in file.keys()}  # noqa: SIM118
    assert {dtypes[key] for key in pinned} == {"F32"}
    assert {dtype for key, dtype in dtypes.items() if key not in pinned} == {"BF16"}


def _drawn(directory: Path, storage: str, default: torch.dtype) -> dict[str, torch.Tensor]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        asked = None if storage == "int8" else {"double_quant": True}
        policy = isotype.resolve_precision(
            directory, "bfloat16", quantization=storage, device="cpu", **(asked or {})
        )
        torch.manual_seed(0)
        model = isotype.add_lora(isotype.load(directory, policy), policy, r=4)
    finally:
        torch.set_default_dtype(before)
    assert_policy_holds(model, policy)
    return {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}


@few("storage", ["nf4", "fp4", "int8"], "nf4", "int8")
def test_the_default_dtype_of_a_script_changes_no_tensor(tmp_path: Path, storage: str) -> None:
    """Codes, constants, code books and adapters come from the policy, not from `torch.set_default_dtype`."""
    directory = save_tiny("qwen3-moe", tmp_path / "model", torch.bfloat16)
    expected = _drawn(directory, storage, torch.float32)
    for default in (torch.bfloat16, torch.float16):
        tensors = _drawn(directory, storage, default)
        assert tensors.keys() == expected.keys()
        for name, value in tensors.items():
            assert value.dtype == expected[name].dtype, name
            assert torch.equal(value, expected[name]), name
