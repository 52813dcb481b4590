"""Folded models: what is kept, what it stands for, and that the step still runs."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from isotype.model.repeated_layers import _plan, fold, stands_for
from isotype.preflight.check import check
from tests.models import CONFIGS, tiny_batch
from tests.zoo import ARCHITECTURES


def deep(name: str, layers: int = 12) -> transformers.PreTrainedConfig:
    """The tiny config with more layers; every fourth attends in full where layers differ."""
    config = CONFIGS[name]()
    if name == "t5":
        config.num_layers = config.num_decoder_layers = layers
        return config
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None) and "sliding_attention" in config.layer_types:
        config.layer_types = (["sliding_attention"] * 3 + ["full_attention"]) * (layers // 4)
    elif getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[0]] * layers
    if getattr(config, "mlp_layer_types", None):
        config.mlp_layer_types = ["dense"] + ["sparse"] * (layers - 1)
    return config


def build(config: transformers.PreTrainedConfig) -> nn.Module:
    cls = (
        transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    )
    torch.manual_seed(0)
    return cls.from_config(config)


def numbers(model: nn.Module) -> dict[int, int]:
    return {int(name.rsplit(".", 1)[1]): count for name, count in stands_for(model).items()}


def test_equal_layers_are_the_first_and_one_for_all_others():
    model = fold(build(deep("llama")))
    assert stands_for(model) == {"model.layers.0": 1, "model.layers.11": 11}
    assert "model.layers.11.self_attn.q_proj.weight" in dict(model.named_parameters())


def test_kinds_that_alternate_are_kept_apart():
    model = fold(build(deep("gemma3")))
    assert numbers(model) == {0: 1, 2: 2, 3: 1, 4: 1, 7: 1, 10: 5, 11: 1}
    kinds = {n: model.config.layer_types[place] for place, n in enumerate(numbers(model))}
    assert [n for n, kind in kinds.items() if kind == "full_attention"] == [3, 7, 11]


def test_an_odd_layer_is_kept_and_so_are_its_neighbours():
    model = build(deep("llama"))
    model.model.layers[5].input_layernorm.to(torch.bfloat16)
    assert numbers(fold(model)) == {0: 1, 4: 4, 5: 1, 6: 1, 11: 5}


@pytest.mark.parametrize(
    "name", ["llama", "gemma2", "gemma3", "gpt-oss", "deepseek-v3", "qwen3-moe", "gpt2", "t5", "phi"]
)
def test_a_folded_model_trains_and_generates(name):
    model = build(deep(name))
    whole = sum(parameter.numel() for parameter in model.parameters())
    folded = fold(copy.deepcopy(model))
    batch = tiny_batch(name)
    loss = folded(**batch).loss
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is not None for n, p in folded.named_parameters() if "experts" not in n)
    prompt = {key: value for key, value in batch.items() if key != "labels"}
    with torch.no_grad():
        assert folded.generate(**prompt, max_new_tokens=2, do_sample=False).ndim == 2
    counted = sum(parameter.numel() for parameter in folded.parameters())
    for layer in stands_for(folded):
        module = folded.get_submodule(layer)
        counted += (stands_for(folded)[layer] - 1) * sum(p.numel() for p in module.parameters())
    assert counted == whole


def test_the_config_of_the_model_that_was_copied_is_untouched():
    model = build(deep("gemma3"))
    copied = copy.copy(model)
    copied._modules = dict(model._modules)
    config = model.config
    fold(copied)
    assert (config.num_hidden_layers, len(config.layer_types)) == (12, 12)
    assert copied.config is not config
    assert copied.model.config is copied.config


def test_few_layers_and_experts_are_left_alone():
    class Expert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)

    experts = nn.ModuleDict({"experts": nn.ModuleList(Expert() for _ in range(8))})
    assert stands_for(fold(experts)) == {}
    assert stands_for(fold(build(deep("llama", layers=3)))) == {}


def test_a_layer_number_that_others_are_read_by_follows():
    class Block(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.layer_idx, self.mlp = number, nn.Linear(2, 2)

    model = nn.Module()
    model.layers = nn.ModuleList(Block(number) for number in range(6))
    model.cross_attention_layers = [0, 3, 5]
    fold(model)
    assert [layer.layer_idx for layer in model.layers] == [0, 1]
    assert model.cross_attention_layers == [0, 1]
    assert model.layers[-1] is model.get_submodule("layers.5")
    assert len(model.layers[:1]) == 1


@pytest.mark.parametrize("read", [-2, [-4, -1]])
def test_a_tower_whose_inner_layers_are_read_is_whole(read: int | list[int]) -> None:
    """With a folded tower, `hidden_states[-2]` is the output of the first layer, and all others train nothing."""
    config = ARCHITECTURES["llava-vl"].build(torch.float32).config
    config.vision_config.num_hidden_layers = config.text_config.num_hidden_layers = 5
    config.vision_feature_layer = read
    model = transformers.LlavaForConditionalGeneration(config)
    assert numbers(fold(copy.deepcopy(model))) == {0: 1, 4: 4}
    batch = ARCHITECTURES["llava-vl"].batch()
    peaks = [check(model, batch, device="cpu-avx512", fold=folded).memory.peak for folded in (True, False)]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.02)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40))
def test_every_layer_is_stood_for_by_one_of_its_kind(kinds):
    plan = _plan(kinds)
    kept = list(plan.kept)
    assert sum(plan.kept.values()) == len(kinds)
    assert all(kinds[kept[place]] == kinds[number] for number, place in enumerate(plan.represents))
    assert kept[0] == 0
    assert {kinds[number] for number in plan.kept} == set(kinds)
    counts = [0] * len(plan.kept)
    for place in plan.represents:
        counts[place] += 1
    assert counts == list(plan.kept.values())


def test_a_layer_with_a_hook_of_its_own_is_kept():
    model = build(deep("llama"))
    model.model.layers[5].register_forward_hook(lambda module, args, output: output)
    assert 5 in numbers(fold(model))


def test_a_check_may_trace_equal_layers_once():
    model, batch = build(deep("llama")), tiny_batch("llama")
    arguments = {"device": "cpu", "optimizer": "sgd", "wiring": False, "verify": False}
    whole, folded = check(model, batch, **arguments), check(model, batch, **arguments, fold=True)
    assert len(folded.trace.calls) < len(whole.trace.calls) / 3
    assert len(list(model.model.layers)) == 12
    assert folded.trace.memory.peak == pytest.approx(whole.trace.memory.peak, rel=0.02)
    assert folded.trace.flops == whole.trace.flops
    assert [each.key for each in folded.findings] == [each.key for each in whole.findings]


class _Looped(nn.Module):
    """Five blocks, of which the middle three run twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(5))
        for layer in self.layers:
            layer.mlp = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in [*self.layers[:4], *self.layers[1:]]:
            x = layer(x)
        return x


class _Whole(_Looped):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[: self.num_hidden_layers]:
            x = layer(x)
        return x


def test_layers_that_a_forward_takes_by_number_are_not_folded():
    assert stands_for(fold(_Whole())) == {"layers.0": 1, "layers.4": 4}
    assert stands_for(fold(_Looped())) == {}
    assert stands_for(fold(nn.Sequential(_Looped()))) == {}
