"""What is said where something is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def refused(error: type[Exception], function: Callable[..., object], *args: Any, **kwargs: Any) -> str:
    """The message of the error that a call raises."""
    with pytest.raises(error) as caught:
        function(*args, **kwargs)
    return str(caught.value)


def commands_on(path: Path, folder: Path) -> list[list[str]]:
    """Every command that reads a checkpoint; its data set is in `folder`, and what it would write is `folder / "out"`."""
    data = folder / "data.jsonl"
    data.write_text('{"prompt": "a", "completion": "b"}\n')
    training = f"--model_name_or_path {path} --dataset_name {data} --output_dir {folder / 'out'}"
    words = (
        f"inspect {path}",
        f"inspect --plan {path}",
        f"check {path}",
        f"plan {path} --device t4",
        f"sft {training}",
    )
    return [command.split() for command in words]
