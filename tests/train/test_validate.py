"""Arguments, tokenizers and checkpoints that cannot work are named before the model is loaded."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from rich.console import Console
from transformers import BloomConfig

from isotype.checkpoint.checkpoint import open_checkpoint
from isotype.core import names
from isotype.core.errors import CheckpointError, DataError, PrecisionError, UsageError
from isotype.data.methods import METHODS
from isotype.precision.policy import PrecisionPolicy
from isotype.train.command.settings import Settings
from isotype.train.models import adapted_model, processing_class
from isotype.train.rows.data import dropped_examples
from isotype.train.training import run
from isotype.train.validate import argument_problems, check_policy, check_settings, check_tokenizer
from tests.parsed import parse_settings
from tests.refusals import refused
from tests.train.tiny import rows, save_chat_model, save_rows

POLICY = PrecisionPolicy(compute=torch.bfloat16, storage="bfloat16")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("model"))


def settings(*argv: object, method: str = "sft", model: object = "m") -> Settings:
    base = ["--model_name_or_path", str(model), "--dataset_name", "d"]
    return parse_settings(METHODS[method], [*base, *map(str, argv)])


def given(*argv: object) -> list[str]:
    with pytest.raises(UsageError, match="invalid arguments") as caught:
        check_settings(settings(*argv))
    return [problem.given for problem in caught.value.problems]


def test_sound_arguments_pass(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("isotype.train.validate.pretrained", lambda *_: None)  # the hub has this one
    check_settings(settings("--max_steps", 3, "--attn_implementation", "eager", "--optim", "adamw_bnb_8bit"))
    check_settings(settings("--chat_template_path", "Qwen/Qwen3-0.6B", "--use_peft", "False", "--lora_r", 0))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "task", ["SEQ_CLS", "CAUSAL_LM", "SEQ_2_SEQ_LM", "TOKEN_CLS", "QUESTION_ANS", "FEATURE_EXTRACTION"]
)
def test_a_task_type_that_the_method_does_not_train_is_refused(method: str, task: str):
    request = settings("--lora_task_type", task, method=method)
    if task == METHODS[method].task_type:
        check_settings(request)
        return
    with pytest.raises(UsageError, match="invalid arguments") as caught:
        check_settings(request)
    (problem,) = caught.value.problems
    assert problem.given == f"--lora_task_type {task} with {method}"
    assert problem.expected == f"{METHODS[method].task_type}, the task of isotype {method}"
    other = {"SEQ_CLS": "reward", "CAUSAL_LM": "sft"}.get(task)
    assert problem.fix == "omit it" + (
        f", or run isotype {other}, whose task is {task}" if other is not None else ""
    )


@pytest.mark.parametrize(
    ("method", "argv", "refused"),
    [
        ("dpo", "--beta 0", "--beta 0 with dpo"),
        ("dpo", "--beta 0 --loss_type sft", None),
        ("kto", "--beta 0.0", "--beta 0 with kto"),
        ("grpo", "--beta 0", None),
        ("sft", "--debug x", "--debug x"),
    ],
)
def test_values_with_which_nothing_is_learned_or_the_trainer_ends(
    method: str, argv: str, refused: str | None, model: Path, tmp_path: Path
):
    data = save_rows(tmp_path / "train.jsonl", rows(method, 4))
    request = settings(*argv.split(), "--dataset_name", data, method=method, model=model)
    assert [problem.given for problem in argument_problems(request)] == [refused] * (refused is not None)


@pytest.mark.parametrize(
    ("method", "argv", "refused"),
    [
        ("kto", "--per_device_train_batch_size 1", "--per_device_train_batch_size 1 with kto"),
        ("kto", "--per_device_train_batch_size 1 --loss_type apo_zero_unpaired", None),
        ("kto", "--train_sampling_strategy random", "--train_sampling_strategy random with kto"),
        ("dpo", "--loss_type sigmoid exo_pair", "--loss_type exo_pair"),
        ("sft", "--train_sampling_strategy group_by_length", None),
        ("dpo", "--loss_type exo_pair --label_smoothing 1e-3", None),
        ("dpo", "--sync_ref_model", "--sync_ref_model True with adapters"),
        ("dpo", "--sync_ref_model --use_peft False", None),
        ("dpo", "--lora_modules_to_save lm_head", None),
    ],
)
def test_what_a_trainer_refuses_is_refused_before_a_model_is_loaded(
    method: str, argv: str, refused: str | None, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    data = save_rows(tmp_path / "train.jsonl", rows(method, 4))
    words = f"{argv} --output_dir {tmp_path / 'out'} --device cpu --max_steps 1 --dtype float32"
    request = settings(*words.split(), "--dataset_name", data, method=method, model=model)
    assert [problem.given for problem in argument_problems(request)] == [refused] * (refused is not None)
    if refused is None:
        return
    monkeypatch.setattr("isotype.train.validate._trainer", lambda _: ())
    with pytest.raises(UsageError, match=f"{METHODS[method].trainer} does not accept these arguments"):
        run(request, Console(quiet=True))


def test_expressions_that_cannot_be_matched_by_are_refused(monkeypatch):
    monkeypatch.setattr(names, "_SECONDS", 1)
    assert given("--lora_target_modules", "(")[0].startswith("--lora_target_modules '(': missing )")
    assert given("--lora_target_modules", "(.*)*x") == ["--lora_target_modules '(.*)*x'"]
    check_settings(settings("--lora_target_modules", r".*\.(q|v)_proj"))


def test_all_problems_are_named_at_once():
    argv = ["--learning_rate", "nan", "--lora_r", 0, "--per_device_train_batch_size", 0, "--max_length", 0]
    argv += ["--max_steps", 0, "--chat_template_path", "nosuch.jinja", "--trust_remote_code", "True"]
    assert given(*argv) == [
        "--learning_rate nan",
        "--per_device_train_batch_size 0",
        "--max_length 0",
        "--lora_r 0",
        "--max_steps 0",
        "--trust_remote_code",
        "--chat_template_path nosuch.jinja: no such file or directory",
    ]


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--learning_rate", "-1"], "--learning_rate -1.0"),
        (["--num_train_epochs", "0"], "--num_train_epochs 0"),
        (
            ["--use_liger_kernel", "True"],
            "--use_liger_kernel: Liger replaces the forwards of norms and MLPs, including those that follow the precision policy",
        ),
        (["--dataset_streaming", "True"], "--dataset_streaming without --max_steps"),
        (["--use_cpu", "True", "--device", "cuda"], "--use_cpu True and --device cuda"),
        (
            ["--gradient_checkpointing_kwargs", '{"every_layers": 2}'],
            "--gradient_checkpointing_kwargs: 'every_layers'",
        ),
        (
            ["--gradient_checkpointing_kwargs", '{"every_n_layers": 0}'],
            "--gradient_checkpointing_kwargs: every_n_layers 0",
        ),
        (
            ["--gradient_checkpointing_kwargs", '{"offload": true}', "--device", "cpu"],
            "--gradient_checkpointing_kwargs: offload, on a CPU",
        ),
        (
            ["--activation_offloading", "True", "--device", "cpu"],
            "--activation_offloading, on a CPU",
        ),
        (
            ["--attn_implementation", "sdpa", "--model_init_kwargs", '{"attn_implementation": "eager"}'],
            "--attn_implementation sdpa and --model_init_kwargs attn_implementation=eager",
        ),
    ],
)
def test_each_problem(argv, problem):
    assert given(*argv) == [problem]


@pytest.mark.parametrize(
    "argv",
    [
        ["--report_to", "wandb"],
        ["--attn_implementation", "flash_attention_2", "--device", "a100"],
        ["--model_init_kwargs", '{"attn_implementation": "flash_attention_2"}', "--device", "a100"],
        ["--optim", "galore_adamw_8bit"],
    ],
)
def test_packages_that_are_not_installed(monkeypatch, argv):
    monkeypatch.setattr("isotype.train.validate.find_spec", lambda name: None)
    (problem,) = given(*argv)
    assert problem.startswith("--")
    monkeypatch.setattr("isotype.train.validate.find_spec", lambda name: object())
    monkeypatch.setattr(
        "isotype.train.validate.optimizer_problems", lambda settings: []
    )  # it would import the package
    check_settings(settings(*argv))


def test_the_output_must_not_be_the_model(model):
    with pytest.raises(UsageError, match="is the model's own directory"):
        check_settings(settings("--output_dir", model, model=model))


def test_auto_must_not_come_out_at_a_refused_dtype():
    check_policy(settings("--fp16", "False"), POLICY)
    flash = settings("--attn_implementation", "flash_attention_2", "--device", "a100")
    check_policy(flash, POLICY)
    assert refused(
        PrecisionError, check_policy, flash, PrecisionPolicy(compute=torch.float32, storage="float32")
    ) == (
        "flash-attn has no kernel for float32\n"
        "  - --attn_implementation flash_attention_2, and float32 as the compute dtype\n"
        "    expected  bfloat16 or float16\n"
        "    fix       --dtype bfloat16, or --attn_implementation sdpa"
    )
    assert refused(PrecisionError, check_policy, settings("--bf16", "False"), POLICY) == (
        "the arguments disagree about precision\n"
        "  - --dtype auto, which is bfloat16 in this run, and --bf16 False\n"
        "    expected  a compute dtype that no argument excludes\n"
        "    fix       --dtype float32, or --dtype float16"
    )


def test_a_checkpoint_without_weights(model, tmp_path):
    open_checkpoint(str(model)).require_weights()
    shutil.copy(model / "config.json", tmp_path)
    assert refused(CheckpointError, open_checkpoint(str(tmp_path)).require_weights) == (
        "a checkpoint without weights\n"
        f"  - {tmp_path}: a config without weights in its directory\n"
        "    expected  model.safetensors, or shards with model.safetensors.index.json\n"
        "    fix       copy the weights into this directory, or pass the directory that save_pretrained() wrote"
    )


def check(directory: Path, *argv: object, data: list | None = None) -> None:
    data = rows("sft") if data is None else data
    check_tokenizer(settings(*argv), directory, processing_class(directory), {"train": data})


def test_a_tokenizer_that_fits(model):
    check(model)
    check(model, "--eos_token", "w3")


def test_conversations_need_a_chat_template(model, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(model, bare)
    (bare / "chat_template.jinja").unlink()
    check(bare, data=[{"prompt": "w1", "completion": "w2"}])
    check(bare, "--chat_template_path", model)
    with pytest.raises(UsageError) as caught:
        check(bare)
    assert caught.value.problems[0].given == "conversations, and a tokenizer without a chat template"


def test_a_special_token_that_is_not_in_the_vocabulary(model):
    assert refused(UsageError, check, model, "--eos_token", "<end>") == (
        "the tokenizer does not fit\n"
        "  - --eos_token <end>\n"
        "    expected  a token of the vocabulary; the tokenizer's default is </s>\n"
        "    fix       omit it, or correct the spelling"
    )


def test_a_tokenizer_larger_than_the_model(model, tmp_path):
    small = tmp_path / "small"
    shutil.copytree(model, small)
    config = (small / "config.json").read_text()
    (small / "config.json").write_text(config.replace('"vocab_size": 64', '"vocab_size": 32'))
    with pytest.raises(CheckpointError) as caught:
        check(small)
    assert caught.value.problems[0].given == "a tokenizer with ids up to 63 and a model with 32 embeddings"


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"input_ids": [1, 64]}, "column 'input_ids' holds 64\n    expected  0 to 63, the ids that the model has\n"),
        ({"input_ids": [10**9, 1]}, "column 'input_ids' holds 1000000000\n"),
        ({"labels": [1, 5000]}, "column 'labels' holds 5000\n    expected  0 to 63, the ids that the model has; or -100\n"),
        ({"labels": [1, -1]}, "column 'labels' holds -1\n"),
        ({"labels": [1]}, "column 'labels' has 1 value for 2 token ids\n"),
    ],
)  # fmt: skip
def test_every_row_of_token_ids_is_one_of_the_models(wrong, what, model):
    good = {"input_ids": [1, 63], "labels": [-100, 63]}
    check(model, data=Dataset.from_list([good] * 3))
    data = Dataset.from_list([good] * 1500 + [{**good, **wrong}] + [good])
    assert (
        f"The data set 'd' cannot be trained on\n  - train, row 1501: {what}"
        in refused(DataError, check, model, data=data) + "\n"
    )


def test_dropped_examples_are_counted():
    sft = settings("--max_length", 16)
    assert dropped_examples(sft, [1, 2], [1, 2]) is None
    assert dropped_examples(settings("--packing", "True"), [1, 2], [1]) is None
    assert dropped_examples(settings(method="grpo"), [1, 2], [1]) is None
    assert dropped_examples(sft, range(16), range(8)) == (
        "8 of 16 examples were dropped: the prompt alone fills max_length 16"
    )
    with pytest.raises(DataError, match="all 16 examples were dropped"):
        dropped_examples(sft, range(16), [])


def test_an_attention_that_the_class_lacks_is_refused_before_a_weight_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = BloomConfig(vocab_size=64, n_embd=16, n_layer=1, n_head=2, architectures=["BloomForCausalLM"])
    config.save_pretrained(tmp_path)
    monkeypatch.setattr("isotype.train.models.load", pytest.fail)
    asked = settings("--attn_implementation", "sdpa", model=tmp_path)
    message = refused(CheckpointError, adapted_model, asked, open_checkpoint(tmp_path), POLICY)
    assert message.startswith("the attention implementation cannot be used\n  - BloomForCausalLM fails")


@pytest.mark.parametrize("method", ["dpo", "reward"])
def test_pairs_have_no_length_by_which_they_could_be_grouped(method: str) -> None:
    asked = settings("--train_sampling_strategy", "group_by_length", method=method)
    (problem,) = argument_problems(asked)
    assert problem.given == f"--train_sampling_strategy group_by_length with {method}"
