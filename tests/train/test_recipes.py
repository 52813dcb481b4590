"""Runs from end to end: what a second run into the same place does, what is asked, what is said."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from isotype.cli import main
from isotype.errors import CheckpointError, UsageError
from isotype.precision.policy import PrecisionPolicy
from isotype.train import describe, recipes
from isotype.train.generate import encode
from isotype.train.methods import METHODS
from isotype.train.models import processing_class
from isotype.train.settings import parse_settings
from tests.train.tiny import rows, save_chat_model, save_rows

POLICY = PrecisionPolicy(compute=torch.bfloat16, storage="bfloat16")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("models") / "Tiny-0.6B")


@pytest.fixture
def data(tmp_path) -> Path:
    return save_rows(tmp_path / "train.jsonl", rows("sft"))


def train(model: Path, data: Path, out: Path | None, *argv: object) -> tuple[recipes.Outcome, str]:
    arguments = ["--model_name_or_path", model, "--dataset_name", data, "--max_steps", 2]
    arguments += [] if out is None else ["--output_dir", out]
    text = io.StringIO()
    settings = parse_settings(METHODS["sft"], [str(a) for a in (*arguments, "--save_steps", 1, *argv)])
    return recipes.run(settings, Console(file=text, width=200)), text.getvalue()


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_the_default_output_directory_keeps_the_size_in_the_name(model, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcome, _ = train(model, data, None)
    assert outcome.adapter == Path("runs/sft-Tiny-0.6B")


def test_adapter_and_model_do_not_mix_in_a_reused_directory(model, data, tmp_path):
    out = tmp_path / "out"
    _, text = train(model, data, out, "--use_peft", "False")
    assert "model.safetensors" in names(out)
    assert "finished run" not in text
    _, text = train(model, data, out)
    assert f"note: {out} holds a finished run (model.safetensors, run_report.json)" in text
    assert "adapter_model.safetensors" in names(out)
    assert not names(out) & {"model.safetensors", "config.json"}
    train(model, data, out, "--use_peft", "False")
    assert {"model.safetensors", "config.json"} <= names(out)
    assert not names(out) & {"adapter_model.safetensors", "adapter_config.json"}


def test_a_foreign_model_in_the_output_directory_is_left_alone(model, data, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "model.safetensors").write_bytes(b"mine")
    train(model, data, out)
    assert (out / "model.safetensors").read_bytes() == b"mine"


def test_a_checkpoint_of_another_run_is_refused_with_all_differences(model, data, tmp_path):
    out = tmp_path / "out"
    train(model, data, out, "--lora_target_modules", "q_proj")
    more = ("--resume_from_checkpoint", "true", "--max_steps", 3)
    with pytest.raises(CheckpointError) as caught:
        train(
            model, data, out, *more, "--quantization", "nf4", "--lora_r", 4, "--lora_target_modules", "v_proj"
        )
    assert caught.value.headline == f"{out / 'checkpoint-2'} is of another run"
    assert [(p.given, p.expected) for p in caught.value.problems] == [
        ("storage nf4", "float32, as in checkpoint-2"),
        ("r 4", "16, as in checkpoint-2"),
        ("target_modules ['v_proj']", "['q_proj'], as in checkpoint-2"),
    ]
    with pytest.raises(CheckpointError) as caught:
        train(model, data, out, *more, "--use_peft", "False")
    assert [p.given for p in caught.value.problems] == ["trains every weight"]
    outcome, _ = train(model, data, out, *more, "--lora_target_modules", "q_proj")
    assert [step.step for step in outcome.record.steps] == [3]


def test_unknown_modules_are_named_with_the_nearest(model, data, tmp_path):
    with pytest.raises(UsageError) as caught:
        train(
            model,
            data,
            tmp_path / "out",
            "--lora_target_modules",
            "q_prj",
            "v_proj",
            "--lora_modules_to_save",
            "head",
        )
    assert [p.given for p in caught.value.problems] == [
        "--lora_target_modules q_prj",
        "--lora_modules_to_save head",
    ]
    assert caught.value.problems[0].fix.startswith("did you mean q_proj")
    with pytest.raises(UsageError, match="the adapter cannot be made as asked"):
        train(model, data, tmp_path / "out", "--lora_target_modules", ".*nosuch")


def test_model_init_kwargs_reach_the_model_and_unknown_ones_are_named(model, data, tmp_path):
    out = tmp_path / "out"
    outcome, _ = train(model, data, out, "--model_init_kwargs", '{"attn_implementation": "eager"}')
    assert outcome.record.status == "finished"
    with pytest.raises(UsageError, match="the model does not take these arguments"):
        train(model, data, out, "--model_init_kwargs", '{"nosuch": 1}')


def test_what_the_trainer_refuses_is_a_usage_error(model, data, tmp_path):
    with pytest.raises(UsageError, match="SFTTrainer does not take these arguments") as caught:
        train(
            model,
            data,
            tmp_path / "out",
            "--packing",
            "True",
            "--eval_packing",
            "False",
            "--max_length",
            "None",
        )
    assert isinstance(caught.value.__cause__, ValueError)


def test_dropped_examples_are_said_and_reported(model, tmp_path):
    mixed = [{"prompt": "w1 " * (60 if n % 2 else 1), "completion": "w2 w3"} for n in range(16)]
    outcome, text = train(
        model,
        save_rows(tmp_path / "d.jsonl", mixed),
        tmp_path / "out",
        "--max_length",
        16,
        "--lora_bias",
        "all",
    )
    said = "8 of 16 examples were dropped: the prompt alone fills max_length 16"
    assert f"note: {said}" in text
    assert said in outcome.record.notes
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["bias"] == "all"


def test_a_loss_that_is_no_number_fails_and_still_saves(model, data, tmp_path, capsys):
    from safetensors.torch import load_file, save_file

    broken, out = tmp_path / "broken", tmp_path / "out"
    shutil.copytree(model, broken)
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"].fill_(float("nan"))
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    argv = [
        "sft",
        "--model_name_or_path",
        broken,
        "--dataset_name",
        data,
        "--max_steps",
        2,
        "--output_dir",
        out,
    ]
    assert main([str(a) for a in argv]) == 1
    assert capsys.readouterr().err.endswith(
        "error: the loss is not finite: what was trained is of no use\n"
        "  - loss nan at step 2, not finite since step 1\n"
        "    expected  a number\n"
        "    fix       a smaller --learning_rate; if the first step is not finite either, look at the model's weights\n"
        f"  = saved in {out} all the same\n"
    )
    assert json.loads((out / "run_report.json").read_text())["status"] == "failed"
    assert "adapter_model.safetensors" in names(out)


def test_the_sample_is_asked_in_the_format_of_its_row(model):
    settings = parse_settings(METHODS["sft"], ["--model_name_or_path", "m", "--dataset_name", "d"])
    turns = [{"role": "system", "content": "w0"}, {"role": "user", "content": "w1"}]
    reply = [{"role": "assistant", "content": "w2"}]
    for row, prompt in (
        ({"prompt": "w1", "completion": "w2"}, "w1"),
        ({"prompt": turns, "completion": reply}, turns),
        ({"messages": turns + reply}, turns),
    ):
        sample, asked = describe.sample_question(settings, {"test": [row]})
        assert (sample.question, sample.reference, asked) == ("w1", "w2", prompt)
    assert describe.sample_question(settings, {"test": [{"text": "w1"}]}) is None
    tokenizer = processing_class(model)
    words = tokenizer.convert_ids_to_tokens(encode(tokenizer, "w1 w2")["input_ids"][0])
    assert words == ["w1", "w2"]
    words = tokenizer.convert_ids_to_tokens(encode(tokenizer, turns)["input_ids"][0])
    assert words == ["<s>", "system", "w0", "</s>", "<s>", "user", "w1", "</s>", "<s>", "assistant"]


@pytest.mark.parametrize(
    ("optimizer", "dtype"),
    [
        ("adamw_torch_fused", "float32"),
        ("paged_adamw_32bit", "float32"),
        ("adamw_bnb_8bit", "8-bit (adamw_bnb_8bit)"),
        ("paged_adamw_8bit", "8-bit (paged_adamw_8bit)"),
        ("adafactor", "float32 (adafactor)"),
        ("sgd", "none (sgd)"),
    ],
)
def test_the_optimizer_row_says_what_the_optimizer_keeps(optimizer, dtype):
    shown = {row[0]: row[1] for row in describe.policy_rows(POLICY, optimizer)}
    assert shown["optimizer state"] == dtype
    assert len(shown) == len(POLICY.rows())


def test_notes_name_what_adapters_left_out():
    model = torch.nn.Linear(2, 2)
    assert describe.model_notes(model) == ()
    model.adapter_notes = ("use_dora: not on the experts",)
    assert describe.model_notes(model) == ("use_dora: not on the experts",)


def test_weight_bytes_count_the_constants_of_double_quantization():
    nested = SimpleNamespace(absmax=torch.zeros(4))
    state = SimpleNamespace(
        quant_type="nf4", absmax=torch.zeros(16, dtype=torch.uint8), nested=True, state2=nested
    )
    weight = SimpleNamespace(quant_state=state, numel=lambda: 512, element_size=lambda: 1)
    model = SimpleNamespace(parameters=lambda: [weight])
    assert describe.weight_bytes(model) == (("nf4", 512 + 16 + 16),)
