"""Merges as of large models."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def few_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    """A merge tries other formats only where it keeps too little, as of a model of many bytes: trying takes as long as merging."""
    monkeypatch.setattr("isotype.checkpoint.merge.merge._CHEAP", 0)


@pytest.fixture
def every_format(few_formats: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A merge tries other formats, as of a small model."""
    monkeypatch.setattr("isotype.checkpoint.merge.merge._CHEAP", 1 << 30)
