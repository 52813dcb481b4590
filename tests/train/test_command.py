"""A training command as a value: parsed from every notation, changed, and written again."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import shlex
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import trl.trainer.grpo_config
import trl.trainer.grpo_trainer
import yaml
from tools.command_table import CHOICES, LIBRARIES, table_text

from isotype.core.errors import UsageError
from isotype.core.formats import MIXED, REQUESTABLE
from isotype.core.terminal import printed_command
from isotype.data.methods import METHODS
from isotype.train.command.command import (
    PLANNED,
    RECOMPUTE,
    TABLE,
    Command,
    Spec,
    specs,
    with_dtype,
    with_storage,
)
from isotype.train.command.parse import parse_command
from isotype.train.command.precision import read_precision_request

_TEXTS = (
    "a",
    "a path/with spaces",
    "it's",
    'say "so"',
    "ünï",
    "-x",
    "--packing",
    "a=b",
    "*.py",
    "$HOME",
    "a\\b",
    "auto",
    "None",
)
_JSON = ('{"a": 1}', '{"a b": [1, "x"], "c": {"d": null}}')


def values_of(spec: Spec, draw: random.Random) -> list[str]:
    """Return words that an argument accepts."""
    if spec.name in (*PLANNED, *RECOMPUTE) and draw.random() < 0.3:
        return ["auto"]
    if spec.choices:
        return [str(draw.choice(spec.choices))]
    if spec.kind == "bool":
        return [draw.choice(("True", "false", "yes", "0", "1", "No"))]
    if spec.kind == "int":
        return [str(draw.choice((1, 2, 7, 64, 1024, -1)))]
    if spec.kind == "float":
        return [draw.choice(("1e-4", "0.1", "3", "2.5e-05", "1", "-1", "0.30000000000000004"))]
    if spec.name.endswith(("_kwargs", "_config")) and spec.name not in ("dataset_config", "fsdp_config"):
        return [draw.choice(_JSON)]
    count = draw.randint(1, 3) if spec.many else 1
    # A word of several that begins with a dash is another argument's name, to whoever reads it.
    return [
        draw.choice([text for text in _TEXTS if count == 1 or not text.startswith("-")]) for _ in range(count)
    ]


def written(spec: Spec, words: list[str], draw: random.Random) -> list[str]:
    """Return an argument as a user might type it."""
    name = draw.choice(spec.flags)
    if spec.kind == "bool" and spec.bare and draw.random() < 0.4:
        return [name]
    if spec.negated and draw.random() < 0.3:
        return [draw.choice((f"--no_{spec.name}", f"--no-{spec.name.replace('_', '-')}"))]
    equals = name.startswith("--") and (words[0].startswith("-") or draw.random() < 0.3)
    if words[0].startswith("-") and not name.startswith("--"):
        name, equals = f"--{spec.name}", True
    return [f"{name}={words[0]}"] if equals and len(words) == 1 else [name, *words]


def in_yaml(spec: Spec, words: list[str]) -> Any:
    """Return a value as a YAML file has it, read by YAML if that gives the argument's type."""
    if spec.many:
        return words
    read = yaml.safe_load(words[0]) if spec.kind in ("int", "float", "bool") else words[0]
    return json.loads(words[0]) if words[0].startswith("{") else read


def typed(seed: int, folder: Path) -> tuple[str, list[str]]:
    """Return (method, a random command line) with flags, a file of other arguments, or both."""
    draw = random.Random(seed)
    method = draw.choice(tuple(METHODS))
    known = [spec for spec in specs(method).values() if spec.name != "datasets"]
    chosen = draw.sample(known, draw.randint(1, 14))
    argv, content = [], {}
    for spec in chosen:
        words = values_of(spec, draw)
        if draw.random() < 0.3:
            content[spec.name] = in_yaml(spec, words)
        if spec.name not in content or draw.random() < 0.2:
            argv += written(spec, values_of(spec, draw), draw)
    if content:
        path = folder / draw.choice(("c.yaml", "with space.yaml"))
        path.write_text(yaml.safe_dump(content, allow_unicode=True), encoding="utf-8")
        argv = [*argv, "--config", str(path)] if draw.random() < 0.5 else [f"--config={path}", *argv]
    return method, argv


def changed(command: Command, draw: random.Random) -> Command:
    """Return the command with changes such as a fix or a plan makes."""
    for _ in range(draw.randint(1, 3)):
        command = draw.choice(
            (
                lambda c: with_dtype(c, "float32"),
                lambda c: with_storage(c, "nf4"),
                lambda c: with_storage(c, "mixed", 2**30),
                lambda c: c.but(per_device_train_batch_size=4, gradient_accumulation_steps=2),
                lambda c: c.but(
                    gradient_checkpointing=True, gradient_checkpointing_kwargs={"every_n_layers": 2}
                ),
                lambda c: c.but(device=None),
                lambda c: c.but(output_dir="a folder", resume_from_checkpoint="a folder/checkpoint-1"),
            )
        )(command)
    return command


def round_trip(command: Command) -> Command:
    """Return the command that is parsed from the printed command line of another."""
    printed = printed_command(command.tokens(), width=60)
    tokens = shlex.split(printed.replace("\\\n", " "))
    assert tuple(tokens) == command.tokens()
    return parse_command(tokens[1], tokens[2:])[0]


@pytest.mark.parametrize("first", [0, pytest.param(300, marks=pytest.mark.exhaustive)])
def test_a_command_that_is_printed_says_what_was_meant(first: int, tmp_path: Path) -> None:
    """Random commands in every notation, changed or not, are parsed, printed, pasted and parsed again."""
    for seed in range(first, first + (60 if first == 0 else 20_000)):
        method, argv = typed(seed, tmp_path)
        command = parse_command(method, argv)[0]
        for each in (command, changed(command, random.Random(seed))):
            again = round_trip(each)
            assert each.same_settings(again), (seed, argv, each.difference(again))
            (tmp_path / "out.yaml").write_text(each.to_yaml(), encoding="utf-8")
            from_file = parse_command(method, ["--config", str(tmp_path / "out.yaml")])[0]
            assert each.same_settings(from_file), (seed, argv, each.difference(from_file))


def test_the_table_is_that_of_the_libraries() -> None:
    content = json.loads(TABLE.read_text(encoding="utf-8"))
    if any(version(name) != content["libraries"][name] for name in LIBRARIES):
        pytest.skip("other versions are installed than the table is of")
    assert TABLE.read_text(encoding="utf-8") == table_text(), "run python -m tools.command_table"


@pytest.mark.parametrize("name", CHOICES)
def test_names_that_only_trls_trainers_compare(name: str) -> None:
    """TRL's configs accept any name, and its trainers raise after the model is loaded, or after a generation."""
    choices = specs("grpo")[name].choices
    trainer = Path(trl.trainer.grpo_trainer.__file__).read_text(encoding="utf-8")
    config = Path(trl.trainer.grpo_config.__file__).read_text(encoding="utf-8")
    assert choices
    assert all(re.search(rf"['\"`]{choice}['\"`]", trainer + config) for choice in choices)
    assert specs("grpo")[name].default in choices
    words = ("--model_name_or_path", "m", f"--{name}")
    with pytest.raises(UsageError, match=f"--{name} nothing\n    expected  one of {', '.join(choices)}"):
        parse_command("grpo", [*words, "nothing"])
    for choice in choices:
        assert parse_command("grpo", [*words, choice])[0][name] == choice


@pytest.mark.parametrize(
    ("raw", "value"), [(True, "group"), (False, "none"), ("True", "group"), ("batch", "batch")]
)
def test_rewards_are_scaled_as_trl_means_it(raw: Any, value: str) -> None:
    assert specs("grpo")["scale_rewards"].read(raw) == (value, None)


def test_quantization_can_be_each_format_that_a_user_can_request() -> None:
    assert specs("sft")["quantization"].choices == (*REQUESTABLE, MIXED)


def test_a_flag_wins_over_a_keyword_and_a_keyword_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("lora_r: 4\nlora_alpha: 4\nlora_dropout: 0.5\n")
    command, _ = parse_command(
        "sft", ["--config", str(path), "--lora_r", "8"], {"lora_r": 6, "lora_alpha": 6, "learning_rate": None}
    )
    assert [command[name] for name in ("lora_r", "lora_alpha", "lora_dropout")] == [8, 6, 0.5]
    assert "learning_rate" not in command
    assert command.arguments() == ("--config", str(path), "--lora_alpha", "6", "--lora_r", "8")


@pytest.mark.parametrize("name", [*PLANNED, *RECOMPUTE[:1]])
def test_auto_is_a_value_wherever_it_is_written(name: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"{name}: auto\n")
    for command in (
        parse_command("sft", [f"--{name}", "auto"])[0],
        parse_command("sft", ["--config", str(path)])[0],
        parse_command("sft", (), {name: "auto"})[0],
    ):
        assert command[name] == "auto"
        assert command.planned == ((name,) if name in PLANNED else ())


def test_a_wrong_value_of_a_file_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("model_name_or_path: m\nlora_r: 3.5\npacking: perhaps\nlora_dropout: [1]\n")
    with pytest.raises(UsageError) as error:
        parse_command("sft", ["--config", str(path)])
    assert [problem.given for problem in error.value.problems] == [
        f"--lora_r 3.5 ({path}:2)", f"--packing perhaps ({path}:3)", f"--lora_dropout [1] ({path}:4)",
    ]  # fmt: skip


def test_a_dtype_that_is_set_is_the_only_one_that_is_said(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("bf16: true\nlora_r: 4\n")
    command = with_dtype(parse_command("sft", ["--config", str(path)])[0], "float32")
    assert command.arguments() == ("--config", str(path), "--bf16", "False", "--dtype", "float32")
    agreed = with_dtype(parse_command("sft", ["--config", str(path)])[0], "bfloat16")
    assert agreed.arguments() == ("--config", str(path), "--dtype", "bfloat16")
    assert read_precision_request(agreed).dtype == "bfloat16"
    init = '{"dtype": "bfloat16", "attn_implementation": "eager"}'
    command = with_dtype(parse_command("sft", ["--bf16", "--model_init_kwargs", init])[0], "float32")
    assert command.arguments() == (
        "--model_init_kwargs",
        '{"attn_implementation": "eager"}',
        "--dtype",
        "float32",
    )


def test_a_value_of_a_file_that_has_no_words_against_it_is_taken_out_of_all_of_them(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("ask: w1\nlora_r: 4\n")
    command = parse_command("sft", ["--config", str(path), "--packing"])[0].but(ask=None)
    assert command.arguments() == ("--lora_r", "4", "--packing")


def test_a_model_that_is_named_without_a_flag_wins_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("model_name_or_path: of-file\nlora_r: 4\n")
    assert parse_command("sft", ["--config", str(path)], model="named")[0]["model_name_or_path"] == "named"


def test_an_object_is_the_same_from_a_file_and_from_a_flag(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    for name in ("chat_template_kwargs", "generation_kwargs", "lr_scheduler_kwargs"):
        path.write_text(f"{name}: {{a: 1}}\n")
        of_file = parse_command("grpo", ["--config", str(path)])[0]
        assert of_file.same_settings(parse_command("grpo", [f"--{name}", '{"a": 1}'])[0]), name


@pytest.mark.parametrize("name", ["parallelism_config", "deepspeed"])
def test_an_object_of_a_file_is_an_object_in_the_printed_command(name: str, tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(f"{name}: {{a: 1}}", encoding="utf-8")
    of_file = dataclasses.replace(parse_command("sft", ["--config", str(config)])[0], file=None)
    assert round_trip(of_file)[name] == {"a": 1}


def test_an_object_for_an_argument_that_takes_a_text(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("output_dir: {a: 1}", encoding="utf-8")
    with pytest.raises(UsageError, match=r'--output_dir \{"a": 1\} \(.*c.yaml:1\)\n    expected  a text'):
        parse_command("sft", ["--config", str(config)])


def test_a_command_that_leaves_its_file_keeps_what_the_file_sets_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WALKED", "")
    path = tmp_path / "c.yaml"
    path.write_text("ask: w1\nlora_r: 4\nenv:\n  WALKED: a b\n")
    command = parse_command("sft", ["--config", str(path)])[0]
    assert command.tokens() == ("isotype", "sft", "--config", str(path))
    alone = command.but(ask=None)
    assert alone.tokens() == ("env", "WALKED=a b", "isotype", "sft", "--lora_r", "4")
    launched = dataclasses.replace(alone, processes=2).tokens()
    assert launched[:3] == ("env", "WALKED=a b", "torchrun")
    printed = printed_command(launched, width=40)
    assert tuple(shlex.split(printed.replace("\\\n", " "))) == launched
