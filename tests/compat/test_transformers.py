"""transformers still has what `isotype.compat.transformers` names."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel, Trainer

from isotype.compat.transformers import (
    DTYPE_PLAN,
    LOAD,
    PREPARE_INPUTS,
    STEPS,
    TrainerSteps,
    attention_of,
    class_for_load,
    incompatibilities,
    mapping_of,
    may_be_missing,
    may_be_surplus,
    name_of,
    never_saved,
    own_class_again,
    pinned,
    pinned_strictly,
    rename,
    set_attention,
    takes_attention,
    unsplit_classes,
)
from isotype.model.enforce import enforce_model
from isotype.precision.policy import PrecisionPolicy
from isotype.train.output.saving import WholeCheckpoints
from isotype.train.output.sharded import Sharded
from isotype.train.trainer import PolicyTrainer


def test_names_of_models_and_configs() -> None:
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    rename(config, "somewhere")
    assert name_of(config) == config.name_or_path == "somewhere"
    set_attention(config, "eager")
    assert attention_of(config) == "eager"
    model = transformers.LlamaForCausalLM(config)
    assert takes_attention(model)
    assert set(pinned(model)) == set(pinned_strictly(model)) == never_saved(model) == set()
    assert (list(may_be_missing(model)), list(may_be_surplus(model))) == ([], [])
    assert unsplit_classes(model) == {"LlamaDecoderLayer"}
    assert pinned(transformers.T5ForConditionalGeneration) == ["wo"]
    assert mapping_of(transformers.LlamaForCausalLM) is None
    mapping = mapping_of(transformers.AutoModelForCausalLM)
    assert mapping[transformers.LlamaConfig] is transformers.LlamaForCausalLM


@pytest.mark.parametrize("name", ["_init_weights", "_can_set_attn_implementation", DTYPE_PLAN, LOAD])
def test_methods_of_a_model(name: str) -> None:
    assert callable(getattr(PreTrainedModel, name))


def test_the_trainer_calls_what_is_overridden_once_each() -> None:
    """Where this fails, a step of ours would never be called: the name is gone, or has other arguments."""
    assert incompatibilities(Trainer) == []
    for public, name in STEPS.items():
        theirs = inspect.signature(getattr(Trainer, name)).parameters
        for cls in (PolicyTrainer, WholeCheckpoints, Sharded):
            ours = inspect.signature(vars(cls).get(public, getattr(Trainer, name))).parameters
            free = any(each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in ours.values())
            assert free or list(ours) == list(theirs), name
    source = inspect.getsource(Trainer)
    assert [name for name in (*STEPS.values(), PREPARE_INPUTS) if f".{name}" not in source] == []


def test_a_trainer_without_a_step_is_named() -> None:
    class Renamed:
        pass

    for name in {*STEPS.values()} - {"_save_checkpoint"}:
        setattr(Renamed, name, None)
    assert incompatibilities(Renamed) == ["Renamed has no method _save_checkpoint"]


def test_steps_reach_the_trainer_below_and_a_class_between() -> None:
    calls: list[str] = []

    class Below:
        def _get_output_dir(self, trial: Any) -> str:
            calls.append("trainer")
            return "there"

    class Mine(TrainerSteps):
        def folder_of_run(self, trial: Any) -> str:
            calls.append("mine")
            return str(super().folder_of_run(trial))

    class Whole(Mine, Below):
        pass

    assert Whole()._get_output_dir(None) == "there"
    assert calls == ["mine", "trainer"]


def test_a_class_for_one_load_has_the_name_of_the_other_and_leaves_the_model() -> None:
    below = class_for_load(transformers.LlamaModel, lambda _: {"norm.weight"})
    assert (below.__name__, below.__module__) == ("LlamaModel", transformers.LlamaModel.__module__)
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    model = below(config)
    assert getattr(model, DTYPE_PLAN)(torch.float16) == {"norm.weight": torch.float32}
    assert getattr(model, DTYPE_PLAN)(torch.float32) == {}
    own_class_again(model)
    assert type(model) is transformers.LlamaModel


def test_rwkv_still_divides_weights_beside_adapters_and_isotype_stops_it() -> None:
    """The first half fails once transformers divides the adapters, too: then `keep_weights` can go."""
    config = transformers.RwkvConfig(
        vocab_size=32, hidden_size=32, num_hidden_layers=3, context_length=16, rescale_every=1
    )
    ids = torch.arange(8)[None]
    for keeps in (False, True):
        torch.manual_seed(0)
        model = get_peft_model(
            transformers.RwkvForCausalLM(config),
            LoraConfig(target_modules=["value"], init_lora_weights=False),
        )
        if keeps:
            enforce_model(model, PrecisionPolicy(torch.float32, "float32"))
        with torch.no_grad():
            trained, evaluated = (model.train(mode)(input_ids=ids).logits for mode in (True, False))
        assert torch.allclose(trained, evaluated, atol=1e-4) is keeps
        assert model.config.rescale_every == 1
