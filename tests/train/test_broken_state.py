"""Damaged state files are refused by name before weights are read, and no code in them runs."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from rich.console import Console

from isotype.cli.output import check_surroundings
from isotype.core.errors import UsageError
from isotype.train.output.checkpoints import damage, unreadable_state
from tests.train.tiny import rows, save_chat_model, save_rows


class Evil:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> object:
        return os.mkdir, (str(self.folder / "ran"),)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    from isotype.data.methods import METHODS
    from isotype.train.training import run
    from tests.parsed import parse_settings

    root = tmp_path_factory.mktemp("run")
    save_chat_model(root / "model")
    save_rows(root / "sft.jsonl", rows("sft"))
    arguments = ["--model_name_or_path", str(root / "model"), "--dataset_name", str(root / "sft.jsonl")]
    arguments += ["--output_dir", str(root / "out"), "--device", "cpu", "--dtype", "float32"]
    arguments += ["--max_steps", "1", "--save_steps", "1", "--report_to", "none"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("isotype.train.callback.before_first_step", lambda *_: None)
        arguments += ["--gradient_checkpointing", "False"]
        run(parse_settings(METHODS["sft"], arguments), Console(file=io.StringIO()))
    return root / "out" / "checkpoint-1"


def test_a_whole_one(saved):
    assert damage(saved, contents=True) is None
    assert unreadable_state(saved) is None


@pytest.mark.parametrize("file", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
@pytest.mark.parametrize("kind", ["pickle", "torch", "cut", "list", "numbers"])
def test_files_of_torch(saved, tmp_path, file, kind):
    copy = shutil.copytree(saved, tmp_path / "copy")
    path = copy / file
    if kind == "pickle":
        path.write_bytes(pickle.dumps(Evil(tmp_path)))
    elif kind == "torch":
        torch.save({"state": Evil(tmp_path)}, path)
    elif kind == "cut":
        path.write_bytes(path.read_bytes()[:100])
    else:
        torch.save([1] if kind == "list" else dict.fromkeys(["state", "last_epoch", "python"], "x"), path)
    reason = unreadable_state(copy)
    assert reason is not None
    assert reason.startswith(f"{file} ")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "state", [{}, {"global_step": "x"}, {"evil": 1}, {"max_steps": None}, {"log_history": 5}, {"global_step": -1}]
)  # fmt: skip
def test_state(saved, tmp_path, state):
    copy = shutil.copytree(saved, tmp_path / "copy")
    whole = json.loads((copy / "trainer_state.json").read_text()) if state else {}
    (copy / "trainer_state.json").write_text(json.dumps({**whole, **state}))
    reason = unreadable_state(copy)
    assert reason is not None
    assert reason.startswith("trainer_state.json")


@pytest.mark.parametrize("manifest", ['{"files": 5}', '{"crc32": []}'])
def test_manifest(saved, tmp_path, manifest):
    copy = shutil.copytree(saved, tmp_path / "copy")
    (copy / "isotype_checkpoint.json").write_text(manifest)
    assert damage(copy) == "isotype_checkpoint.json does not list files"


@pytest.mark.parametrize(
    ("variables", "count"),
    [
        ({"LOCAL_RANK": "x"}, 1),
        ({"RANK": "-1", "MASTER_PORT": "99999999"}, 2),
        ({"RANK": "5", "WORLD_SIZE": "2"}, 1),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": "29500"}, 0),
    ],
)  # fmt: skip
def test_surroundings(variables, count, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if not count:
        check_surroundings()
        return
    with pytest.raises(UsageError) as error:
        check_surroundings()
    assert len(error.value.problems) == count


def test_a_working_directory_that_is_gone(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(UsageError, match="the working directory"):
        check_surroundings()
