"""Which checkpoints are complete, and which of them is the last."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from isotype.train.output.checkpoints import (
    MANIFEST,
    all_checkpoints,
    damage,
    saved_at,
    whole_checkpoints,
    write_manifest,
)


def save(root: Path, step: int, *, manifest: bool = True) -> Path:
    checkpoint = root / f"checkpoint-{step}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "adapter_model.safetensors").write_bytes(b"weights")
    (checkpoint / "optimizer.pt").write_bytes(b"moments")
    (checkpoint / "trainer_state.json").write_text('{"global_step": 1}')
    if manifest:
        write_manifest(checkpoint)
    return checkpoint


def test_a_checkpoint_that_was_saved_to_the_end_is_whole(tmp_path: Path):
    assert damage(save(tmp_path, 1)) is None
    assert damage(save(tmp_path, 2, manifest=False)) is None


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("optimizer.pt", None, "optimizer.pt is missing"),
        ("adapter_model.safetensors", b"wei", "adapter_model.safetensors has 3 of 7 bytes"),
        (MANIFEST, b'{"files"', f"{MANIFEST} is not JSON"),
    ],
)
def test_a_manifest_tells_what_is_missing_or_cut_off(
    name: str, content: bytes | None, reason: str, tmp_path: Path
):
    checkpoint = save(tmp_path, 1)
    if content is None:
        (checkpoint / name).unlink()
    else:
        (checkpoint / name).write_bytes(content)
    assert damage(checkpoint) == reason
    assert whole_checkpoints(tmp_path) == []
    assert all_checkpoints(tmp_path) == [checkpoint]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("trainer_state.json", None, "trainer_state.json is missing"),
        ("trainer_state.json", b'{"global', "trainer_state.json is not JSON"),
        ("trainer_state.json", b"[1]", "trainer_state.json is not JSON"),
        ("trainer_state.json", b"[" * 100_000, "trainer_state.json is not JSON"),
        ("adapter_model.safetensors", None, "there are no weights in it"),
    ],
)
def test_without_a_manifest_state_and_weights_must_be_there(
    name: str, content: bytes | None, reason: str, tmp_path: Path
):
    checkpoint = save(tmp_path, 1, manifest=False)
    if content is None:
        (checkpoint / name).unlink()
    else:
        (checkpoint / name).write_bytes(content)
    assert damage(checkpoint) == reason


def test_what_is_no_folder_is_said(tmp_path: Path):
    (tmp_path / "file").touch()
    assert damage(tmp_path / "file") == "it is not a folder"
    assert damage(tmp_path / "nowhere") == "it does not exist"
    assert whole_checkpoints(tmp_path / "nowhere") == []


def test_a_text_in_the_folder_may_be_edited(tmp_path: Path):
    checkpoint = save(tmp_path, 1)
    (checkpoint / "README.md").write_text("card")
    write_manifest(checkpoint)
    (checkpoint / "README.md").write_text("a longer card")
    assert damage(checkpoint) is None


def test_the_last_is_the_one_saved_last_even_after_copying(tmp_path: Path):
    older, newer = save(tmp_path, 10), save(tmp_path, 4)  # a new run in the folder of an older one
    manifest = json.loads((older / MANIFEST).read_text())
    (older / MANIFEST).write_text(json.dumps({**manifest, "saved_at": manifest["saved_at"] - 60}))
    os.utime(newer / "trainer_state.json", (0, 0))
    assert whole_checkpoints(tmp_path) == [older, newer]
    assert saved_at(newer) > saved_at(older)


def test_without_a_manifest_the_time_of_the_state_counts_and_then_the_step(tmp_path: Path):
    checkpoints = [save(tmp_path, step, manifest=False) for step in (9, 10, 2)]
    for checkpoint, time in zip(checkpoints, (100, 100, 200), strict=True):
        os.utime(checkpoint / "trainer_state.json", (time, time))
    assert [path.name for path in whole_checkpoints(tmp_path)] == [
        "checkpoint-9",
        "checkpoint-10",
        "checkpoint-2",
    ]


def test_other_names_are_no_checkpoints(tmp_path: Path):
    save(tmp_path, 1)
    for name in ("checkpoint-best", "checkpoint-1-copy", ".checkpoint-2.isotype-old"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-3").touch()
    assert [path.name for path in all_checkpoints(tmp_path)] == ["checkpoint-1"]
