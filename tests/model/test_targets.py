"""Which layers get adapters by default, and what is said of the others."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn

import isotype
from isotype.checkpoint.weightless import quantized_weights
from isotype.core.names import stacked
from isotype.model.read_weights import unquantizable
from isotype.model.targets import choose_targets, task_type_of
from isotype.model.walk import places
from tests.models import quiet
from tests.pairwise import few
from tests.zoo import ARCHITECTURES


def adapted(name: str, config: Any = None, **lora: Any) -> Any:
    model = ARCHITECTURES[name].build(torch.float32)
    policy = isotype.resolve_precision(model, "float32", device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return isotype.add_lora(model, policy, config, **({} if config else {"r": 2, **lora}))


def names_adapted(model: Any) -> set[str]:
    names = {name for name, _ in model.named_parameters() if "lora_A" in name}
    return {name.partition(".lora_A")[0].rpartition("model.")[2] for name in names}


def last(names: set[str]) -> set[str]:
    return {name.rpartition(".")[2] for name in names}


READ = {
    "mamba": ({"in_proj"}, {"dt_proj", "out_proj", "x_proj"}),
    "mamba2": ({"in_proj"}, {"out_proj"}),
    "falcon_mamba": ({"in_proj"}, {"dt_proj", "out_proj", "x_proj"}),
    "falcon_h1": (
        {"in_proj", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
        {"out_proj"},
    ),
    "nemotron_h": (
        {"in_proj", "q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "base_layer", "experts"},
        {"out_proj"},
    ),
    "bamba": (
        {"in_proj", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
        {"out_proj"},
    ),
}


@pytest.mark.parametrize("name", READ)
def test_layers_whose_weight_the_model_reads_itself_are_left_out(name: str) -> None:
    wanted, left = READ[name]
    model = adapted(name)
    assert last(names_adapted(model)) == wanted
    note, *_ = model.adapter_notes
    assert f"({', '.join(sorted(left))}: " in note
    assert "reads the weights of these layers without calling the layers" in note


@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_a_layer_whose_weight_the_model_reads_stays_dense(tmp_path: Path, quantization: str) -> None:
    mamba = ARCHITECTURES["mamba"]
    with quiet():
        mamba.build(torch.float32).save_pretrained(tmp_path)
    policy = isotype.resolve_precision(tmp_path, "bfloat16", quantization, "cpu", quantized_parts="all")
    assert policy.never_quantized[:3] == ("mixer.dt_proj", "mixer.out_proj", "mixer.x_proj")
    assert "lm_head" in policy.never_quantized
    assert "mixer.x_proj stay bfloat16, because packed codes cannot be trained" in policy.reasons["storage"]
    model = isotype.load(tmp_path, policy)
    kinds = {place.name.rpartition(".")[2]: place.kind for place in places(model) if "proj" in place.name}
    packed = "linear8bit" if quantization == "int8" else "linear4bit"
    assert kinds == {"in_proj": packed, **dict.fromkeys(("dt_proj", "out_proj", "x_proj"), "linear")}
    assert quantized_weights(mamba.build(torch.float32)) == {
        f"backbone.layers.{layer}.mixer.in_proj.weight" for layer in range(2)
    }
    assert torch.isfinite(model(**mamba.batch()).loss)


@pytest.mark.filterwarnings("ignore:adapters are on:UserWarning")  # not on the layers that Gemma 3n reads
@few(
    "name, quantization",
    list(itertools.product(["gemma3n_text", "lfm2_vl-vl", "roberta-cls"], ["nf4", "int8"])),
    ("lfm2_vl-vl", "nf4"),
    ("roberta-cls", "int8"),
)
def test_layers_that_cannot_work_on_packed_codes_stay_dense(
    tmp_path: Path, name: str, quantization: str
) -> None:
    """Gemma 3n clamps weights in training, SigLIP 2 casts pixels to a weight's dtype, and PEFT trains a classifier whole."""
    wanted = {
        "gemma3n_text": {"prediction_coefs", "correction_coefs", "lm_head"},
        "lfm2_vl-vl": {"patch_embedding"},
        "roberta-cls": {"dense", "out_proj"},
    }[name]
    architecture = ARCHITECTURES[name]
    dense_model = architecture.build(torch.float32)
    with quiet():
        dense_model.save_pretrained(tmp_path)
    policy = isotype.resolve_precision(tmp_path, "float32", quantization, "cpu", quantized_parts="all")
    model = isotype.load(tmp_path, policy, model_class=type(dense_model))
    dense = {place.name.rpartition(".")[2] for place in places(model) if place.kind == "linear"}
    assert dense >= wanted
    assert not dense & {"query", "q_proj"}
    isotype.add_lora(model, policy, r=2).train()(**architecture.batch()).loss.backward()


def test_a_quantized_layer_cannot_be_trained_whole(saved: Any) -> None:
    path = saved("llama")
    policy = isotype.resolve_precision(path, "bfloat16", "nf4", "cpu", quant_storage="bfloat16")
    model = isotype.load(path, policy)
    with pytest.raises(isotype.UsageError, match=r"layers\.1\.mlp\.down_proj: quantized, and trained whole"):
        isotype.add_lora(model, policy, modules_to_save=["layers.1.mlp.down_proj"])


def test_names_of_layers_whose_weights_are_read() -> None:
    class Called(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.value, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.value(x))

    class Read(Called):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(self.value(x), self.out.weight)

    assert unquantizable(nn.ModuleDict({"a": Called()})) == ()
    layers = nn.ModuleList(nn.ModuleDict({"mixer": Read()}) for _ in range(2))
    assert unquantizable(layers) == ("mixer.out",)
    layers.append(nn.ModuleDict({"mixer": Called()}))
    assert unquantizable(layers) == ("0.mixer.out", "1.mixer.out")
    assert isotype.resolve_precision(layers, "bfloat16", "nf4", "cpu").never_quantized == unquantizable(
        layers
    )
    assert isotype.resolve_precision(layers, "bfloat16", device="cpu").never_quantized == ()


def test_layers_whose_codes_bitsandbytes_would_transpose_stay_dense() -> None:
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2), nn.Linear(2, 4))
    assert unquantizable(layers) == ("1", "2")


@pytest.mark.parametrize("name", ["recurrent_gemma", "rwkv", "lfm2", "qwen3_next"])
def test_layers_that_are_called_are_all_adapted(name: str) -> None:
    model = adapted(name)
    assert not any("reads their weights" in note for note in model.adapter_notes)
    if name != "qwen3_next":
        assert model.adapter_notes == ()


def test_a_layer_that_is_left_out_really_is_passed_by() -> None:
    """A layer that `nn.MultiheadAttention` reads: its adapter would get no gradient."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2)
            self.called = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.called(self.attention(x, x, x)[0])

    config = peft.LoraConfig(target_modules="all-linear")
    targets = choose_targets(Block(), config)
    assert config.target_modules == {"called"}
    assert dict(targets.reads) == {"attention.out_proj": "MultiheadAttention"}


@pytest.mark.parametrize(
    "name", ["mixtral", "qwen3_moe", "granitemoe", "phimoe", "llama4_text", "jamba", "dbrx"]
)
def test_routers_are_left_out_unless_named(name: str) -> None:
    model = adapted(name)
    assert not {"gate", "router", "layer"} & last(names_adapted(model))
    assert "routers get adapters only if the targets name them" in model.adapter_notes[0]


def test_a_router_that_is_named_is_adapted() -> None:
    model = adapted("mixtral", target_modules=["q_proj", "gate"])
    assert {"gate", "q_proj"} <= last(names_adapted(model))
    assert model.adapter_notes == ()
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["gate.weight"])
    assert "gate" in last(names_adapted(adapted("mixtral", config)))


def test_what_is_adapted_is_counted() -> None:
    attention = 2 * (64 * 64 + 2 * 64 * 32 + 64 * 64)
    experts, routers = 2 * 4 * 3 * 64 * 32, 2 * 4 * 64
    total = attention + experts + routers
    assert adapted("qwen3_moe").adapter_notes == (
        f"adapters are on 8 linear layers (k_proj, o_proj, q_proj, v_proj: {100 * attention / total:.2g} % of all values) and "
        f"4 stacked expert weights (down_proj, gate_up_proj: {100 * experts / total:.2g} % of all values); not on 2 routers "
        f"(gate: {100 * routers / total:.2g} % of all values): routers get adapters only if the targets name them",
        "adapters of experts hold 3,584 values: rank 2 for each of 4 experts in 2 layers",
    )
    assert adapted("qwen3_moe", lora_bias=True).adapter_notes == (
        f"adapters are on 8 linear layers (k_proj, o_proj, q_proj, v_proj: {100 * attention / total:.2g} % of all values); not on "
        f"4 stacked expert weights (down_proj, gate_up_proj: {100 * experts / total:.2g} % of all values): PEFT cannot adapt them "
        f"with lora_bias True; not on 2 routers (gate: {100 * routers / total:.2g} % of all values): routers get adapters only "
        "if the targets name them",
    )
    assert adapted("llama").adapter_notes == ()


def test_dense_layers_that_peft_takes_for_experts_are_named() -> None:
    note, _ = adapted("deepseek_v3").adapter_notes
    assert "not on 6 linear layers (down_proj, gate_proj, up_proj: " in note
    assert "PEFT would adapt them as experts, because of their names" in note


TASKS = {
    "LlamaForCausalLM": "CAUSAL_LM",
    "MambaForCausalLM": "CAUSAL_LM",
    "RwkvForCausalLM": "CAUSAL_LM",
    "GPT2LMHeadModel": "CAUSAL_LM",
    "LlavaForConditionalGeneration": "CAUSAL_LM",
    "T5ForConditionalGeneration": "SEQ_2_SEQ_LM",
    "BartForConditionalGeneration": "SEQ_2_SEQ_LM",
    "BertForSequenceClassification": "SEQ_CLS",
    "BartForSequenceClassification": "SEQ_CLS",
    "LlamaForTokenClassification": "TOKEN_CLS",
    "RobertaForQuestionAnswering": "QUESTION_ANS",
    "BertModel": "FEATURE_EXTRACTION",
    "T5EncoderModel": "FEATURE_EXTRACTION",
    "BertForMaskedLM": None,
    "WhisperForConditionalGeneration": None,
    "Speech2TextForConditionalGeneration": None,
    "Wav2Vec2ForSequenceClassification": None,
    "ViTModel": None,
    "ViTForImageClassification": None,
    "BlipForConditionalGeneration": None,
}


@pytest.mark.parametrize("name", TASKS)
def test_the_task_type_follows_from_the_class(name: str) -> None:
    import transformers

    cls = getattr(transformers, name)
    assert task_type_of(cls.__new__(cls)) == TASKS[name]


@few(
    "name",
    ["whisper-s2s", "speech_to_text-s2s", "blip-vl", "t5-s2s", "bert-cls"],
    *("whisper-s2s", "blip-vl", "t5-s2s", "bert-cls"),
)
def test_a_model_with_adapters_takes_its_own_batch(name: str) -> None:
    model = adapted(name)
    model(**ARCHITECTURES[name].batch()).loss.backward()
    assert any(p.grad is not None for n, p in model.named_parameters() if "lora_B" in n)


def test_a_weight_of_three_dimensions_is_no_expert_by_that() -> None:
    assert stacked(["model.layers.0.mlp.experts.gate_up_proj", "block_sparse_moe.input_linear.weight"]) == (
        "stacked expert weight"
    )
    assert (
        stacked(["model.multi_modal_projector.weight", "model.layers.0.mlp.experts.down_proj"])
        == "3-D weight"
    )


def test_layers_that_run_without_gradients_get_no_adapter() -> None:
    model = adapted("deepseek_v32")
    assert not {"wq_b", "wk", "weights_proj"} & last(names_adapted(model))
    (note, *_) = model.adapter_notes
    assert "(weights_proj, wk, wq_b: " in note
    assert "DeepseekV32Indexer runs without gradients, so an adapter would not be trained" in note
    assert "wk" in last(names_adapted(adapted("deepseek_v32", target_modules=["wk", "o_proj"])))


def test_a_grouped_linear_layer_gets_no_adapter() -> None:
    model = adapted("deepseek_v4")
    names = last(names_adapted(model))
    assert "o_a_proj" not in names
    assert {"o_b_proj", "q_a_proj", "kv_proj"} <= names
    (note, *_) = model.adapter_notes
    assert "(o_a_proj: " in note
    assert (
        "DeepseekV4GroupedLinear has other shapes than a linear layer, so PEFT's forward would fail" in note
    )
    model(**ARCHITECTURES["deepseek_v4"].batch()).loss.backward()


def test_a_share_of_nearly_all_values_has_no_exponent() -> None:
    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.in_proj, self.dt_proj = nn.Linear(64, 64), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.in_proj(x) + nn.functional.linear(x[..., :4], self.dt_proj.weight).sum()

    policy = isotype.resolve_precision(Mixer(), "float32", device="cpu")
    with pytest.warns(UserWarning, match="dt_proj"):
        model = isotype.add_lora(Mixer(), policy, r=2)
    (note,) = model.adapter_notes
    assert "(in_proj: 99.61 % of all values); not on 1 linear layer (dt_proj: 0.39 %" in note
