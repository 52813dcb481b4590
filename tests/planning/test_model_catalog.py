"""The largest of several models that fits."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from isotype.cli.main import main
from isotype.planning import model_catalog
from isotype.planning.model_catalog import SHELF, names_a_model, plans


@pytest.fixture
def sizes(config: Path, formula: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a large and a small model, whose weights a formula counts by the number of layers."""
    small = json.loads(config.read_text(encoding="utf-8"))
    monkeypatch.setattr(model_catalog, "SHELF", {"big/Model-9B": small, "big/Model-1B": small})


def test_the_commands_name_the_model_on_the_hub(sizes: None) -> None:
    first, second = plans(
        ["--device", "t4", "--max-memory", "6MiB", "--length", "128", "--quantization", "nf4"]
    )
    assert (first.model, second.model) == ("big/Model-9B", "big/Model-1B")
    for plan in (first, second):
        assert plan.command is not None
        assert plan.command.startswith(f"isotype sft --model_name_or_path {plan.model} ")
        assert {row.command.tokens()[3] for row in plan.rows} == {plan.model}


def test_no_more_are_planned_than_are_enough(sizes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_catalog, "ENOUGH", 1)
    assert len(list(plans(["--device", "t4", "--max-memory", "6MiB", "--quantization", "nf4"]))) == 1


def test_a_row_for_each_model_and_the_command_of_the_largest(
    sizes: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["plan", "--device", "t4", "--max-memory", "6MiB", "--length", "128", "--quantization", "nf4"])
        == 0
    )
    text = capsys.readouterr().out
    assert "these are the largest models that fit" in text
    assert "damage" not in text  # an unknown one has no column
    assert "\nbig/Model-9B on NVIDIA T4: nf4 fits, " in text
    assert re.search(r"^Model-9B  nf4 .* yes ", text, re.MULTILINE)
    assert re.search(r"^Model-1B  nf4 ", text, re.MULTILINE)
    (command,) = (line for line in text.splitlines() if line.startswith("isotype sft"))
    assert command.startswith("isotype sft --model_name_or_path big/Model-9B ")


def test_nothing_fits(sizes: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--device", "t4", "--max-memory", "100KiB", "--quantization", "nf4"]) == 1
    text = capsys.readouterr().out
    assert "\nNVIDIA T4: nothing fits\n" in text
    assert re.findall(r"^(\S+) +no +$", text, re.MULTILINE) == ["Model-9B", "Model-1B"]


def test_json_is_of_one_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--device", "t4", "--json"]) == 2
    assert "isotype plan MODEL --json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "answer"),
    [("m --device t4", True), ("sft --model_name_or_path m", True), ("--device t4 --data x.jsonl", False)],
)
def test_what_names_a_model(text: str, answer: bool) -> None:
    assert names_a_model(text.split()) is answer


def test_the_shelf_goes_from_the_largest_down() -> None:
    sizes = [
        config["hidden_size"] * config["num_hidden_layers"] * config["intermediate_size"]
        for config in SHELF.values()
    ]
    assert sizes == sorted(sizes, reverse=True)


def test_a_model_may_be_named_after_the_flags(config: Path, formula: object) -> None:
    flags = ["--device", "t4", "--max-memory", "6MiB", "--quantization", "nf4"]
    assert not names_a_model(flags)
    assert names_a_model([*flags[:4], str(config), *flags[4:]])
    assert main(["plan", *flags[:4], str(config), *flags[4:]]) == 0
