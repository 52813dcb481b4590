"""A merge block by block: the values of a merge in memory, the dtypes of the base's files, and bounded memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from isotype.checkpoint import adapter as adapters
from isotype.checkpoint.adapter import read_adapter
from isotype.checkpoint.block_streaming import DeferredBlocks
from isotype.checkpoint.load import load
from isotype.checkpoint.merge import layers as merge_layers
from isotype.checkpoint.merge import write as shards
from isotype.checkpoint.merge.layers import Merging
from isotype.checkpoint.merge.merge import merge_adapter
from isotype.checkpoint.merge.write import Shards, header_room
from isotype.checkpoint.resolve import resolve_precision
from isotype.core.errors import UsageError
from isotype.model.adapters import add_lora
from isotype.model.experts.stack import stacked_weights
from tests.adapters import save_adapter
from tests.pairwise import few
from tests.zoo import ARCHITECTURES

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
PROJECTIONS = {"target_modules": ["q_proj", "down_proj"]}
STACKED = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]}


def save_base(directory: Path, kind: str = "llama", dtype: torch.dtype = torch.bfloat16) -> Path:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SIZES, **(EXPERTS if "moe" in kind else {}))
    transformers.AutoModelForCausalLM.from_config(config).to(dtype).save_pretrained(directory)
    return directory


def merged(adapter: Path, output: Path, **settings: Any) -> dict[str, torch.Tensor]:
    merge_adapter(adapter, output, **settings)
    return load_file(output / "model.safetensors")


# -------------------------------------------------------------------------------------------------------- numbers


@few(
    "kind, storage, lora",
    {
        "dense": ("llama", None, {**PROJECTIONS, "bias": "all", "modules_to_save": ["gate_proj"]}),
        "nf4": ("llama", "nf4", {**PROJECTIONS, "modules_to_save": ["lm_head", "input_layernorm"]}),
        "int8": ("llama", "int8", PROJECTIONS),
        "experts": ("qwen3_moe", None, STACKED),
        "quantized experts": ("qwen3_moe", "nf4", STACKED),
    },
    "nf4",
    "quantized experts",
)
def test_block_by_block_is_bit_equal_to_all_at_once(
    kind: str, storage: str | None, lora: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = save_base(tmp_path / "base", kind, torch.float32)
    adapter = save_adapter(base, tmp_path / "adapter", "bfloat16", storage, **lora)
    found = merged(adapter, tmp_path / "found")
    for module in (adapters, merge_layers):
        monkeypatch.setattr(module, "deferred_base", lambda adapter: DeferredBlocks(False))
    expected = merged(adapter, tmp_path / "expected")
    assert found.keys() == expected.keys() == load_file(base / "model.safetensors").keys()
    for name, values in expected.items():
        assert values.dtype == torch.bfloat16, name
        assert torch.equal(found[name], values), name


@pytest.mark.parametrize(("kind", "lora"), [("llama", PROJECTIONS), ("qwen3_moe", STACKED)])
def test_the_numbers_are_pefts_own_rounded_once(kind: str, lora: Any, tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", kind)
    adapter = save_adapter(base, tmp_path / "adapter", "bfloat16", None, **lora)
    found = merged(adapter, tmp_path / "merged")
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    peft.PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(tmp_path / "peft")
    changed = 0
    for name, values in load_file(tmp_path / "peft" / "model.safetensors").items():
        # Rounded up or down to the grid of bfloat16, whose steps are 2^-7 of a power of two; values on the grid are exact.
        off = found[name].float() - values
        assert (off.abs() < 2.0**-7 * values.abs()).logical_or(off == 0).all(), name
        assert not off[values == values.bfloat16()].any(), name
        changed += not torch.equal(values, load_file(base / "model.safetensors")[name].float())
    assert changed == {"llama": 6, "qwen3_moe": 3 + 3 * 4 * 2}[kind]


# --------------------------------------------------------------------------------------------------------- dtypes


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Save a bfloat16 base with some float32 tensors whose values bfloat16 cannot represent."""
    base = save_base(tmp_path / "mixed")
    weights = load_file(base / "model.safetensors")
    for name in weights:
        if name.endswith(
            ("norm.weight", "layers.1.self_attn.k_proj.weight", "layers.1.mlp.down_proj.weight")
        ):
            weights[name] = weights[name].float() + 1e-5
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    return base


@few("storage", [None, "nf4"], "nf4")
def test_every_tensor_keeps_the_dtype_and_the_digits_of_its_file(
    storage: str | None, mixed: Path, tmp_path: Path
) -> None:
    adapter = save_adapter(mixed, tmp_path / "adapter", "bfloat16", storage, **PROJECTIONS)
    found, before = merged(adapter, tmp_path / "merged"), load_file(mixed / "model.safetensors")
    quantized = {"model.layers.1.self_attn.k_proj.weight", "model.layers.1.mlp.down_proj.weight"}
    for name, values in before.items():
        wanted = torch.bfloat16 if storage and name in quantized else values.dtype
        assert found[name].dtype == wanted, name
        if name.endswith("norm.weight") or (storage is None and "k_proj" in name):
            assert torch.equal(found[name], values), name
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["dtype"] == "bfloat16"
    one = merged(adapter, tmp_path / "one", dtype="bfloat16")
    assert {values.dtype for values in one.values()} == {torch.bfloat16}


def test_what_is_not_quantized_keeps_its_dtype_too(mixed: Path, tmp_path: Path) -> None:
    adapter = save_adapter(mixed, tmp_path / "adapter", "bfloat16", None, **PROJECTIONS)
    found, before = merged(adapter, tmp_path / "merged", stored="nf4"), load_file(mixed / "model.safetensors")
    norms = {name for name in before if name.endswith("norm.weight")}
    assert len(norms) == 7
    assert all(torch.equal(found[name], before[name]) for name in norms)
    assert found["model.layers.1.self_attn.k_proj.weight"].dtype == torch.uint8
    assert not (tmp_path / "merged" / "dense").exists()
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")


# --------------------------------------------------------------------------------------------------------- memory


@few(
    "kind, storage, lora",
    {
        "dense": ("llama", None, PROJECTIONS),
        "nf4": ("llama", "nf4", PROJECTIONS),
        "quantized experts": ("qwen3_moe", "nf4", STACKED),
    },
    "nf4",
    "quantized experts",
)
def test_one_block_is_in_memory_at_a_time(kind: str, storage: str | None, lora: Any, tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", kind, dtype=torch.float32)
    adapter = save_adapter(base, tmp_path / "adapter", "bfloat16", storage, **lora)
    policy = resolve_precision(base, "bfloat16", storage, "cpu")
    merging = Merging(read_adapter(adapter), policy, torch.bfloat16)
    model: Any = merging.model
    names: list[str] = []
    dense = [weight for block in merging._deferred.blocks for weight in block.dense]
    stacks: list[Any] = [weight.values for weight in dense if weight.layer is None]
    assert len(stacks) == (6 if kind == "qwen3_moe" else 0)
    for number, part in enumerate(merging.parts()):
        names += part
        assert all(values.args[2].is_meta for values in stacks)
        held = [_matrices(layer) for layer in model.model.layers]
        assert held == [7 if number == at + 1 else 0 for at in range(3)]
    assert sorted(names) == sorted(merging.shapes)
    if kind == "llama":  # experts are split when they are written
        assert sorted(names) == sorted(load_file(base / "model.safetensors"))
    assert len(merging.weights) == 6


def _matrices(block: nn.Module) -> int:
    """Return the number of a block's weights that have values, without adapters."""
    return sum(
        parameter.ndim in (2, 3) and not parameter.is_meta and parameter.numel() > 0
        for name, parameter in block.named_parameters()
        if "lora_" not in name
    )


@pytest.mark.parametrize(("kind", "weights"), [("llama", 7), ("qwen3_moe", 6)])  # two of them are stacks
def test_a_forward_reads_each_block_and_drops_it(kind: str, weights: int, tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", kind, dtype=torch.float32)
    policy = resolve_precision(base, "bfloat16", "nf4", "cpu")
    deferred = DeferredBlocks()
    model = load(base, policy, deferred=deferred)
    deferred.on_forward()
    held: list[list[int]] = []
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(
            lambda *_: held.append([_quantized(each) for each in model.model.layers])
        )
    ids = torch.arange(8)[None]
    expected = load(base, policy)(input_ids=ids).logits
    for _ in range(2):
        assert torch.equal(model(input_ids=ids).logits, expected)
    assert held == [[weights * (at == block) for at in range(3)] for block in range(3)] * 2
    assert [_quantized(layer) for layer in model.model.layers] == [0, 0, 0]


def _quantized(block: nn.Module) -> int:
    return sum(parameter.dtype == torch.uint8 and not parameter.is_meta for parameter in block.parameters())


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_every_architecture_runs_block_by_block(name: str, tmp_path: Path) -> None:
    architecture = ARCHITECTURES[name]
    torch.manual_seed(0)
    model: Any = architecture.build(torch.float32)
    model.save_pretrained(tmp_path)
    policy = resolve_precision(tmp_path, "float32", device="cpu")
    deferred = DeferredBlocks()
    found = load(tmp_path, policy, model_class=type(model), deferred=deferred).eval()
    deferred.on_forward()
    inputs = architecture.batch()
    with torch.no_grad():
        torch.manual_seed(0)
        expected = load(tmp_path, policy, model_class=type(model)).eval()(**inputs).logits
        torch.manual_seed(0)
        assert torch.equal(found(**inputs).logits, expected)


# ---------------------------------------------------------------------------------------------------------- files


def written(directory: Path, tensors: dict[str, torch.Tensor], most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "_MOST", most)
        files = Shards(directory, header_room(tensors))
        for name, values in tensors.items():
            files.add(name, values)
        files.close()


def some_tensors() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return {
        "a.weight": torch.randn(16, 8, generator=random).bfloat16(),
        "a.odd": torch.arange(5, dtype=torch.int8),
        "b.weight": torch.randn(8, 16, generator=random).T,  # not contiguous
        "b.odd": torch.randn(3, generator=random).half(),
        "scalar": torch.tensor(2.5),
        "none": torch.empty(0, 4),
        'quo"ted\n': torch.ones(4, dtype=torch.float64),
    }


def test_one_file_is_read_by_safetensors_itself(tmp_path: Path) -> None:
    tensors = some_tensors()
    written(tmp_path, tensors, 1 << 30)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == tensors.keys()
    for name, values in tensors.items():
        assert found[name].dtype == values.dtype
        assert torch.equal(found[name], values), name


def test_several_files_and_their_index(tmp_path: Path) -> None:
    tensors = some_tensors()
    written(tmp_path, tensors, 600)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == files
    found = {name: load_file(tmp_path / file)[name] for name, file in index["weight_map"].items()}
    assert all(torch.equal(found[name], values) for name, values in tensors.items())
    assert index["metadata"]["total_size"] == sum(values.nbytes for values in tensors.values())


def test_a_merged_model_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = save_base(tmp_path / "base")
    adapter = save_adapter(base, tmp_path / "adapter", "bfloat16", None, **PROJECTIONS)
    whole = merged(adapter, tmp_path / "whole")
    monkeypatch.setattr(shards, "_MOST", 40_000)
    merge_adapter(adapter, tmp_path / "parts")
    assert len(list((tmp_path / "parts").glob("model-*-of-*.safetensors"))) > 2
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "parts")
    assert all(torch.equal(values, whole[name]) for name, values in model.named_parameters())
    assert shards.header_room(["a"]) > 100


def test_an_adapter_that_peft_has_no_merge_for(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", dtype=torch.float32)
    policy = resolve_precision(base, "float32", None, "cpu")
    config = peft.AdaptionPromptConfig(adapter_len=2, adapter_layers=1, task_type="CAUSAL_LM")
    add_lora(load(base, policy), policy, config).save_pretrained(tmp_path / "adapter")
    with pytest.raises(UsageError, match="this adapter cannot be merged"):
        merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


@few("storage", ["nf4", "int8"], "nf4")
def test_quantized_experts_are_merged_as_they_are_computed_with(storage: str, tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "qwen3_moe")
    adapter = save_adapter(base, tmp_path / "adapter", "bfloat16", storage, **STACKED)
    found = merged(adapter, tmp_path / "merged", dtype="float32")
    assert found.keys() == load_file(base / "model.safetensors").keys()
    again = load(tmp_path / "merged", resolve_precision(tmp_path / "merged", "float32", device="cpu"))
    quantized = load(base, resolve_precision(base, "bfloat16", storage, "cpu"))
    trained = load_file(adapter / "adapter_model.safetensors")
    for path, module, own in stacked_weights(quantized):
        weight = getattr(module, own).float()
        if own == "gate_up_proj":
            a, b = (trained[f"base_model.model.{path}.lora_{each}.weight"].float() for each in "AB")
            experts, rank = weight.shape[0], 4
            a, b = a.view(experts, rank, -1), b.view(b.shape[0], rank, experts)
            # PEFT's layouts: A by expert, then rank; B by rank, then expert.
            weight = weight + torch.einsum("ore,eri->eoi", b, a) * 2
        merged_weight = again.get_parameter(f"{path}.{own}")
        assert torch.allclose(merged_weight, weight, atol=2e-3 * float(weight.abs().max())), own
