"""docs/data.md: every example of a row is loaded by the methods that it is for."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from isotype.data.load import load_training_data
from isotype.data.methods import METHODS
from isotype.data.reading import Reading, parse_columns
from tests.data.loading import load, mixture, write

Image = pytest.importorskip("PIL.Image")
PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
_EXAMPLE = re.compile(r"^`([\w./]+)` for (.+?)(?: with `--columns (\w+)`)?\n\n```\w+\n(.*?)```", re.M | re.S)
EXAMPLES = [pytest.param(*match.groups(), id=match.group(1)) for match in _EXAMPLE.finditer(PAGE)]


@pytest.fixture(autouse=True)
def _pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in (".", "pets", "zoo", "album"):
        Path(folder).mkdir(exist_ok=True)
        for name in ("cat", "dog"):
            Image.new("RGB", (8, 6)).save(f"{folder}/{name}.png")


def taken(name: str, method: str, columns: str | None) -> list[dict[str, Any]]:
    script = SimpleNamespace(
        dataset_name=name,
        dataset_config=None,
        dataset_train_split="train",
        dataset_test_split="test",
        dataset_streaming=False,
    )
    data = load_training_data(
        script, None, Reading(method, parse_columns(columns)), need_test=False, say=lambda line: None
    )
    return list(data["train"])


@pytest.mark.parametrize(("name", "methods", "columns", "content"), EXAMPLES)
def test_every_example_is_loaded(name, methods, columns, content):
    write(name, content)
    pictures = PAGE.index(f"\n`{name}` for") > PAGE.index("\n## Images\n")
    for method in re.findall(r"`(\w+)`", methods):
        rows = taken(name.partition("/")[0], method, columns)
        assert len(rows) == {"txt": 1, "csv": content.count("\n") - 1}.get(
            Path(name).suffix[1:], content.count("\n")
        )
        assert any(row.get("images") for row in rows) == pictures


def test_every_method_has_an_example():
    assert {method for each in EXAMPLES for method in re.findall(r"`(\w+)`", each.values[1])} == set(METHODS)


def test_the_mixture_is_loaded():
    for each in EXAMPLES:
        write(each.values[0], each.values[3])
    (content,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.S)
    rows = load(None, config=mixture(*yaml.safe_load(content)["datasets"]))["train"]
    assert {len(row["images"]) for row in rows} == {0, 1}
