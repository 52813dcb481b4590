"""The model of a training command without weights: adapters, folding, and refused adapters."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from isotype.checkpoint.checkpoint import open_model
from isotype.checkpoint.resolve import resolve_precision
from isotype.core.errors import PrecisionError, UsageError
from isotype.model.repeated_layers import stands_for
from isotype.precision.policy import LayerStorage
from isotype.train.models import weightless_model
from tests.adapters import loaded, lora_config
from tests.checkpoint.test_weightless import facts
from tests.models import CONFIGS
from tests.pairwise import pairwise


def policy_for(config, **asked):
    return resolve_precision(config, **{"dtype": "bfloat16", "device": "h100", **asked})


@pytest.fixture
def config():
    config = CONFIGS["llama"]()
    config.num_hidden_layers = 8
    return config


@pairwise(
    "quantization, variant",
    [None, "nf4", "int8"],
    [{}, {"use_dora": True}, {"bias": "lora_only"}, {"modules_to_save": ["lm_head"]}],
    strength=1,
)
def test_it_is_what_load_and_add_lora_give(saved, quantization, variant):
    path = saved("llama-tied-bias" if variant == {"bias": "lora_only"} else "llama", torch.bfloat16)
    real, policy = loaded(path, "bfloat16", quantization, **variant)
    assert facts(
        weightless_model(open_model(path).model_config, policy, lora=lora_config(**variant))
    ) == facts(real)


def test_layers_fold_before_adapters_are_made(config):
    model = weightless_model(config, policy_for(config, quantization="nf4"), lora=lora_config(), fold=True)
    assert stands_for(model) == {"base_model.model.model.layers.0": 1, "base_model.model.model.layers.7": 7}


@pytest.mark.parametrize(
    "lora",
    [
        {"target_modules": ["q_proj"], "layers_to_transform": [3]},
        {"target_modules": r".*\.3\..*q_proj"},
        {"rank_pattern": {"model.layers.3.self_attn.q_proj": 16}},
    ],
)
def test_layers_that_are_chosen_by_number_fold_afterwards(config, lora):
    model = weightless_model(config, policy_for(config), lora=lora_config(**lora), fold=True)
    kept = [int(name.rsplit(".", 1)[1]) for name in stands_for(model)]
    assert kept == [0, 2, 3, 4, 7]
    layer = model.get_submodule("base_model.model.model.layers.3.self_attn.q_proj")
    assert "LoraLayer" in [cls.__name__ for cls in type(layer).__mro__]


@pytest.mark.parametrize("form", ["int8", "nf4-32"])
def test_layers_that_a_policy_stores_otherwise_fold_afterwards(config, form):
    choice = LayerStorage("model.layers.3.self_attn.q_proj", form)
    policy = replace(policy_for(config, quantization="nf4"), layers=(choice,))
    model = weightless_model(config, policy, lora=lora_config(), fold=True)
    assert [int(name.rsplit(".", 1)[1]) for name in stands_for(model)] == [0, 2, 3, 4, 7]


def test_a_module_that_is_not_there_is_named(config):
    with pytest.raises(UsageError, match="q_prj") as caught:
        weightless_model(config, policy_for(config), lora=lora_config(target_modules=["q_prj"]))
    assert caught.value.problems[0].fix == "did you mean q_proj?"
    with pytest.raises(UsageError, match="the adapter cannot be created with these arguments"):
        weightless_model(config, policy_for(config), lora=lora_config(target_modules="nothing.*like.*this"))


def test_experts_are_stacked_weights_and_no_layers():
    import transformers

    sizes = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.MixtralConfig(
        **sizes, vocab_size=64, intermediate_size=96, num_local_experts=2, dtype="float32"
    )
    with pytest.raises(UsageError) as caught:
        weightless_model(config, policy_for(config), lora=lora_config(target_modules=["q_proj", "experts"]))
    (problem,) = caught.value.problems
    assert problem.fix == "--lora_target_parameters experts.down_proj experts.gate_up_proj"
    with pytest.raises(UsageError, match="experts cannot be trained in both ways"):
        weightless_model(config, policy_for(config), lora=lora_config(modules_to_save=["mlp.experts"]))
    lora = lora_config(target_modules=["q_proj"], modules_to_save=["experts"])
    model = weightless_model(config, policy_for(config), lora=lora)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert sum("experts.modules_to_save" in name for name in trained) == 2


def test_no_adapter_where_every_weight_is_trained(config):
    with pytest.raises(PrecisionError, match="the policy trains every weight, so it has no adapters"):
        weightless_model(config, policy_for(config, trainable="full"), lora=lora_config())
    assert all(
        p.requires_grad for p in weightless_model(config, policy_for(config, trainable="full")).parameters()
    )


def test_a_classifier_head(config):
    import transformers

    model = weightless_model(
        config,
        policy_for(config),
        model_class=transformers.AutoModelForSequenceClassification,
        lora=lora_config(task_type="SEQ_CLS"),
        num_labels=1,
    )
    assert type(model.get_base_model()).__name__ == "LlamaForSequenceClassification"
    assert model.get_base_model().score.modules_to_save["default"].weight.shape == (1, 64)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_head_that_gets_no_adapter_limits_no_rank(name):
    """The score of a reward model has the width 1, and GPT-2's Conv1D layers were not counted."""
    import transformers

    config = CONFIGS[name]()
    settings = {"model_class": transformers.AutoModelForSequenceClassification, "num_labels": 1}
    model = weightless_model(config, policy_for(config), lora=lora_config(task_type="SEQ_CLS"), **settings)
    assert not any("above the width" in note for note in model.adapter_notes)
    with pytest.raises(UsageError, match="at most 64, the width of the widest adapted layer"):
        weightless_model(config, policy_for(config), lora=lora_config(r=65, task_type="SEQ_CLS"), **settings)
