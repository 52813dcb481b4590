"""Arguments that were renamed or removed: the table against the parsers there are, and what is said of them."""

from __future__ import annotations

import pytest

from isotype.core.arguments import REMOVED, RENAMED
from isotype.core.errors import UsageError
from isotype.data.methods import METHODS
from isotype.train.command.parse import training_parser
from tests.parsed import parse_settings


@pytest.fixture(scope="module")
def names() -> set[str]:
    parsers = [training_parser(name) for name in ("sft", "dpo", "grpo")]
    return {action.dest for parser in parsers for action in parser._actions}


def test_every_new_name_is_one(names: set[str]) -> None:
    assert [new for new, _ in RENAMED.values() if new not in names] == []


def test_no_old_name_is_one_still(names: set[str]) -> None:
    assert sorted({*RENAMED, *REMOVED} & names) == []


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        (
            "--evaluation_strategy steps",
            "--evaluation_strategy: renamed\n.*--eval_strategy\n.*--eval_strategy steps",
        ),
        ("--per_gpu_train_batch_size 4", "fix +--per_device_train_batch_size 4"),
        ("--per_gpu_train_batch_size --bf16", "fix +--per_device_train_batch_size VALUE"),
        ("--no_cuda", "fix +--use_cpu True"),
        ("--warmup_ratio 0.1", "fix +--warmup_steps 0.1\n"),
        ("--max-seq-length=512", "--max-seq-length: renamed\n.*\n.*--max_length 512"),
        ("--torch_dtype bfloat16", "fix +--dtype bfloat16"),
        ("--overwrite_output_dir", "--overwrite_output_dir: removed"),
        ("--tokenizer x", "isotype uses the model's tokenizer"),
        ("--group_by_length", "fix +--train_sampling_strategy group_by_length"),
    ],
)
def test_an_old_name_gets_its_new_one(flag: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_settings(METHODS["sft"], ["--model_name_or_path", "x", *flag.split()])


def test_in_a_config_file_too(tmp_path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model_name_or_path: x\nevaluation_strategy: steps\n")
    with pytest.raises(UsageError, match=r"evaluation_strategy: renamed\n.*\n.*--eval_strategy steps"):
        parse_settings(METHODS["sft"], ["--config", str(file)])


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ("--quantization 4bit", "did you mean nf4?"),
        ("--quantization int4", "did you mean nf4?"),
        ("--quantization 8-bit", "did you mean int8?"),
        ("--sequence_len 512", "did you mean --max_length?"),
        ("--use_lora True", "--use_peft True"),
        ("--group_by_length False", "omit it"),
        ("--use_unsloth True", "see isotype sft --help"),
        ("--learning_rate 2e-4,", "--learning_rate 2e-4"),
        ("--learning_rate fast", "--learning_rate 2e-05"),
        ("--learning_rate 0,001", "--learning_rate 2e-05"),
        ("--max_steps 1,000", "--max_steps 1000"),
        ("--max_steps 2.0", "--max_steps 2"),
        ("--max_steps two", "--max_steps 8"),
        ("--per_device_train_batch_size two", "--per_device_train_batch_size 8"),
    ],
)
def test_what_is_suggested_does_what_was_meant(words: str, fix: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_settings(METHODS["sft"], ["--model_name_or_path", "x", *words.split()])
    (problem,) = caught.value.problems
    assert problem.fix == fix
