"""`--config` with another trainer's file gives the settings of isotype's arguments; `--print-config` writes them."""

from __future__ import annotations

import io
import json
import shlex
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from isotype.cli.main import main
from isotype.core.errors import UsageError
from isotype.data.methods import METHODS
from isotype.planning.from_request import _notes as left_out
from isotype.planning.request import parse_request
from isotype.train.command.parse import parse_command
from isotype.train.command.settings import Settings
from isotype.train.dialects.translate import in_isotype_names
from isotype.train.preflight.step_plan import parse_options
from isotype.train.training import run
from tests.parsed import parse_settings
from tests.refusals import refused
from tests.train.tiny import save_chat_model

AXOLOTL = {
    "base_model": "model",
    "model_type": "LlamaForCausalLM",
    "load_in_4bit": True,
    "adapter": "qlora",
    "lora_r": 4,
    "lora_alpha": 8,
    "lora_target_modules": ["q_proj", "v_proj"],
    "datasets": [{"path": "rows.json", "type": "alpaca"}],
    "val_set_size": 0.25,
    "evals_per_epoch": 2,
    "saves_per_epoch": 1,
    "output_dir": "out",
    "sequence_len": 64,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "num_epochs": 2,
    "max_steps": 3,
    "optimizer": "adamw_torch",
    "lr_scheduler": "linear",
    "learning_rate": "2e-3",
    "warmup_ratio": 0.1,
    "bf16": "auto",
    "tf32": True,
    "flash_attention": True,
    "gradient_checkpointing": False,
    "dataset_prepared_path": "prepared",
    "wandb_project": None,
    "strict": False,
}
OUR_FLAGS = shlex.split(
    "--model_name_or_path model --quantization nf4 --use_bnb_nested_quant True --lora_r 4 --lora_alpha 8 --lora_dropout 0 "
    "--lora_target_modules q_proj v_proj --dataset_name rows.json --columns alpaca --apply_chat_template True --eval_split 0.25 "
    "--eval_strategy steps --eval_steps 0.25 --save_strategy steps --save_steps 0.5 --save_total_limit 4 --output_dir out "
    "--max_length 64 --per_device_train_batch_size 2 --gradient_accumulation_steps 2 --num_train_epochs 2 --max_steps 3 "
    "--optim adamw_torch --lr_scheduler_type linear --learning_rate 2e-3 --warmup_steps 0.1 --gradient_checkpointing False"
)
FACTORY = {
    "model_name_or_path": "model",
    "stage": "dpo",
    "finetuning_type": "lora",
    "dataset": "pairs",
    "template": "qwen3",
    "cutoff_len": 128,
    "max_samples": 3,
    "bf16": True,
    "warmup_ratio": 0.1,
    "pref_beta": 0.2,
    "output_dir": "out",
}
INFO = {
    "pairs": {
        "file_name": "pairs.json",
        "ranking": True,
        "columns": {"prompt": "question", "chosen": "good", "rejected": "bad"},
    }
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    rows = [
        {"instruction": f"w{i}", "input": "w3" if i % 2 else "", "output": f"w{i + 1} w2"} for i in range(16)
    ]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(INFO))
    (tmp_path / "ours.yaml").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(content: Any, name: str = "theirs.yaml") -> str:
    Path(name).write_text(yaml.safe_dump(content, sort_keys=False))
    return name


def compared(settings: Settings) -> dict[str, Any]:
    """Return the values of the settings without the command from which they were parsed."""
    plain = {each.name: getattr(settings, each.name) for each in fields(settings)}
    del plain["command"]
    parts = ("script", "training", "model", "dataset")
    plain |= {name: {**vars(plain[name])} for name in parts}
    plain["dataset"] = {
        **plain["dataset"],
        "datasets": [asdict(each) for each in plain["dataset"]["datasets"]],
    }
    for name in ("logging_dir", "distributed_state", "accelerator_config"):
        plain["training"].pop(name, None)
    return plain


def test_the_settings_are_those_of_our_own_flags(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    theirs = parse_settings(METHODS["sft"], ["--config", written(AXOLOTL)])
    ours = parse_settings(METHODS["sft"], OUR_FLAGS)
    assert compared(theirs) == compared(ours)
    assert caplog.messages == [
        "theirs.yaml: 23 names in axolotl's file are used; notes on other names:\n"
        "  bf16: not done; the checkpoint decides the dtype (axolotl: bfloat16 if the GPU has it, else float16; --dtype sets another)\n"
        "  tf32: no effect: matmuls run in the compute dtype (--tf32 True for float32)\n"
        "  datasets[0].type: not done; no words are added: a prompt is the instruction, an "
        "empty line and the input\n"
        "  sequence_len: not done; rows that are too long are cut, not dropped\n"
        "  model_type: no effect: the files of the checkpoint name its classes and its tokenizer\n"
        "  flash_attention: no effect: isotype uses torch's FlashAttention if the GPU supports it "
        "(isotype's flag --attn_implementation selects another attention)\n"
        "  dataset_prepared_path: no effect: isotype reads, mixes and packs the rows itself, and stores no prepared data"
    ]


def test_flags_go_before_the_file(folder: Path) -> None:
    settings = parse_settings(
        METHODS["sft"], ["--config", written(AXOLOTL), "--lora_r", "32", "--max_steps", "7"]
    )
    assert (settings.model.lora_r, settings.training.max_steps) == (32, 7)


@pytest.mark.parametrize(
    ("method", "content"), [("sft", AXOLOTL), ("dpo", FACTORY)], ids=["axolotl", "factory"]
)
def test_print_config_writes_the_shortest_file_that_means_the_same(
    folder: Path, capsys: pytest.CaptureFixture[str], method: str, content: dict[str, Any]
) -> None:
    assert main([method, "--config", written(content), "--print-config"]) == 0
    text = capsys.readouterr().out
    Path("ours.yaml").write_text(text)
    theirs = compared(parse_settings(METHODS[method], ["--config", "theirs.yaml"]))
    assert compared(parse_settings(METHODS[method], ["--config", "ours.yaml"])) == theirs
    ours = yaml.safe_load(text)
    for name in ours.keys() - {"model_name_or_path"}:  # without which nothing is parsed
        written({key: value for key, value in ours.items() if key != name}, "less.yaml")
        less = parse_settings(METHODS[method], ["--config", "less.yaml"])
        assert compared(less) != theirs or name == "output_dir", name


def test_print_config_of_our_own_file_and_flags(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = written(
        {"model_name_or_path": "m", "learning_rate": 2e-5, "lora_r": 8, "env": {"A": "b"}}, "ours.yaml"
    )
    assert main(["sft", "--config", own, "--print-config", "--max_steps", "3"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == {
        "model_name_or_path": "m",
        "lora_r": 8,
        "env": {"A": "b"},
        "max_steps": 3,
    }
    assert main(["sft", "--config", written({"base_model": "m", "rl": "kto"}), "--print-config"]) == 2
    assert "run isotype kto --config with this file" in capsys.readouterr().err


def test_every_reason_is_said_at_once(folder: Path) -> None:
    refused = {
        "adapter": "lora",
        "qat": {"weight_dtype": "int4"},
        "optimizer": "muon",
        "load_in_4bit": False,
        "sequence_lem": 4,
    }
    with pytest.raises(UsageError) as caught:
        parse_settings(METHODS["sft"], ["--config", written(AXOLOTL | refused)])
    assert str(caught.value) == (
        "theirs.yaml requests features that isotype lacks\n"
        "  - optimizer: muon\n"
        "    expected  one of adamw_torch, adamw_torch_fused, adafactor, adamw_torch_4bit, adamw_torch_8bit, ademamix, sgd, adagrad, "
        "adamw_bnb_8bit, adamw_8bit, ademamix_8bit, lion_8bit, lion_32bit, paged_adamw_32bit, paged_adamw_8bit, "
        "paged_ademamix_32bit, paged_ademamix_8bit, paged_lion_32bit, paged_lion_8bit, rmsprop, rmsprop_bnb, rmsprop_bnb_8bit, "
        "rmsprop_bnb_32bit, adamw_hf, ao_adamw_4bit, ao_adamw_8bit\n"
        "    fix       choose one of these values, because isotype has no other\n"
        "  - qat: {'weight_dtype': 'int4'}\n"
        "    expected  weights and matmuls in the dtypes of isotype's policy\n"
        "    fix       remove it from the file to train without it\n"
        "  - sequence_lem: 4\n"
        "    expected  a name of axolotl that isotype translates\n"
        "    fix       did you mean sequence_len? Else remove it"
    )


@pytest.mark.parametrize(
    ("change", "method", "problem"),
    [
        (
            {},
            "sft",
            "stage: dpo\n    expected  a file for isotype sft\n    fix       run isotype dpo --config with this file",
        ),
        ({"stage": "ppo"}, "dpo", "stage: ppo\n    expected  one of sft, pt, rm, dpo, kto"),
        ({"dataset": "pears"}, "dpo", "dataset: pears\n    expected  a data set of data/dataset_info.json"),
        (
            {"dataset_dir": "else"},
            "dpo",
            "dataset: pairs\n    expected  else/dataset_info.json, which describes",
        ),
        (
            {"stage": "kto"},
            "kto",
            "dataset: pairs: prompts and answers\n    expected  rows that isotype kto reads",
        ),
        ({"pref_loss": "orpo"}, "dpo", "pref_loss: orpo"),
        ({"adapter_folder": "a"}, "dpo", "adapter_folder: a\n    expected  the whole path of the adapter"),
        (
            {"lora_ranks": 4},
            "dpo",
            "lora_ranks: 4\n    expected  a name of LLaMA-Factory that isotype translates",
        ),
        ({"lora_rankings": 4}, "dpo", "lora_rankings\n    expected  a known name"),
    ],
)
def test_what_is_refused_of_a_file_of_llama_factory(
    folder: Path, change: dict[str, Any], method: str, problem: str
) -> None:
    with pytest.raises(UsageError) as caught:
        parse_settings(METHODS[method], ["--config", written(FACTORY | change)])
    assert f"  - {problem}" in str(caught.value)


def test_the_rows_of_dataset_info_are_found_beside_the_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / written(FACTORY)
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    settings = parse_settings(METHODS["dpo"], ["--config", str(path)])
    (entry,) = settings.dataset.datasets
    assert (entry.path, entry.split) == (str(folder / "data" / "pairs.json"), "train[:3]")
    assert entry.columns == {"prompt": "question", "chosen": "good", "rejected": "bad"}
    assert settings.apply_chat_template


@pytest.mark.usefixtures("unchecked")
def test_a_training_of_an_axolotl_file_is_the_one_of_our_flags(folder: Path) -> None:
    save_chat_model(folder / "model")
    more = ["--quiet", "--device", "cpu", "--dtype", "float32"]
    losses = []
    for argv in (["--config", written(AXOLOTL)], OUR_FLAGS):
        outcome = run(parse_settings(METHODS["sft"], [*argv, *more]), Console(file=io.StringIO()))
        losses.append([(step.loss, step.learning_rate) for step in outcome.record.steps])
    assert len(losses[0]) == 3
    assert losses[0] == losses[1]


def test_a_file_takes_the_place_of_the_model(folder: Path) -> None:
    # axolotl train FILE, llamafactory-cli train FILE
    path = written(AXOLOTL)
    training, step = parse_command("sft", [path])[0], parse_options([path, "--device", "t4"])
    assert training["model_name_or_path"] == step[1]["model_name_or_path"] == "model"
    assert (step[0].bare, step[1].method) == (False, "sft")
    (folder / "file.json").write_text(json.dumps({**FACTORY, "stage": "rm", "dataset_dir": "absent"}))
    command = parse_options(["file.json", "--device", "t4"])[1]  # the file names the method
    assert (command.method, command.given("dataset_name")) == ("reward", None)
    assert parse_request(["file.json", "--device", "t4"])[0].command.method == "reward"
    for words in (["--config", "file.json"], ["--config=file.json"]):
        assert parse_options([*words, "--device", "t4"])[1].method == "reward"
    assert parse_command("sft", [f"--config={path}"])[0].file is not None
    for text in ('{"model_type": "llama"}', "[1]", "{"):  # as before, the name of a model
        (folder / "config.json").write_text(text)
        assert parse_options(["config.json"])[1]["model_name_or_path"] == "config.json"
    assert "absent/dataset_info.json" in refused(
        UsageError, parse_command, "reward", ["--config", "file.json"]
    )


@pytest.mark.parametrize(
    ("content", "program", "fix"),
    [
        (
            {"distributed_type": "FSDP", "num_processes": 2},
            "accelerate launch",
            "accelerate launch --config_file file.yaml -m isotype sft …",
        ),
        (
            {"zero_optimization": {"stage": 3}, "fp16": {"enabled": "auto"}},
            "DeepSpeed",
            "--deepspeed file.yaml",
        ),
        (
            {"model": {"_component_": "torchtune.models.llama3.qlora_llama3_8b"}},
            "torchtune",
            "isotype check MODEL",
        ),
        (
            {"base_model": "m", "adapter": {"type": "lora"}, "input_features": []},
            "Ludwig",
            "isotype check MODEL",
        ),
        ({"llm_backbone": "m", "training": {"lora": True}}, "H2O LLM Studio", "isotype check MODEL"),
        ({"model": {"model_name": "m"}, "peft": {"q_lora": True}}, "Oumi", "isotype check MODEL"),
        ({"actor_rollout_ref": {"model": {"path": "m"}}}, "verl", "isotype check MODEL"),
        (
            {"__version": 10, "training_method": "LORA", "weight_dtype": "FLOAT_16"},
            "OneTrainer",
            "isotype check MODEL",
        ),
        ({"model": "m", "tuner_type": "lora", "quant_bits": 4}, "ms-swift", "isotype check swift sft"),
        (
            {"recipe": "x", "peft": {"_target_": "nemo_automodel.x", "dim": 8}},
            "NeMo Automodel",
            "isotype check MODEL",
        ),
    ],
)
def test_a_file_of_another_program_is_named(
    content: dict[str, Any], program: str, fix: str, folder: Path
) -> None:
    written(content, "file.yaml")
    text = refused(UsageError, parse_options, ["file.yaml", "--device", "t4"])
    assert f"a file of {program}\n" in text
    assert f"fix       {fix}" in text
    assert text.count("expected") == 1


@pytest.mark.parametrize(
    ("content", "program"),
    [
        ({"training_method": "LORA", "model_type": "FLUX_2"}, "OneTrainer"),
        ({"zero_optimization": {"stage": 2}, "fp16": {"enabled": "auto"}}, "DeepSpeed"),
        ({"type": "act", "input_features": {}}, ""),
        ({"model_type": "llama"}, ""),
    ],
)
def test_a_json_file_of_another_program_is_no_model(
    content: dict[str, Any], program: str, folder: Path
) -> None:
    (folder / "file.json").write_text(json.dumps(content), encoding="utf-8")
    if program:
        assert f"a file of {program}\n" in refused(UsageError, parse_options, ["file.json", "--device", "t4"])
    else:
        assert parse_options(["file.json", "--device", "t4"])[1]["model_name_or_path"] == "file.json"


def test_the_settings_of_deepspeed_may_stand_in_a_file() -> None:
    content = {"deepspeed": {"zero_optimization": {"stage": 2}}}
    assert in_isotype_names(content, "sft", "file.yaml", trains=False) == (content, [])


def test_arguments_of_llama_factory_are_named_at_once() -> None:
    # hiyouga/LlamaFactory #5709
    argv = [
        "sft",
        "--stage",
        "sft",
        "--finetuning_type",
        "lora",
        "--cutoff_len",
        "4096",
        "--model_name_or_path",
        "model",
    ]
    text = refused(UsageError, parse_options, argv)
    assert "LLaMA-Factory's arguments: --stage, --finetuning_type, --cutoff_len" in text
    assert "run the corrected command" in text


def test_a_plan_of_a_file_does_not_name_other_data(folder: Path) -> None:
    request, _ = parse_request(
        [written({**AXOLOTL, "datasets": [{"path": "a/b", "type": "alpaca"}]}), "--device", "t4"]
    )
    assert "the data was not read: all rows are assumed to have the same length" in left_out(request)
