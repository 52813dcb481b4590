"""What all tests share: saved tiny models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.models import save_tiny

UPSTREAM_WARNINGS = (
    # PEFT 0.21, accelerate 1.15 and TRL 1.16 call names that transformers 5.23 is about to rename.
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning",
    "ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning",
    # PEFT 0.21 compares its patterns for experts with module names only, not with the parameters they adapt.
    "ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning",
    # A tied embedding trained apart from its head is what some tests ask for.
    "ignore:Model has `tie_word_embeddings=True`:UserWarning",
)
"""Warnings about other libraries' affairs; every other warning is an error."""


def pytest_configure(config: pytest.Config) -> None:
    for line in UPSTREAM_WARNINGS:
        config.addinivalue_line("filterwarnings", line)


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`saved(name, dtype)`: a directory with a tiny model, saved once a session."""
    directories: dict[tuple[str, torch.dtype], Path] = {}

    def directory(name: str, dtype: torch.dtype = torch.float32) -> Path:
        key = (name, dtype)
        if key not in directories:
            directories[key] = save_tiny(name, tmp_path_factory.mktemp(name), dtype)
        return directories[key]

    return directory
