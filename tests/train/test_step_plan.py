"""The arguments of `isotype check` as one step: a bare model, a training command, and both together."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers
from rich.console import Console

import isotype
from isotype.core.errors import DataError, IsotypeError, UsageError
from isotype.data.methods import METHODS
from isotype.train.command.command import specs
from isotype.train.preflight.step import PlannedStep
from isotype.train.preflight.step_plan import parse_options, plan_of
from isotype.train.training import run
from tests.parsed import parse_settings
from tests.train.tiny import rows, save_chat_model, save_rows


def plan(*argv):
    return plan_of(*parse_options(argv))


def test_a_bare_model_needs_no_trainer(monkeypatch):
    for name in [name for name in sys.modules if name == "trl" or name.startswith("trl.")]:
        monkeypatch.delitem(sys.modules, name)
    found = plan("org/model", "--quantization", "nf4", "--device", "t4", "--batch", "2", "--length", "64")
    assert (found.source, found.method, found.rows, found.length) == ("org/model", "sft", 2, 64)
    assert (found.precision.quantization, found.device) == ("nf4", "t4")
    assert "trl" not in sys.modules


def test_the_defaults_of_a_bare_model_are_those_of_sft():
    light = specs("sft")
    settings = parse_settings(METHODS["sft"], ["--model_name_or_path", "m"])
    for name in ("lora_r", "lora_alpha", "lora_dropout"):
        assert light[name].default == getattr(settings.model, name)
    assert light["learning_rate"].default == settings.training.learning_rate
    assert light["optim"].default == settings.training.optim
    assert (light["dtype"].default, light["device"].default) == (
        settings.precision.dtype,
        settings.device,
    )
    bare, full = plan("m"), plan("--model_name_or_path", "m")
    assert full.lora.target_modules == "all-linear"
    differing = {f.name for f in dataclasses.fields(bare) if getattr(bare, f.name) != getattr(full, f.name)}
    # A training command has 8 rows a step unless told otherwise.
    assert differing == {"rows", "revision", "check_policy"}
    assert (bare.rows, full.rows) == (1, 8)


@pytest.mark.parametrize(("method", "least"), [("reward", 30), ("kto", 10), ("dpo", 10)])
def test_a_length_that_leaves_no_row_is_refused_as_in_the_training(method, least, tmp_path, monkeypatch):
    model, data = save_chat_model(tmp_path / "model"), save_rows(tmp_path / "t.jsonl", rows(method, 4))
    words = [method, "--model_name_or_path", str(model), "--dataset_name", str(data), "--device", "cpu"]
    with pytest.raises(DataError, match="no example is left to train on") as checked:
        plan(*words, "--max_length", "4")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="no example is left to train on") as trained:
        run(parse_settings(METHODS[method], [*words[1:], "--max_length", "4"]), Console(quiet=True))
    assert (
        checked.value.problems[0].given.rpartition(":")[2]
        == trained.value.problems[0].given.rpartition(":")[2]
    )
    assert plan(*words, "--max_length", str(least)).lengths is not None


@pytest.mark.parametrize("marked", [False, True])
def test_answers_that_begin_beyond_the_length_are_refused_as_in_the_training(marked, tmp_path, monkeypatch):
    model = save_chat_model(tmp_path / "model")
    template = tmp_path / "t.jinja"
    around = ("{% generation %}", "{% endgeneration %}") if marked else ("", "")
    template.write_text(
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '<s> assistant ' }}"
        + around[0] + "{{ m['content'] + ' </s> ' }}" + around[1]
        + "{% else %}{{ '<s> user ' + m['content'] + ' </s> ' }}{% endif %}{% endfor %}"
        + "{% if add_generation_prompt %}{{ '<s> assistant ' }}{% endif %}"
    )  # fmt: skip
    turns = [{"role": "user", "content": "w1 w2 w3 w4 w5"}, {"role": "assistant", "content": "w6"}]
    data = save_rows(tmp_path / "t.jsonl", [{"messages": turns}] * 4)
    words = ["--model_name_or_path", str(model), "--dataset_name", str(data), "--device", "cpu"]
    words += ["--assistant_only_loss", "True", "--chat_template_path", str(template), "--max_length"]
    with pytest.raises(DataError, match="none of their first 6 tokens has loss"):
        plan("sft", *words, "6")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="no example is left to train on"):
        run(parse_settings(METHODS["sft"], [*words, "6"]), Console(quiet=True))
    assert plan("sft", *words, "12").prompt == 10


@pytest.mark.parametrize(
    ("argv", "refused"),
    [
        ("--attn_implementation flash_attention_2 --device t4", "flash_attention_2 on NVIDIA T4"),
        ("--attn_implementation flash_attention_3 --device cpu", "flash_attention_3 on "),
        ("--attn_implementation flash_attention_2 --device a100 --dtype bfloat16", None),
        ("--attn_implementation sdpa --device t4", None),
    ],
)
def test_flash_attention_where_it_does_not_run_is_refused(argv, refused):
    if refused is None:
        plan("sft", "--model_name_or_path", "m", *argv.split())
        return
    with pytest.raises(UsageError, match=refused) as caught:
        plan("sft", "--model_name_or_path", "m", *argv.split())
    assert caught.value.problems[0].fix == "--attn_implementation sdpa"


def test_a_training_command_with_check_before_it(tmp_path):
    options, command = parse_options(
            [
                "dpo", "--model_name_or_path", "m", "--dataset_name", "no/such", "--output_dir", str(tmp_path / "no"),
                "--fp16", "--load_in_4bit", "--per_device_train_batch_size", "3", "--max_length", "77",
                "--lora_target_modules", "q_proj", "--gradient_checkpointing", "False", "--precompute_ref_log_probs",
            ]
        )  # fmt: skip
    found = plan_of(options, command)
    assert (found.method, found.rows, found.length) == ("dpo", 3, 77)
    assert (found.precision.dtype, found.precision.quantization) == ("float16", "nf4")
    assert found.lora.target_modules == {"q_proj"}
    assert found.checkpointing is None
    assert not found.reference
    assert command.tokens()[:3] == ("isotype", "dpo", "--model_name_or_path")
    assert not (tmp_path / "no").exists()


def test_a_model_with_arguments_of_the_trainer():
    found = plan("m", "--use_dora", "--batch", "5")
    assert found.lora.use_dora
    assert found.rows == 5
    assert plan("m", "--use_dora").rows == 1
    assert plan("m", "--use_peft", "False").lora is None
    assert plan("m", "--use_peft", "False").precision.trainable == "full"


@pytest.mark.parametrize(
    ("argv", "copied"),
    [
        ("dpo", None),  # switched off, a new adapter leaves the reference
        ("dpo --init_lora_weights gaussian", None),
        ("dpo --quantization nf4 --init_lora_weights loftq", "adapters"),
        ("dpo --use_peft False", "weights"),
        ("dpo --use_peft False --precompute_ref_log_probs True", None),
        ("sft --use_peft False", None),
        ("grpo --use_peft False", None),
        ("grpo --use_peft False --beta 0.1", "weights"),
    ],
)
def test_of_what_a_reference_is_a_copy(argv, copied):
    assert plan(*argv.split(), "--model_name_or_path", "m").copied == copied


@pytest.mark.parametrize(
    ("command", "generations"),
    [
        ("grpo", 0),
        ("rloo --gradient_accumulation_steps 4", 0),
        ("grpo --steps_per_generation 6", 6),
        ("grpo --generation_batch_size 24 --per_device_train_batch_size 4", 6),
        ("grpo --use_vllm --device t4", None),
        ("sft", None),
    ],
)
def test_completions_that_are_generated_at_once(command: str, generations: int | None) -> None:
    method, *rest = command.split()
    assert plan(method, "--model_name_or_path", "m", *rest).generations == generations


def test_grpo_has_completions_and_no_reference_by_default():
    found = plan("grpo", "--model_name_or_path", "m", "--max_completion_length", "99")
    assert (found.completion, found.reference) == (99, False)
    assert plan("rloo", "--model_name_or_path", "m").reference


@pytest.mark.parametrize(
    ("argv", "version"),
    [([], 0), (["--fsdp", "1"], 1), (["--fsdp=2"], 2), (["--fsdp", "0"], 0), (["--fsdp", "full_shard"], 2)],
)
def test_fsdp_is_a_version_or_what_the_trainer_takes(argv, version):
    assert plan("m", *argv).fsdp == version


def test_a_number_that_is_no_version_of_fsdp_is_refused():
    with pytest.raises(UsageError, match=r"--fsdp 3\n +expected +one of 0, 1, 2\n"):
        plan("m", "--fsdp", "3")


def test_the_number_of_devices_is_told_or_the_launchers(monkeypatch):
    assert plan("m").devices == 1
    assert plan("m", "--devices", "8").devices == 8
    assert plan("sft", "--model_name_or_path", "m", "--devices", "8", "--fsdp", "full_shard").devices == 8
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert plan("m").devices == 4
    assert plan("m", "--devices", "2").devices == 2


def test_dora_over_shards_is_refused_where_a_process_needs_whole_weights():
    argv = ("--model_name_or_path", "m", "--use_dora", "True", "--devices", "2", "--fsdp", "full_shard")
    plan("sft", *argv)
    plan("sft", *argv, "--quantization", "nf4")
    for more, reason in (
        (("dpo", *argv), "reference adapter needs norms of whole weights"),
        (("sft", *argv, "--quantization", "int8"), "PEFT does not dequantize sharded int8 weights"),
    ):
        with pytest.raises(UsageError, match=reason):
            plan(*more)


def test_gathered_weights_may_be_kept():
    argv = ("sft", "--model_name_or_path", "m", "--fsdp", "full_shard", "--fsdp_config")
    assert plan(*argv[:-1]).reshard
    assert not plan(*argv, '{"reshard_after_forward": false}').reshard


@pytest.mark.parametrize(
    ("method", "drops"), [("sft", True), ("dpo", False), ("kto", False), ("reward", False)]
)
def test_dropout_is_off_where_trl_switches_it_off(method: str, drops: bool):
    assert plan(method, "--model_name_or_path", "m").dropout == drops
    assert plan(
        method, "--model_name_or_path", "m", *(() if drops else ("--disable_dropout", "False"))
    ).dropout


def test_what_is_not_traced_as_asked_is_said():
    packed = plan("m", "--attn_implementation", "flash_attention_2", "--packing", "True", "--device", "a100")
    assert packed.attention is None
    assert packed.notes == (
        "flash_attention_2 is traced as scaled_dot_product_attention, which accepts more dtypes",
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["m", "--batch", "0"], "--batch 0"),
        (["m", "--images", "2"], "--images 2 without --image"),
        (["m", "--batch", "x"], "--batch x\n    expected  a whole number"),
        (["m", "--fail-on", "note"], "one of error, warning"),
        (["m", "--quantization", "q4"], "one of nf4, fp4, int8"),
        (["m", "--no_such_flag", "1"], "--no_such_flag"),
        ([], "no model"),
    ],
)
def test_bad_arguments(argv, message):
    with pytest.raises(UsageError, match=message):
        plan(*argv)


def test_a_reward_model_of_a_model_that_takes_pictures_has_a_padding_token(
    saved: Callable[..., Path],
) -> None:
    """The config of such a model has none; that of its text model has one."""
    path = saved("gemma3-vision")
    plan = plan_of(*parse_options(["reward", "--model_name_or_path", str(path)]))
    policy = isotype.resolve_precision(path, "float32", device="cpu")
    model, _ = PlannedStep(plan, transformers.AutoConfig.from_pretrained(path), policy).model(None)
    assert model.config.get_text_config().pad_token_id == 0


def test_what_this_machine_lacks_is_refused_as_in_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = save_chat_model(tmp_path / "model"), save_rows(tmp_path / "rows.jsonl", rows("sft"))
    file = tmp_path / "file"
    file.write_text("")
    base = ["sft", "--model_name_or_path", model, "--dataset_name", data, "--max_steps", 1]

    def problems(*argv: object) -> list[str]:
        words = [str(word) for word in (*base, *argv)]
        answers = []
        for act in (plan, lambda *words: run(parse_settings(METHODS["sft"], words[1:]), Console(quiet=True))):
            with pytest.raises(IsotypeError) as caught:
                act(*words)
            answers.append([problem.given for problem in caught.value.problems])
        assert answers[0] == answers[1]
        return answers[0]

    assert problems("--device", "cpu", "--output_dir", file / "a") == [
        f"--output_dir {file / 'a'}: {file} is a file"
    ]
    assert problems("--device", "cpu", "--optim", "lomo") == ["--optim lomo"]
    assert problems("--device", "cpu", "--router_aux_loss_coef", 0.1) == [
        "--router_aux_loss_coef 0.1 and a model of the type llama"
    ]
    plan(*map(str, base), "--device", "t4", "--optim", "lomo")  # perhaps that machine has the package
    monkeypatch.setattr("isotype.train.validate.os.access", lambda *_: False)
    with pytest.raises(UsageError, match=r"--output_dir .*/a: .* cannot be written"):
        plan(*map(str, base), "--device", "cpu", "--output_dir", str(tmp_path / "a"))
    monkeypatch.undo()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).unlink()
    assert problems("--device", "cpu")[0].startswith(f"{model}: no tokenizer.json")
    assert "this machine has no tokenizer of the model" in plan(*map(str, base), "--device", "t4").notes[-1]


def test_a_check_for_another_device_does_not_need_deepspeed(monkeypatch):
    """hiyouga/LLaMA-Factory #7755 trains on V100s with ZeRO-3; the check runs on a laptop."""
    monkeypatch.setattr("isotype.train.command.settings.find_spec", lambda name: None)
    monkeypatch.setattr("isotype.train.validate.find_spec", lambda name: None)
    arguments = ("sft", "--model_name_or_path", "m", "--deepspeed", "ds_z3_config.json")
    assert plan(*arguments, "--device", "v100").deepspeed
    with pytest.raises(UsageError, match=r"--deepspeed ds_z3_config.json\n.*the package deepspeed"):
        plan(*arguments, "--device", "cpu")


@pytest.mark.parametrize("trainer", ["axolotl", "llama_factory"])
def test_a_check_of_another_trainers_file_does_not_need_its_data(trainer, tmp_path, monkeypatch, caplog):
    """axolotl-ai-cloud/axolotl #1482"""
    monkeypatch.chdir(tmp_path)
    data = {"rows": {"file_name": "rows.jsonl"}}
    content = {"model_name_or_path": "m", "stage": "sft", "dataset": "rows", "dataset_dir": data}
    if trainer == "axolotl":
        rows = [{"path": "rows.jsonl", "type": "alpaca"}]
        content = {"base_model": "m", "adapter": "lora", "lora_target_linear": True, "datasets": rows}
    Path("file.yaml").write_text(json.dumps(content))
    assert plan("file.yaml").data == ""
    assert "not read, because rows.jsonl is not on this machine" in caplog.text
    with pytest.raises(DataError, match=r"no file or directory 'rows\.jsonl'"):
        run(parse_settings(METHODS["sft"], ["--config", "file.yaml"]), Console(quiet=True))
