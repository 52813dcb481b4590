"""Parts of models that take images or sound, and what follows from them: storage, and the dtype of what comes in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

import isotype
from isotype.core.errors import UsageError
from isotype.core.names import plain_name
from isotype.model.parts import Parts, towers_of
from isotype.model.walk import kind_of
from tests.models import quiet
from tests.pairwise import pairwise
from tests.refusals import refused
from tests.zoo import ARCHITECTURES


@pytest.mark.parametrize(
    ("name", "projector"),
    [
        ("gemma3-vl", "model.multi_modal_projector.mm_input_projection_weight"),
        ("qwen2_vl-vl", "model.visual.merger.mlp.0"),
        ("qwen3_vl-vl", "model.visual.deepstack_merger_list.0.linear_fc1"),
        ("idefics3-vl", "model.connector.modality_projection.proj"),
        ("llama4-vl", "multi_modal_projector.linear_1"),
        ("mistral3-vl", "model.multi_modal_projector.patch_merger.merging_layer"),
    ],
)
def test_each_module_has_its_part(name: str, projector: str) -> None:
    model = ARCHITECTURES[name].build(torch.float32)
    parts = Parts(model)
    (tower,) = (module for _, module in towers_of(model))
    inside = next(iter(tower.named_modules()))[1]
    names = {id(module): own for own, module in model.named_modules()}
    assert parts.of(names[id(inside)]) == "vision"
    assert parts.of(projector) == "projector"
    assert parts.of(f"{names[id(model.get_decoder())]}.layers.1.self_attn.q_proj") == "language"
    assert parts.of(names[id(model.get_output_embeddings())]) == "language"
    outside = set(parts.outside_of_language())
    assert names[id(tower)] in outside
    assert all(parts.of(each) != "language" for each in outside)


@pytest.mark.parametrize("name", ["llama", "bert-cls", "whisper-s2s"])
def test_a_model_without_towers_is_all_language(name: str) -> None:
    model = ARCHITECTURES[name].build(torch.float32)
    assert {Parts(model).of(each) for each, _ in model.named_modules()} == {"language"}
    assert not [*Parts(model).outside_of_language()]


def quantized(model: torch.nn.Module) -> set[str]:
    return {
        Parts(model).of(name)
        for name, module in model.named_modules()
        if kind_of(module) in ("linear4bit", "linear8bit")
    }


@pytest.mark.parametrize("storage", ["nf4", "int8"])
def test_towers_stay_dense_unless_asked(tmp_path: Path, storage: str) -> None:
    with quiet():
        ARCHITECTURES["gemma3-vl"].build(torch.float32).save_pretrained(tmp_path)
    policy = isotype.resolve_precision(tmp_path, "bfloat16", storage, "cpu")
    assert quantized(isotype.load(tmp_path, policy)) == {"language"}
    assert "towers and projectors stay bfloat16" in str(policy).replace("\n", " ").replace("  ", "")
    assert isotype.PrecisionPolicy.from_dict(policy.to_dict()) == policy
    everything = isotype.resolve_precision(tmp_path, "bfloat16", storage, "cpu", quantized_parts="all")
    assert quantized(isotype.load(tmp_path, everything)) == {"language", "vision"}


@pytest.mark.skipif(
    transformers.__version__.startswith("5.24."),
    reason="its Llama 4 reads image_outputs of an output that has none: no forward runs",
)
@pytest.mark.parametrize("given", [torch.bfloat16, torch.float32, torch.float64])
def test_pixel_values_are_cast_where_they_enter(given: torch.dtype, tmp_path: Path) -> None:
    with quiet():
        ARCHITECTURES["llama4-vl"].build(torch.float32).save_pretrained(tmp_path)
    model = isotype.load(tmp_path, isotype.resolve_precision(tmp_path, "float32", device="cpu"))
    batch = ARCHITECTURES["llama4-vl"].batch(dtype=torch.float32)
    exact = model(**batch).logits
    batch["pixel_values"] = batch["pixel_values"].to(given)
    near = model(**batch).logits
    assert near.dtype == torch.float32
    torch.testing.assert_close(near, exact, rtol=0, atol=0 if given != torch.bfloat16 else 0.02)


def adapted(name: str, **arguments: object) -> tuple[set[str], torch.nn.Module]:
    """The parts that have adapters, and the model."""
    model = ARCHITECTURES[name].build(torch.float32)
    policy = isotype.resolve_precision(model, device="cpu")
    peft = isotype.add_lora(model, policy, r=2, **arguments)
    parts = Parts(peft.get_base_model())
    return {
        parts.of(plain_name(name)) for name, p in peft.get_base_model().named_parameters() if p.requires_grad
    }, peft


@pairwise(
    ["adapt, parts", "targets"],
    [
        (None, {"language", "projector", "vision"}),
        ("all", {"language", "projector", "vision"}),
        ("language", {"language"}),
        (["projector", "language"], {"language", "projector"}),
        ("vision,projector", {"vision", "projector"}),
    ],
    [".*(q_proj|proj|fc1)", ["q_proj", "proj", "fc1", "linear_1"], "all-linear"],
    strength=1,
)
def test_the_parts_that_are_named_get_adapters(adapt: object, parts: set[str], targets: object) -> None:
    found, model = adapted("idefics3-vl", adapt=adapt, target_modules=targets)
    assert found == parts
    if targets == "all-linear" and adapt == "language":
        (note,) = (each for each in model.adapter_notes if each.startswith("adapters are on "))
        assert "adapt= does not name the part of the model that contains these layers" in note


def test_experts_get_none_where_the_language_model_does_not() -> None:
    found, model = adapted("qwen3_vl_moe-vl", adapt="vision")
    assert found == {"vision"}
    assert not model.peft_config["default"].target_parameters


def test_parts_that_are_not_there_are_refused() -> None:
    assert refused(UsageError, adapted, "llama", adapt="vision") == (
        "nothing to adapt\n  - adapters on vision alone\n    expected  one of the model's parts (language) "
        "with targets\n    fix       name another part, or omit adapt"
    )
    assert "one of language, projector, vision, audio, all" in refused(
        UsageError, adapted, "llama", adapt="tower"
    )


def test_blocks_of_a_tower_that_the_model_does_not_read_get_no_adapter() -> None:
    """LLaVA reads the last hidden state but one: the last block reaches no loss."""
    _, model = adapted("llava-vl")
    names = {
        plain_name(name) for name, p in model.named_parameters() if p.requires_grad and "vision_tower" in name
    }
    assert any(".layers.0." in name for name in names)
    assert not any(".layers.1." in name for name in names)
    model.train()
    model(**ARCHITECTURES["llava-vl"].batch()).loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_a_layer_that_is_read_past_an_adapter_is_no_warning_in_a_part_that_gets_none(
    recwarn: pytest.WarningsRecorder,
) -> None:
    """SigLIP's pooling head reads its projection's weight itself."""
    config = ARCHITECTURES["gemma3-vl"].build(torch.float32).config
    config.vision_config.vision_use_head = True
    model = transformers.Gemma3ForConditionalGeneration(config)
    isotype.add_lora(model, isotype.resolve_precision(model, device="cpu"), r=2, adapt="language")
    assert not [each for each in recwarn if "past an adapter" in str(each.message)]
