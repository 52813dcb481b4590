"""Weights that no file had when a model was loaded: an adapter has them, or loading raises an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import isotype
from isotype.checkpoint.adapter import load_for_inference
from isotype.cli.main import main
from tests.models import quiet
from tests.pairwise import few
from tests.refusals import refused

_SIZES = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_VIT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}

# Name: (config, saved class, loaded class, fields, modules that the adapter saves).
CASES: dict[str, tuple[Any, str, str, dict[str, Any], list[str] | None]] = {
    "bert-cls": ("Bert", "BertForPreTraining", "BertForSequenceClassification", {"num_labels": 3}, ["classifier", "score"]),
    "bert-tokens": ("Bert", "BertForPreTraining", "BertForTokenClassification", {"num_labels": 5}, ["classifier", "score"]),
    "bert-answers": ("Bert", "BertForPreTraining", "BertForQuestionAnswering", {}, ["qa_outputs"]),
    "bert-features": ("Bert", "BertForPreTraining", "BertModel", {}, None),
    "roberta": ("Roberta", "RobertaForMaskedLM", "RobertaForSequenceClassification", {"num_labels": 4}, ["classifier", "score"]),
    "llama-cls": ("Llama", "LlamaForCausalLM", "LlamaForSequenceClassification", {"num_labels": 3}, ["classifier", "score"]),
    "llama-head": ("Llama", "LlamaModel", "LlamaForCausalLM", {}, ["lm_head"]),
    "vit": ("ViT", "ViTModel", "ViTForImageClassification", {"num_labels": 7}, ["classifier"]),
}  # fmt: skip


def saved(directory: Path, name: str) -> Path:
    kind, cls, *_ = CASES[name]
    sizes = {**_VIT, "image_size": 16, "patch_size": 4} if kind == "ViT" else _SIZES
    torch.manual_seed(1)
    with quiet():
        getattr(transformers, cls)(getattr(transformers, f"{kind}Config")(**sizes)).save_pretrained(directory)
    return directory


def adapted(base: Path, name: str, quantization: str | None = None) -> Any:
    """Return the model with an adapter, all of its trained values changed."""
    policy = isotype.resolve_precision(base, "float32", quantization, device="cpu")
    cls = getattr(transformers, CASES[name][2])
    model = isotype.load(base, policy, model_class=cls, **CASES[name][3])
    model = isotype.add_lora(model, policy, r=2).eval()
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


@torch.no_grad()
def outputs(model: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    if hasattr(model.config, "patch_size"):
        return model(pixel_values=torch.randn(2, 3, 16, 16, generator=generator))[0]
    return model(input_ids=torch.randint(3, 100, (2, 8), generator=generator))[0]


# Other heads of BERT's kind are found and saved as its classifier is.
@few("name", list(CASES), "bert-cls", "llama-head", "vit")
def test_a_head_that_the_checkpoint_lacks_lasts(name: str, tmp_path: Path) -> None:
    base = saved(tmp_path / "base", name)
    model = adapted(base, name)
    assert model.peft_config["default"].modules_to_save == CASES[name][4]
    expected = outputs(model)
    model.save_pretrained(tmp_path / "adapter")
    torch.manual_seed(99)  # a second draw gives other values
    again, _, _ = load_for_inference(tmp_path / "adapter", device="cpu")
    assert type(again.get_base_model()).__name__ == CASES[name][2]
    assert torch.equal(outputs(again), expected)
    policy = isotype.resolve_precision(base, "float32", device="cpu")
    assert torch.equal(outputs(isotype.load(tmp_path / "adapter", policy).eval()), expected)
    torch.manual_seed(77)
    assert main(["merge", str(tmp_path / "adapter"), "-o", str(tmp_path / "merged")]) == 0
    with quiet():
        merged = getattr(transformers, CASES[name][2]).from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(outputs(merged), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_a_head_that_a_quantized_base_lacks_stays_dense(quantization: str, tmp_path: Path) -> None:
    model = adapted(saved(tmp_path / "base", "roberta"), "roberta", quantization)
    model.save_pretrained(tmp_path / "adapter")
    again, _, policy = load_for_inference(tmp_path / "adapter", device="cpu")
    assert policy.storage == quantization
    assert torch.equal(outputs(again), outputs(model))


def test_a_part_below_the_head_is_saved_and_it_is_said(tmp_path: Path) -> None:
    sizes = {"vocab_size": 128, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4}
    torch.manual_seed(1)
    with quiet():
        transformers.DistilBertForMaskedLM(transformers.DistilBertConfig(**sizes)).save_pretrained(
            tmp_path / "base"
        )
    policy = isotype.resolve_precision(tmp_path / "base", "float32", device="cpu")
    model = isotype.load(
        tmp_path / "base", policy, model_class=transformers.DistilBertForSequenceClassification
    )
    model = isotype.add_lora(model, policy, r=2).eval()
    assert model.adapter_notes == (
        "pre_classifier: not in the checkpoint, so they are trained whole and saved with the adapter",
    )
    model.save_pretrained(tmp_path / "adapter")
    again, _, _ = load_for_inference(tmp_path / "adapter", device="cpu")
    assert torch.equal(outputs(again), outputs(model))


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning")
def test_resized_rows_last(tmp_path: Path) -> None:
    base = saved(tmp_path / "base", "llama-cls")
    policy = isotype.resolve_precision(base, "float32", device="cpu")
    model = isotype.load(base, policy)
    model.resize_token_embeddings(140, mean_resizing=False)
    model = isotype.add_lora(model, policy, r=2).eval()
    model.save_pretrained(tmp_path / "adapter")
    again, _, _ = load_for_inference(tmp_path / "adapter", device="cpu")
    ids = {"input_ids": torch.tensor([[130, 139, 5]])}
    with torch.no_grad():
        assert torch.equal(again(**ids).logits, model(**ids).logits)


def test_weights_that_no_module_of_an_adapter_can_hold_are_refused(tmp_path: Path) -> None:
    torch.manual_seed(1)
    with quiet():
        transformers.BertModel(transformers.BertConfig(**_SIZES)).save_pretrained(tmp_path)
    policy = isotype.resolve_precision(tmp_path, "float32", device="cpu")
    model = isotype.load(tmp_path, policy, model_class=transformers.BertForMaskedLM)
    assert refused(isotype.UsageError, isotype.add_lora, model, policy) == (
        "weights that are in no file would be lost\n"
        "  - cls.predictions.bias: random values from the load, in no module that the adapter can save\n"
        "    expected  weights that are in the checkpoint or in the adapter\n"
        "    fix       model.save_pretrained(DIRECTORY) before add_lora, and load the model from DIRECTORY"
    )


def test_an_adapter_without_the_head_is_refused(tmp_path: Path) -> None:
    base = saved(tmp_path / "base", "bert-cls")
    adapted(base, "bert-cls").save_pretrained(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file({name: value for name, value in load_file(file).items() if "classifier" not in name}, file)
    assert refused(isotype.CheckpointError, load_for_inference, tmp_path / "adapter", device="cpu") == (
        f"the adapter {tmp_path / 'adapter'} does not fit the base model, a BertForSequenceClassification\n"
        "  - classifier.weight is neither in the base nor in the adapter\n"
        "    expected  all weights of the model, because a missing weight gets new random values in every load\n"
        "    fix       train again (isotype saves these weights with the adapter), or use a base that contains them\n"
        "  - classifier.bias is neither in the base nor in the adapter\n"
        "    expected  all weights of the model, because a missing weight gets new random values in every load\n"
        "    fix       train again (isotype saves these weights with the adapter), or use a base that contains them"
    )


def test_another_kind_of_adapter_saves_the_head_too(tmp_path: Path) -> None:
    base = saved(tmp_path / "base", "llama-cls")
    policy = isotype.resolve_precision(base, "float32", device="cpu")
    model = isotype.load(base, policy, model_class=transformers.LlamaForSequenceClassification, num_labels=3)
    config = peft.LoHaConfig(r=2, target_modules=["q_proj"])
    model = isotype.add_lora(model, policy, config).eval()
    assert config.modules_to_save == ["score"]
    model.save_pretrained(tmp_path / "adapter")
    again, _, _ = load_for_inference(tmp_path / "adapter", device="cpu")
    assert torch.equal(outputs(again), outputs(model))
