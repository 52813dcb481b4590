"""Training on a base whose layers are stored in different formats."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from isotype.cli.main import main
from isotype.precision.policy import PrecisionPolicy
from tests.caches import own_cache
from tests.train.tiny import arguments, rows, save_chat_model, save_rows


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ISOTYPE_CACHE", own_cache(tmp_path / "cache"))
    save_chat_model(tmp_path / "model")
    save_rows(tmp_path / "train.jsonl", rows("sft"))
    return tmp_path


def command(root: Path, steps: int, *more: str) -> list[str]:
    argv = arguments(root, "out", steps, "--dtype", "float32", "--save_steps", "1", "--device", "cpu", *more)
    at = argv.index("--quantization")
    return [*argv[:at], "--quantization", "mixed", *argv[at + 2 :]]


@pytest.mark.usefixtures("unchecked")
def test_a_run_is_measured_trained_resumed_and_asked(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(root, 2)) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "nf4 (double quantization), mixed" in shown
    assert "stored otherwise: model.layers.*." in shown
    policy = PrecisionPolicy.read(root / "out")
    assert policy is not None
    assert len(policy.layers) > 0
    recorded = json.loads((root / "out" / "checkpoint-2" / "isotype_run.json").read_text())["layers"]
    assert recorded == {layer.module: layer.storage for layer in policy.layers}

    # Resumed: the same layers; with other bytes it would be another run.
    again = command(root, 3, "--resume_from_checkpoint", "True")
    assert main([*again, "--base_memory", "16MiB"]) == 2
    assert "layers in another format, as in checkpoint-2" in " ".join(capsys.readouterr().err.split())
    assert main(again) == 0
    assert PrecisionPolicy.read(root / "out" / "checkpoint-3") == policy
    capsys.readouterr()

    assert (
        main(["chat", str(root / "out"), "--ask", "w1 w2", "--device", "cpu", "--max_new_tokens", "2"]) == 0
    )
    assert "storage nf4 (double quantization), mixed" in " ".join(capsys.readouterr().out.split())
    assert main(["check", *again, "--json"]) == 0


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--base_memory", "some"), "--base_memory some expected an amount of memory"),
        (("--load_in_8bit", "True"), "--quantization mixed and --load_in_8bit expected one quantization"),
    ],
)
def test_what_contradicts_is_refused(
    root: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], words: str
) -> None:
    assert main(command(root, 1, *more)) == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_bytes_without_layers_to_choose_are_refused(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(root, "out", 1, "--base_memory", "6GiB")) == 2
    assert "--base_memory 6GiB without --quantization mixed" in capsys.readouterr().err
