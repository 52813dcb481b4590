"""Texts and batches are no longer than the positions that a model has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

import isotype
from isotype.core.errors import UsageError
from isotype.ranges.measure import positions
from tests.models import tiny_config
from tests.refusals import refused


def gpt2(**settings: int) -> torch.nn.Module:
    config = transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2, **settings)
    return transformers.GPT2LMHeadModel(config)


def roberta() -> torch.nn.Module:
    config = transformers.RobertaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=20,
        pad_token_id=1,
        is_decoder=True,
    )
    return transformers.RobertaForCausalLM(config)


def opt() -> torch.nn.Module:
    config = transformers.OPTConfig(
        vocab_size=64,
        hidden_size=16,
        ffn_dim=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        word_embed_proj_dim=16,
        max_position_embeddings=20,
    )
    return transformers.OPTForCausalLM(config)


@pytest.mark.parametrize(("model", "most"), [(gpt2(n_positions=20), 20), (roberta(), 18), (opt(), 20)])
def test_positions_are_as_many_as_the_longest_row_that_runs(model: torch.nn.Module, most: int) -> None:
    assert positions(model) == most
    model.eval()(input_ids=torch.full((1, most), 5))
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=torch.full((1, most + 1), 5))


def test_rotary_positions_are_bounded_by_the_config_alone() -> None:
    model = transformers.AutoModelForCausalLM.from_config(tiny_config("LlamaConfig"))
    assert positions(model) == 64
    isotype.measure_ranges(model, {"input_ids": torch.full((1, 70), 5), "labels": torch.full((1, 70), 5)})


def test_ranges_and_quality_of_a_model_of_few_positions(tmp_path: Path) -> None:
    model = gpt2(n_positions=20)
    model.save_pretrained(tmp_path)
    assert isotype.measure_ranges(tmp_path, tokens=60).text == (
        "3 rows of 20 token ids drawn with a fixed seed, because there is no tokenizer"
    )
    assert isotype.measure_quality(tmp_path, tokens=60, exact=()).tokens == 60
    batch = {"input_ids": torch.full((1, 21), 5)}
    for measure in (isotype.measure_ranges, isotype.measure_quality):
        assert refused(UsageError, measure, model, batch) == (
            "a row is longer than the model's position table\n"
            "  - a row of 21 tokens\n"
            "    expected  at most 20 tokens, the number of positions of GPT2LMHeadModel\n"
            "    fix       cut the rows"
        )
