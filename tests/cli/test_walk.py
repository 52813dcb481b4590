"""From a plan to a file for llama.cpp: each command as the one before it printed it, nothing edited."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from isotype.cli.main import main
from isotype.data.methods import METHODS
from tests.checkpoint.test_gguf_export import byte_level
from tests.checkpoint.test_merge import save_base
from tests.pairwise import few
from tests.parsed import parse_settings
from tests.planning.conftest import by_formula

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"
)
ROWS = [{"prompt": f"number {number} and", "completion": f" {number + 1}, as it is"} for number in range(16)]
TRAINED = {"learning_rate": 0.02, "num_train_epochs": 2.0, "lora_r": 4, "max_length": 64}
CHOSEN = {"gradient_checkpointing": False, "quantization": "nf4", "lora_target_modules": "q_proj"}
"""Not left to the plan, which would trace every storage with it and without, and adapters on every layer."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    model = save_base(tmp_path / "a model", vocab_size=384, attention_bias=False, max_position_embeddings=96)
    tokenizer = byte_level("smollm")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)
    (tmp_path / "my.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    content = {"model_name_or_path": "a model", "dataset_name": "my.jsonl", **TRAINED, **CHOSEN}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def commands(screen: str) -> list[list[str]]:
    """The commands that a screen prints, as a shell reads them."""
    lines = screen.replace("\\\n", " ").splitlines()
    return [shlex.split(line)[1:] for line in lines if re.match(r"(?: {4})?isotype \w+ (?! )", line)]


FLAGS = [word for name, value in (TRAINED | CHOSEN).items() for word in (f"--{name}", str(value))]


def run(command: list[str], capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """Run a command; return the commands that it prints."""
    assert main(command) == 0, (command, capsys.readouterr())
    return commands(capsys.readouterr().out)


def until_trained(typed: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Run a plan and the check that it prints; return the training command that both print."""
    of_plan = {words[0]: words for words in run(typed, capsys)}
    assert set(of_plan) == {"sft", "check"}
    (train,) = run(of_plan["check"], capsys)
    assert train == of_plan["sft"]
    return train


PLAN_OF_A_FILE = ["plan", "sft", "--config", "c.yaml"]


def test_a_plan_of_a_file_and_its_check_print_the_values_of_the_file(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("isotype.planning.from_request.with_rates", lambda profile: (profile, ""))
    by_formula(monkeypatch)
    _, *words = until_trained(PLAN_OF_A_FILE, capsys)
    command = parse_settings(METHODS["sft"], words).command
    assert {name: command[name] for name in TRAINED} == TRAINED


@pytest.mark.slow
@few(
    "typed, columns",
    {
        "flags": (["plan", "a model", "--data", "my.jsonl", *FLAGS], "100"),
        "file": (PLAN_OF_A_FILE, None),
    },
    "flags",
)
def test_each_command_is_printed_by_the_one_before_it(
    typed: list[str],
    columns: str | None,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("isotype.planning.from_request.with_rates", lambda profile: (profile, ""))
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    train = until_trained(typed, capsys)
    chat, merge = run(train, capsys)
    run_file = next(folder.glob("runs/*/checkpoint-*/isotype_run.json"))
    settings = json.loads(run_file.read_text(encoding="utf-8"))
    assert {name: settings[name] for name in TRAINED} == TRAINED
    questions = ["--ask", "number 1 and", "--max_new_tokens", "2"]
    run([*chat, *questions], capsys)
    for words in run(merge, capsys):
        run([*words, *(questions if words[0] == "chat" else ())], capsys)
    assert [path.name for path in folder.glob("runs/*/*.gguf")] == ["merged.gguf"]
    # Once more: what is printed now takes nothing that is there.
    monkeypatch.setattr("isotype.train.callback.before_first_step", lambda *_: None)
    _, again = run(train, capsys)
    assert not Path(again[-1]).exists()
