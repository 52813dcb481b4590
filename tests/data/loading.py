"""Data sets written to the working directory, and loaded as a training loads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from trl import DatasetMixtureConfig, ScriptArguments

from isotype.core.errors import DataError
from isotype.data.load import load_training_data
from isotype.data.reading import Reading, parse_columns

Row = dict[str, Any]


def load(
    name: str | None,
    method: str = "sft",
    config: DatasetMixtureConfig | None = None,
    *,
    evaluate: bool = False,
    text_field: str = "text",
    chat: bool = False,
    prompts: bool = False,
    lines: bool = False,
    columns: str | None = None,
    said: list[str] | None = None,
    **script: Any,
) -> Any:
    """The splits of a data set, or of a mixture; `said` takes the lines about it."""
    arguments = ScriptArguments(dataset_name=name, **script)
    reading = Reading(
        method, parse_columns(columns), chat, prompts=prompts, lines=lines, text_field=text_field
    )
    say = ([] if said is None else said).append
    return load_training_data(arguments, config, reading, need_test=evaluate, say=say)


def refusal(
    name: str | None, method: str = "sft", config: DatasetMixtureConfig | None = None, **options: Any
) -> str:
    """What is said of data that cannot be trained on."""
    with pytest.raises(DataError) as caught:
        load(name, method, config, **options)
    return str(caught.value)


def mixture(*entries: Row, **options: Any) -> DatasetMixtureConfig:
    return DatasetMixtureConfig(datasets=list(entries), **options)


def lines(*rows: object) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def write(path: str, content: str | bytes) -> Path:
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return file
