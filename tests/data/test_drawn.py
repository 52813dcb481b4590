"""`embedded:shapes`: the same on every machine, with questions about what nobody has seen in training."""

from __future__ import annotations

import hashlib
import json
from collections import Counter

import pytest

from isotype.data.drawn import CONTENTS, HELD_BACK, rows, shapes_folder
from tests.data.loading import load, refusal

pytest.importorskip("PIL", reason="needs the package pillow")


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ISOTYPE_CACHE", str(tmp_path / "cache"))


def test_the_pictures_are_the_same_everywhere():
    digest = hashlib.sha256()
    for split in ("train", "test"):
        for content, pixels, question, answer in rows(split):
            digest.update(f"{content.words} {question} {answer} ".encode() + pixels.tobytes())
    assert digest.hexdigest()[:16] == "e1bd084e605679b9"


def test_the_test_split_has_other_combinations_of_the_same_parts():
    contents = {split: {content for content, *_ in rows(split)} for split in ("train", "test")}
    assert contents["test"] <= HELD_BACK
    assert contents["train"].isdisjoint(HELD_BACK)
    for part in ("number", "colour", "form"):
        assert len(set(Counter(getattr(each, part) for each in HELD_BACK).values())) == 1
        assert {getattr(each, part) for each in HELD_BACK} == {getattr(each, part) for each in CONTENTS}


def test_it_is_loaded_by_its_name():
    data = load("embedded:shapes", evaluate=True)
    assert (data["train"].num_rows, data["test"].num_rows) == (480, 48)
    drawn = list(rows("test"))
    for row, (_, pixels, question, answer) in zip(data["test"], drawn, strict=True):
        assert row["images"][0].tobytes() == pixels.tobytes()
        assert row["prompt"] == [{"role": "user", "content": question}]
        assert row["completion"] == [{"role": "assistant", "content": answer}]
    folder = shapes_folder()
    assert (
        json.loads((folder / "train" / "metadata.jsonl").read_text().splitlines()[0])["file_name"]
        == "000.png"
    )
    assert [each.name for each in folder.parent.iterdir()] == [folder.name]


def test_it_needs_pillow(monkeypatch):
    monkeypatch.setattr("isotype.data.drawn.find_spec", lambda name: None)
    assert "pip install 'isotype[vision]'" in refusal("embedded:shapes")
