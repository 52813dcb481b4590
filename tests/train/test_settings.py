"""The arguments of the training commands: those of TRL, and those about precision."""

from __future__ import annotations

import pytest
import torch

from isotype.core.errors import IsotypeError, PrecisionError, UsageError
from isotype.data.methods import METHODS
from isotype.precision.decide import PrecisionRequest
from isotype.precision.devices.profile import device_profile
from isotype.train.command.parse import parse_command
from isotype.train.command.settings import _values, settings_of
from tests.parsed import parse_settings

BASE = ("--model_name_or_path", "m", "--dataset_name", "d")


def asked(*argv: str, method: str = "sft") -> PrecisionRequest:
    return parse_settings(METHODS[method], [*BASE, *argv]).precision


def message(*argv: str, base: tuple[str, ...] = BASE) -> str:
    with pytest.raises(IsotypeError) as caught:
        parse_settings(METHODS["sft"], [*base, *argv])
    return str(caught.value)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_takes_trl_arguments_and_defaults_to_lora_in_auto(method):
    settings = parse_settings(METHODS[method], [*BASE, "--learning_rate", "3e-4", "--lora-r", "4"])
    assert settings.precision == PrecisionRequest(dtype="auto", quantization=None, trainable="lora")
    assert settings.training.learning_rate == 3e-4
    assert settings.model.lora_r == 4
    assert settings.model.lora_target_modules == "all-linear"
    assert settings.model.lora_task_type == ("SEQ_CLS" if method == "reward" else "CAUSAL_LM")
    assert set(settings.command.values) == {"model_name_or_path", "dataset_name", "learning_rate", "lora_r"}


@pytest.mark.parametrize(
    ("argv", "dtype", "quantization"),
    [
        (["--dtype", "bf16"], "bfloat16", None),
        (["--fp16"], "float16", None),
        (["--bf16"], "bfloat16", None),
        (["--bf16", "True", "--dtype", "bfloat16"], "bfloat16", None),
        (["--bf16", "False"], "auto", None),
        (["--load_in_4bit"], "auto", "nf4"),
        (["--load_in_4bit", "--bnb_4bit_quant_type", "fp4"], "auto", "fp4"),
        (["--quantization", "fp4", "--load_in_4bit"], "auto", "fp4"),
        (["--load_in_8bit", "--quantization", "int8"], "auto", "int8"),
        (["--quantization", "nf4", "--fp16", "--dtype", "float16"], "float16", "nf4"),
    ],
)
def test_short_and_long_forms_agree(argv, dtype, quantization):
    assert asked(*argv) == PrecisionRequest(dtype=dtype, quantization=quantization)


def test_nested_quantization_storage_and_full_training():
    assert asked("--quantization", "nf4", "--use_bnb_nested_quant").double_quant is True
    assert asked("--quantization", "nf4", "--bnb_4bit_quant_storage", "bfloat16").quant_storage == "bfloat16"
    assert asked("--use_peft", "False").trainable == "full"


def test_contradictions_are_all_named_with_both_flags():
    argv = ["--dtype", "float32", "--bf16", "--load_in_8bit", "--quantization", "nf4", "--fp16_full_eval"]
    assert message(*argv) == (
        "the arguments disagree about precision\n"
        "  - --dtype float32 and --bf16\n"
        "    expected  one compute dtype, which is also the dtype of unquantized weights (--dtype sets both)\n"
        "    fix       omit --bf16 to get float32, or omit --dtype float32 to get bfloat16\n"
        "  - --quantization nf4 and --load_in_8bit\n"
        "    expected  one quantization\n"
        "    fix       omit one of the two\n"
        "  - --fp16_full_eval\n"
        "    expected  evaluation in the dtypes of the training\n"
        "    fix       omit it: it would also cast the master weights, and evaluation runs in the compute dtype anyway"
    )


@pytest.mark.parametrize(
    ("argv", "given"),
    [
        (["--fp16", "--bf16"], "--fp16 and --bf16"),
        (["--dtype", "bfloat16", "--bf16", "False"], "--dtype bfloat16 and --bf16 False"),
        (
            ["--quantization", "fp4", "--bnb_4bit_quant_type", "nf4"],
            "--quantization fp4 and --bnb_4bit_quant_type nf4",
        ),
        (
            ["--dtype", "float16", "--model_init_kwargs", '{"dtype": "bfloat16"}'],
            "--dtype float16 and --model_init_kwargs dtype=bfloat16",
        ),
    ],
)
def test_each_contradiction_names_both(argv, given):
    with pytest.raises(PrecisionError) as caught:
        asked(*argv)
    assert [problem.given for problem in caught.value.problems] == [given]


def test_accelerate_launch_must_agree(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    assert asked().dtype == "float16"
    with pytest.raises(
        PrecisionError, match="--dtype bfloat16 and mixed precision fp16 of accelerate launch"
    ):
        asked("--dtype", "bfloat16")


def test_a_typing_error_names_the_nearest_argument():
    assert message("--lerning_rate", "1") == (
        "invalid arguments\n"
        "  - --lerning_rate\n"
        "    expected  a known name: --learning_rate\n"
        "    fix       did you mean --learning_rate?\n"
        "  = isotype sft --help lists the arguments"
    )


def test_missing_and_wrong_values():
    assert "no --model_name_or_path" in message(base=())
    assert "--learning_rate x\n    expected  a number" in message("--learning_rate", "x")
    assert "dtype 'float8'" in message("--dtype", "float8")


def test_a_yaml_file_sets_defaults_that_the_command_line_overrides(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "model_name_or_path: m\ndataset_name: d\nbf16: true\nlearning_rate: 1.0e-3\nload_in_4bit: true\n"
    )
    settings = parse_settings(METHODS["sft"], ["--config", str(path), "--learning_rate", "3e-3"])
    assert settings.precision == PrecisionRequest(dtype="bfloat16", quantization="nf4")
    assert settings.training.learning_rate == 3e-3
    with pytest.raises(PrecisionError, match="--dtype float16 and --bf16"):
        parse_settings(METHODS["sft"], [f"--config={path}", "--dtype", "float16"])


def test_a_bad_yaml_file_is_named(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model_name: m\n")
    assert message("--config", str(path), base=()) == (
        f"unknown names in {path}\n"
        "  - model_name\n"
        "    expected  a known name: model_name_or_path\n"
        "    fix       did you mean model_name_or_path?"
    )
    path.write_text("train_type: full\n")
    assert "  - train_type full\n" in (refused := message("--config", str(path), base=()))
    assert refused.endswith("    fix       --use_peft False")
    path.write_text("- a\n")
    with pytest.raises(UsageError, match="config file is not a mapping"):
        parse_settings(METHODS["sft"], ["--config", str(path)])
    path.write_text("a: [1\n")
    with pytest.raises(UsageError, match="config file is not YAML"):
        parse_settings(METHODS["sft"], ["--config", str(path)])
    with pytest.raises(UsageError, match="unreadable config file"):
        parse_settings(METHODS["sft"], ["--config", str(tmp_path / "none.yaml")])


@pytest.mark.parametrize(
    ("argv", "targets"),
    [
        ([], "all-linear"),
        (["all-linear"], "all-linear"),
        (["q_proj"], ["q_proj"]),
        (["self_attn.q_proj"], ["self_attn.q_proj"]),
        (["q_proj", "v_proj"], ["q_proj", "v_proj"]),
        (["q_proj v_proj"], ["q_proj", "v_proj"]),
        (["q_proj,v_proj"], ["q_proj", "v_proj"]),
        ([r".*\.(q|v)_proj"], r".*\.(q|v)_proj"),
    ],
)
def test_plain_target_names_are_a_list_and_regexes_stay_strings(argv, targets):
    flags = ["--lora_target_modules", *argv] if argv else []
    assert parse_settings(METHODS["sft"], [*BASE, *flags]).model.lora_target_modules == targets


def test_yaml_no_is_the_choice_no(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("eval_strategy: no\nsave_strategy: no\npacking: no\n")
    settings = parse_settings(METHODS["sft"], [*BASE, "--config", str(path)])
    assert (settings.training.eval_strategy, settings.training.save_strategy) == ("no", "no")
    assert settings.training.packing is False


def test_model_init_kwargs_have_a_say_in_the_quantization():
    def init(text: str) -> list[str]:
        return ["--model_init_kwargs", text]

    assert asked(*init('{"quantization_config": {"load_in_4bit": true}}')).quantization == "fp4"
    both = '{"quantization_config": {"load_in_8bit": true}}'
    assert asked(*init(both), "--quantization", "int8").quantization == "int8"
    nested = (
        '{"quantization_config": {"load_in_4bit": true, "bnb_4bit_quant_type": "nf4", '
        '"bnb_4bit_use_double_quant": true, "bnb_4bit_compute_dtype": "float16"}}'
    )
    assert asked(*init(nested)) == PrecisionRequest(dtype="float16", quantization="nf4", double_quant=True)
    assert message(*init(both), "--quantization", "nf4") == (
        "the arguments disagree about precision\n"
        "  - --quantization nf4 and --model_init_kwargs quantization_config load_in_8bit\n"
        "    expected  one quantization\n"
        "    fix       omit one of the two"
    )
    assert message(*init('{"quantization_config": {"quant_method": "gptq"}}')).splitlines()[1] == (
        "  - --model_init_kwargs quantization_config {'quant_method': 'gptq'}"
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("model_init_kwargs", "notjson"),
        ("model_init_kwargs", "{oops"),
        ("model_init_kwargs", "[1]"),
        ("activation_checkpointing_kwargs", "63"),
        ("gradient_checkpointing_kwargs", "true"),
    ],
)
def test_objects_that_are_no_json_object(name, text):
    with pytest.raises(UsageError, match="invalid arguments") as caught:
        asked(f"--{name}", text)
    assert caught.value.problems[0].given.startswith(f"--{name} {text}: ")


WRONG = {
    "--gradient_checkpointing maybe": "--gradient_checkpointing maybe",
    "--lerning_rate 1": "--lerning_rate",
    "--lora_dropout 1.5": "--lora_dropout 1.5",
    "--optim adam": "--optim adam",
    "--load_in_4bit --load_in_8bit": "--load_in_8bit and --load_in_4bit",
    "--model_init_kwargs {oops": "--model_init_kwargs {oops",
}
"""Wrong arguments, with their problems. They are noticed at several times: while the command is parsed, in single values, or where arguments meet."""


@pytest.mark.parametrize("left", [*WRONG, None])
def test_problems_of_all_kinds_are_named_at_once(left, tmp_path):
    kinds = {argument: problem for argument, problem in WRONG.items() if argument != left}
    path = tmp_path / "run.yaml"
    path.write_text("wamup_steps: 3\nseed: x\n")
    with pytest.raises((UsageError, PrecisionError)) as caught:
        asked(*" ".join(kinds).split())
    assert all(str(caught.value).count(problem) == 1 for problem in kinds.values())
    with pytest.raises(UsageError, match=f"unknown names in {path}, and invalid arguments") as caught:
        asked("--config", str(path), *" ".join(kinds).split())
    for problem in ("wamup_steps", f"seed x ({path}:2)", *kinds.values()):
        assert str(caught.value).count(f"- {problem}") + str(caught.value).count(f"- --{problem}") == 1


@pytest.mark.parametrize("name", ["reward_funcs", "lora_modules_to_save"])
def test_one_name_in_a_config_is_a_list_of_one(name, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(f"model_name_or_path: m\n{name}: lm_head\n")
    assert parse_command("grpo", ["--config", str(path)])[0][name] == ["lm_head"]


def test_data_sets_on_the_command_line_are_paths():
    settings = parse_settings(METHODS["sft"], [*BASE[:2], "--datasets", "a.jsonl", "b"])
    assert [entry.path for entry in settings.datasets] == ["a.jsonl", "b"]


@pytest.mark.parametrize("value", ["x", '{"cp_size": 2}'])
def test_other_parallelism_is_refused(value):
    assert "- --parallelism_config\n" in message("--parallelism_config", value)


@pytest.mark.parametrize(
    ("method", "name", "word"),
    [("dpo", "loss_type", "dapo"), ("grpo", "loss_type", "sigmoid"), ("dpo", "f_divergence_type", "kl")],
)
def test_names_that_only_the_help_of_trl_lists(method, name, word):
    with pytest.raises(UsageError, match=f"--{name} {word}"):
        asked(f"--{name}", word, method=method)


def test_use_cpu_names_the_device():
    settings = parse_settings(METHODS["sft"], [*BASE, "--bf16", "False", "--use_cpu", "True"])
    assert settings.device == "cpu"


@pytest.mark.parametrize(
    ("count", "gpu", "device"), [("2", False, "cpu"), ("2", True, "auto"), ("1", False, "auto")]
)
def test_processes_without_an_accelerator_ask_for_the_cpu(count, gpu, device, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", count)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: gpu)
    values = _values(parse_command("sft", BASE)[0], {})
    assert (values.get("device", "auto"), values.get("use_cpu", False)) == (device, device == "cpu")


def test_lora_bias_is_an_argument():
    assert parse_settings(METHODS["sft"], [*BASE, "--lora_bias", "lora_only"]).lora_bias == "lora_only"
    assert "--lora_bias some\n    expected  one of none, all, lora_only" in message("--lora_bias", "some")


def test_an_infinite_number_of_steps_is_refused():
    assert message("--save_steps", "inf").endswith(
        "--save_steps inf\n    expected  more than 0\n    fix       give a number of steps, or a share of all steps below 1"
    )


def test_gradient_checkpointing_is_not_reentrant_unless_asked_for():
    def given(*argv):
        return parse_settings(METHODS["sft"], [*BASE, *argv]).training.gradient_checkpointing_kwargs

    name = "--gradient_checkpointing_kwargs"
    assert given() is None
    assert given(name, '{"preserve_rng_state": false}') == {
        "preserve_rng_state": False,
        "use_reentrant": False,
    }
    assert given(name, '{"use_reentrant": true}') == {"use_reentrant": True}


@pytest.mark.parametrize(
    ("method", "argv", "rows"),
    [
        ("sft", [], 8),
        ("sft", ["--per_device_train_batch_size", "2"], 2),
        ("sft", ["--per_device_train_batch_size", "2", "--per_device_eval_batch_size", "32"], 32),
        ("dpo", ["--per_device_train_batch_size", "3"], 3),
        # Whole groups of completions: TRL refuses others.
        ("grpo", ["--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "4"], 8),
    ],
)
def test_as_many_rows_are_evaluated_as_are_trained_on(method: str, argv: list[str], rows: int) -> None:
    training = parse_settings(METHODS[method], [*BASE, *argv]).training
    assert training.per_device_eval_batch_size == rows


@pytest.mark.parametrize(("device", "takes"), [("h100", True), ("t4", False), ("mi300x", False)])
def test_tf32_is_judged_by_the_device_that_is_named(device: str, takes: bool) -> None:
    command = parse_command("sft", ["--model_name_or_path", "m", "--tf32", "True", "--device", device])[0]
    if takes:
        assert settings_of(command).command["tf32"] is True
        return
    with pytest.raises(UsageError, match=f"--tf32 True on {device_profile(device).title}"):
        settings_of(command)
