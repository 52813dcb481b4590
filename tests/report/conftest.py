"""Fixtures of the tests of reports."""

from __future__ import annotations

import pytest
import torch
from torch.torch_version import TorchVersion


@pytest.fixture(autouse=True)
def _torch_of_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """No report says that the tables of GPUs were measured with another torch than the one that is installed."""
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.13.0+cpu"))
