"""From a plan to a file for llama.cpp: each command as the one before it printed it, nothing edited."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from isotype.cli.main import main
from tests.checkpoint.test_gguf_export import byte_level
from tests.checkpoint.test_merge import save_base
from tests.pairwise import pairwise

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"
)
ROWS = [{"prompt": f"number {number} and", "completion": f" {number + 1}, as it is"} for number in range(16)]
TRAINED = {"learning_rate": 0.02, "num_train_epochs": 2.0, "lora_r": 4, "max_length": 64}
CHOSEN = {"gradient_checkpointing": False}
"""Not left to the plan, which would trace every storage with it and without."""


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


@pytest.mark.slow
@pairwise(
    "typed, columns",
    [
        pytest.param(["plan", "a model", "--data", "my.jsonl", *FLAGS], id="flags"),
        pytest.param(["plan", "sft", "--config", "c.yaml"], id="file"),
    ],
    ["100", None],
    strength=1,
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

    def run(command: list[str]) -> list[list[str]]:
        assert main(command) == 0, (command, capsys.readouterr())
        return commands(capsys.readouterr().out)

    of_plan = {words[0]: words for words in run(typed)}
    assert set(of_plan) == {"sft", "check"}
    (train,) = run(of_plan["check"])
    assert train == of_plan["sft"]
    chat, merge = run(train)
    run_file = next(folder.glob("runs/*/checkpoint-*/isotype_run.json"))
    settings = json.loads(run_file.read_text(encoding="utf-8"))
    assert {name: settings[name] for name in TRAINED} == TRAINED
    questions = ["--ask", "number 1 and", "--max_new_tokens", "2"]
    run([*chat, *questions])
    for words in run(merge):
        run([*words, *(questions if words[0] == "chat" else ())])
    assert [path.name for path in folder.glob("runs/*/*.gguf")] == ["merged.gguf"]
    # Once more: what is printed now takes nothing that is there.
    _, again = run(train)
    assert not Path(again[-1]).exists()
