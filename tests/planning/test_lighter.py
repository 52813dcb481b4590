"""If nothing fits with adapters on experts, a plan gives up settings and names them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import transformers

import isotype
from isotype.checkpoint.checkpoint import open_model
from isotype.planning.from_request import lighter, plan_of_request
from isotype.planning.nearest import nearest
from isotype.planning.request import parse_request
from tests.models import CONFIGS


@pytest.fixture(autouse=True)
def _one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing fits, no plan counts how many devices are enough."""
    monkeypatch.setattr("isotype.planning.from_request._devices_needed", lambda *_: None)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the config of a model with large adapters on experts."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=128,
        hidden_size=128,
        moe_intermediate_size=512,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        dtype="bfloat16",
    )
    config.architectures = ["Qwen3MoeForCausalLM"]
    folder = tmp_path_factory.mktemp("experts")
    config.save_pretrained(folder)
    return folder


def test_gpt_oss_has_linear_layers_beside_its_experts(tmp_path: Path) -> None:
    config = CONFIGS["gpt-oss"]()
    config.architectures = ["GptOssForCausalLM"]
    config.save_pretrained(tmp_path)
    request, _ = parse_request([str(tmp_path), "--device", "a100-80g"], {})
    words = [words for words, _ in lighter(request, open_model(tmp_path).model_config)]
    assert words[1] == "adapters on experts (only k_proj, o_proj, q_proj, v_proj have adapters)"


SETTINGS = {"quantization": "nf4", "gradient_checkpointing": False}


def _plan(experts: Path, memory: int, **arguments: object) -> isotype.Plan:
    return isotype.plan(
        experts, device="a100-80g", rows=1, length=64, max_memory=str(memory), **SETTINGS, **arguments
    )


def _peak(experts: Path, **arguments: object) -> int:
    """Return the bytes of a step; longer rows are not tried."""
    asked = [str(experts), "--device", "a100-80g", "--rows", "1", "--length", "64"]
    request, _ = parse_request(asked, {**SETTINGS, **arguments})
    (row,) = plan_of_request(replace(request, longest=False)).devices[0].rows
    return row.peak


@pytest.fixture(scope="module")
def whole(experts: Path) -> int:
    return _peak(experts)


def test_adapters_of_experts_are_given_up_where_nothing_fits_with_them(experts: Path, whole: int) -> None:
    plan = _plan(experts, whole - 1)
    assert plan.chosen is not None
    assert "--optim adamw_bnb_8bit" in plan.command
    assert (
        plan.notes[0]
        == "turned off, because nothing fits otherwise: optimizer states in 32 bits (--optim adamw_bnb_8bit)"
    )
    plan = _plan(experts, plan.chosen.peak - 1)
    assert "--lora_target_modules k_proj o_proj q_proj v_proj" in plan.command
    assert plan.notes[0] == (
        "turned off, because nothing fits otherwise: adapters on experts (only k_proj, o_proj, q_proj, v_proj have adapters)"
    )


def test_what_was_asked_for_is_not_given_up(experts: Path, whole: int) -> None:
    plan = _plan(experts, whole - 1, lora_target_modules=["all-linear"], optim="adamw_torch")
    assert plan.chosen is None
    assert not any(note.startswith("switched off") for note in plan.notes)


def test_the_last_resort_is_nested_constants_and_short_rows(experts: Path, formula: object) -> None:
    request, _ = parse_request([str(experts), "--device", "a100-80g", "--rows", "1"], {})
    *_, nested, shorter, shortest = lighter(request, open_model(experts).model_config)
    assert nested[0].endswith(
        "optimizer states in 32 bits, 32-bit constants of 4-bit weights (--use_bnb_nested_quant)"
    )
    assert shortest[0] == f"{nested[0]}, rows of more than 256 tokens"
    plans = [plan_of_request(replace(request, longest=False)) for _, request in (nested, shorter, shortest)]
    lengths = [plan.chosen.length for plan in plans if plan.chosen is not None]
    assert lengths == [1024, 512, 256]
    for plan in plans:
        assert plan.policy is not None
        assert (plan.policy.storage, plan.policy.double_quant) == ("nf4", True)
        assert plan.command is not None
        assert "--quantization nf4 --use_bnb_nested_quant True" in plan.command
    assert "--max_length 256" in str(plans[2].command)
    asked, _ = parse_request([str(experts), "--device", "a100-80g", "--quantization", "int8"], {})
    assert not any("nested" in words for words, _ in lighter(asked, open_model(experts).model_config))


def test_nothing_is_given_up_where_the_weights_alone_do_not_fit(
    experts: Path, formula: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []
    monkeypatch.setattr(
        "isotype.planning.from_request.lighter", lambda *_: iter(tried.append("lighter") or ())
    )
    weights = 1 << 19  # nf4 weights take twice that
    plan = _plan(experts, weights)
    assert plan.chosen is None
    assert {row.fits for row in plan.rows} == {False}
    assert min(row.kinds["weights"] for row in plan.rows) > weights
    assert tried == []
    request, _ = parse_request([str(experts), "--device", "a100-80g"], SETTINGS)
    assert nearest(replace(request, memory=weights))[0] is None
    assert tried == []
    _plan(experts, _peak(experts) - 1)
    assert tried == ["lighter"]
