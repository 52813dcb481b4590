"""Where tests of data find themselves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import datasets
import pytest


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory, and a cache of its own for `datasets`."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / ".cache")
    datasets.disable_progress_bars()
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    datasets.enable_progress_bars()
