"""`isotype quality`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from isotype.cli.main import main
from isotype.precision.damages import Damages
from isotype.train.rows.measurement_rows import batch_of_data
from tests.train.tiny import rows, save_chat_model, save_rows


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISOTYPE_CACHE", str(tmp_path / "cache"))


def test_a_table_and_json(saved: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    path = str(saved("llama"))
    assert main(["quality", path, "--tokens", "64", "--exact", "int8"]) == 0
    shown = capsys.readouterr().out
    assert "14 linear layers, 64 tokens" in shown
    assert "model.layers.*.mlp.down_proj          2" in shown
    assert main(["quality", path, "--tokens", "64", "--exact", "--json"]) == 0
    damages = Damages.from_json(capsys.readouterr().out)
    assert not damages.measured
    assert len(damages.layers) == 14


@pytest.mark.parametrize("device", ["{}", "t4"])
def test_a_device_that_is_not_here(
    saved: Callable[..., Path], capsys: pytest.CaptureFixture[str], device: str
) -> None:
    assert main(["quality", str(saved("llama")), "--device", device]) == 2
    assert "this was not expected" not in capsys.readouterr().err


@pytest.mark.parametrize("tokens", ["-1", "1000000000"])
def test_a_number_of_tokens_beyond_the_limits(
    saved: Callable[..., Path], capsys: pytest.CaptureFixture[str], tokens: str
) -> None:
    assert main(["quality", str(saved("llama")), f"--tokens={tokens}"]) == 2
    assert "at least 1, at most 10000000" in capsys.readouterr().err


def test_rows_of_a_data_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, data = save_chat_model(tmp_path / "model"), save_rows(tmp_path / "rows.jsonl", rows("sft"))
    batch = batch_of_data(str(model), str(data), 40)
    assert 40 <= int(batch["attention_mask"].sum()) <= 40 + batch["input_ids"].shape[1]
    command = ["quality", str(model), "--data", str(data), "--tokens", "40", "--exact", "--json"]
    assert main(command) == 0
    damages = Damages.from_json(capsys.readouterr().out)
    assert damages.text == "the batch given"
    assert damages.tokens == int(batch["attention_mask"].sum())
