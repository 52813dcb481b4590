"""What files name reaches the terminal as text, never as commands to it."""

from __future__ import annotations

import io
import json
import logging
import re
import shlex
import warnings
from pathlib import Path

import pytest
import torch
from rich.table import Table
from rich.text import Text
from safetensors.torch import load_file, save_file

from isotype.cli.main import main
from isotype.core.console import TerminalConsole, libraries_shown
from isotype.core.terminal import shown
from tests.train.tiny import rows, save_chat_model, save_rows

EVIL = "\x1b]0;x\x07\x1b[2J\x9b31m\u202e[bold]:smile:[/red]"
SHOWN = r"\x1b]0;x\x07\x1b[2J\x9b31m\u202e[bold]:smile:[/red]"
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
SOURCE = Path(__file__).parents[2] / "src" / "isotype"


def test_shown() -> None:
    assert shown(f"a\tb\n{EVIL}") == f"a\tb\n{SHOWN}"
    assert shown("naïve 漢字 👩‍🚀") == "naïve 漢字 👩‍🚀"


def test_everything_that_rich_prints() -> None:
    console = TerminalConsole(
        file=io.StringIO(), width=200, force_terminal=True, color_system="standard", highlight=False
    )
    name, out_name = EVIL.replace("\x07", ""), SHOWN.replace(r"\x07", "")  # rich leaves the bell out
    table = Table()
    table.add_row(name, Text(name, style="bold"))
    console.print(name, table, Text.assemble((name, "red")), soft_wrap=True)
    console.print(name, highlight=False)
    with console.status(name):
        pass
    out = console.file.getvalue()
    assert out.count(out_name) >= 5
    own = re.sub("\x1b\\[[0-9;?]*[mhlAK]", "", out).replace("\r", "")  # styles, and the cursor of the status
    assert not CONTROL.search(own)


def test_what_libraries_say(capsys) -> None:
    with libraries_shown():
        logging.getLogger("somebody").warning("%s", EVIL)
        text = warnings.formatwarning(EVIL, UserWarning, "file.py", 1)
    assert SHOWN in text
    assert not CONTROL.search(capsys.readouterr().err)
    assert logging.getLogRecordFactory() is logging.LogRecord


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("escapes")
    save_chat_model(root / "m")
    weights = load_file(root / "m" / "model.safetensors")
    (root / "tensors").mkdir()
    save_file({f"{EVIL}.weight": torch.ones(2, 2)} | weights, root / "tensors" / "model.safetensors")
    (root / "tensors" / "config.json").write_text((root / "m" / "config.json").read_text())
    (root / "index").mkdir()
    index = {"metadata": {}, "weight_map": {f"{EVIL}a": f"{EVIL}.safetensors", "b": "b.safetensors"}}
    (root / "index" / "model.safetensors.index.json").write_text(json.dumps(index))
    (root / "adapter").mkdir()
    config = {"peft_type": "LORA", "base_model_name_or_path": f"/nowhere/{EVIL}", "task_type": "CAUSAL_LM"}
    (root / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    save_file(
        {"base_model.model.a.lora_A.weight": torch.ones(2, 2)}, root / "adapter" / "adapter_model.safetensors"
    )
    (root / "kind").mkdir()
    (root / "kind" / "adapter_config.json").write_text(json.dumps({**config, "peft_type": EVIL}))
    save_file({"a": torch.ones(2)}, root / "kind" / "adapter_model.safetensors")
    (root / "type").mkdir()
    (root / "type" / "config.json").write_text(json.dumps({"model_type": EVIL}))
    (root / "columns.jsonl").write_text(json.dumps({EVIL: "a", "b": EVIL}) + "\n")
    (root / "roles.jsonl").write_text(json.dumps({"messages": [{"role": EVIL, "content": EVIL}]}) + "\n")
    save_rows(root / "sft.jsonl", rows("sft"))
    (root / "raises.jinja").write_text("{{ raise_exception(" + json.dumps(EVIL) + ") }}")
    (root / "x.yaml").write_text(json.dumps({EVIL: EVIL}))
    return root


SFT = "sft --model_name_or_path m --output_dir out --device cpu --dtype float32 --max_steps 1 --dataset_name"


@pytest.mark.parametrize(
    "command",
    [
        "inspect tensors",
        "inspect tensors --json",
        "inspect tensors --plan --device cpu",
        "inspect index",
        "check tensors --device cpu",
        "check type",
        "chat adapter --ask a",
        "chat kind --ask a",
        "merge adapter -o merged",
        "merge kind -o merged",
        f"{SFT} columns.jsonl",
        f"{SFT} roles.jsonl",
        f"{SFT} sft.jsonl --chat_template_path raises.jinja",
        f"{SFT} sft.jsonl --config x.yaml",
        f"check sft --model_name_or_path m --dataset_name columns.jsonl --device {shlex.quote(EVIL)}",
        f"plan {shlex.quote(EVIL)} --device h100",
        f"explain {shlex.quote(EVIL)}",
        f"doctor {shlex.quote(EVIL)}",
        f"completion {shlex.quote(EVIL)}",
        f"quality {shlex.quote(EVIL)}",
        f"run {shlex.quote(EVIL)}",
        shlex.quote(EVIL),
    ],
)  # fmt: skip
def test_commands(command, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    main(shlex.split(command))
    out, err = capsys.readouterr()
    assert "MarkupError" not in err
    assert not CONTROL.search(
        (out + err).replace("\r", "")
    )  # a progress bar of a library begins its line again


def test_there_is_no_other_console() -> None:
    others = [
        f"{path.relative_to(SOURCE)}:{number}"
        for path in SOURCE.rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"(?<!Terminal)\bConsole\(|from_markup|print_exc", line)
        and "core/console.py" not in str(path)
    ]
    assert others == []
