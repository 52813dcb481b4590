"""Every message of `refusals.txt`: training data that is refused, and what is said of it."""

from __future__ import annotations

import gzip
import io
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from trl import DatasetMixtureConfig

from isotype.data.methods import METHODS
from tests.data.loading import mixture, refusal, write


@dataclass
class Refusal:
    """What is asked for, the files that are there, and the message below its headline."""

    method: str
    name: str | None
    options: dict[str, Any]
    files: dict[str, str] = field(default_factory=dict)
    message: str = ""


def read(text: str) -> dict[str, Refusal]:
    """Cases by their titles: `=== TITLE: METHOD [NAME] [--OPTION VALUE]`, the lines of that file or of each `--- FILE`, the message."""
    cases: dict[str, Refusal] = {}
    for block in text.removeprefix("=== ").split("\n=== "):
        head, *lines = block.splitlines()
        title, _, command = head.partition(": ")
        method, *words = command.split()
        name = words.pop(0) if words and not words[0].startswith("--") else None
        named = zip(words[::2], words[1::2], strict=True)
        case = cases[title] = Refusal(method, name, {word.removeprefix("--"): value for word, value in named})
        file = name
        for line in lines:
            if case.message or line.startswith("  - "):
                case.message += f"{line}\n"
            elif line.startswith("--- "):
                file = line.removeprefix("--- ")
                case.files[file] = ""
            else:
                assert file is not None, title
                case.files[file] = f"{case.files.get(file, '')}{line}\n"
    return cases


def parquet(*rows: dict[str, Any], schema: pyarrow.Schema | None = None) -> bytes:
    stream = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema), stream)
    return stream.getvalue()


CASES = read(Path(__file__).with_name("refusals.txt").read_text(encoding="utf-8"))
# What cannot be written as lines of a text.
FILES: dict[str, dict[str, str | bytes]] = {
    "a long line is cut": {"t.jsonl": '{"text": "a"}\n{"text": "' + "x" * 100 + '", ' + "y" * 100},
    "array cut off": {"t.json": '[{"text": "a"},\n{"text"'},
    "nested too deeply": {"t.jsonl": '{"prompt": "a", "x": ' + "[" * 100_000},
    "nested far": {"t.jsonl": '{"text": "a", "x": ' + "[" * 600 + "]" * 600 + "}"},
    "gzip under another name": {"t.jsonl": gzip.compress(b'{"text": "a"}')},
    "UTF-16 without a mark": {"t.csv": "text\na\n".encode("utf-16-le")},
    "nothing but zeros": {"t.txt": bytes(1 << 21)},
    "a character cut off at the end of a file": {"t.txt": b"ab\xe2\x82"},
    "not UTF-8": {"t.jsonl": b'{"text": "a"}\n{"text": "caf\xe9"}\n'},
    "UTF-16": {"t.csv": "text\na\n".encode("utf-16")},
    "parquet cut off": {"t.parquet": b"PAR1 and no more"},
    "values in parquet": {"t.parquet": parquet({"prompt": 1, "completion": "a"}, {"prompt": 2, "completion": None})},
    "columns of parquet": {"t.parquet": parquet({"question": "a"})},
    "parquet without rows": {"t.parquet": parquet(schema=pyarrow.schema({"text": pyarrow.string()}))},
    "parquet shards that differ": {
        "d/train-0.parquet": parquet({"text": "a"}),
        "d/train-1.parquet": parquet({"txt": "a"}),
    },
}  # fmt: skip


@pytest.mark.parametrize("title", CASES)
def test_what_is_wrong_is_said_with_its_place(
    title: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    case = CASES[title]
    assert case.method in METHODS
    for file, content in {**case.files, **FILES.get(title, {})}.items():
        Path(file).mkdir() if file.endswith("/") else write(file, content)
    mixture = Path("mixture.json")
    config = DatasetMixtureConfig(**json.loads(mixture.read_text())) if mixture.exists() else None
    options = {**case.options, "evaluate": "evaluate" in case.options}
    text = refusal(case.name, case.method, config, **options)
    assert text + "\n" == f"The data set '{case.name or 'datasets'}' cannot be trained on\n{case.message}"


def test_nothing_named() -> None:
    assert refusal(None) == (
        "No training data is named\n"
        "  - neither --dataset_name nor `datasets` in a configuration file\n"
        "    expected  a local file or directory, a hub id, or embedded:NAME\n"
        "    fix       --dataset_name train.jsonl"
    )


SPECIAL = {
    "pipe": (os.mkfifo, "is a pipe"),
    "device": (lambda name: Path(name).symlink_to("/dev/zero"), "is a device"),
    "dangling": (
        lambda name: Path(name).symlink_to("nothing"),
        "is a link that leads to 'nothing', which does not exist",
    ),
    "loop": (lambda name: Path(name).symlink_to(name), "is a link that leads back to itself"),
}


@pytest.mark.parametrize("title", SPECIAL)
def test_what_has_a_name_of_data_and_is_no_file(title, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make, what = SPECIAL[title]
    make("t.jsonl")
    assert f"'t.jsonl' {what}\n    expected  a file or a directory\n" in refusal("t.jsonl")
    assert f"'t.jsonl' {what}\n" in refusal(None, config=mixture({"path": "t.jsonl"}))
    write("train.jsonl", '{"text": "a"}\n')
    assert f"'{tmp_path}/t.jsonl' {what}\n" in refusal(str(tmp_path))
