"""The pytest fixture, as a user's own test would use it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn


def test_the_fixture_passes_a_healthy_model(isotype_check: Callable[..., Any]) -> None:
    report = isotype_check(nn.Linear(4, 2), {"input": torch.zeros(3, 4)}, device="cpu")
    assert report.ok


def test_the_fixture_fails_with_the_whole_report(isotype_check: Callable[..., Any]) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"error\[IST101\]: float32 instead of bfloat16"):
        isotype_check(nn.Linear(4, 2).bfloat16(), {"input": torch.zeros(3, 4)}, device="cpu")


def test_the_fixture_can_fail_on_costs(isotype_check: Callable[..., Any]) -> None:
    model, batch = nn.Linear(4, 2).bfloat16(), {"input": torch.zeros(3, 4, dtype=torch.bfloat16)}
    isotype_check(model, batch, device="t4")
    with pytest.raises(pytest.fail.Exception, match="IST601"):
        isotype_check(model, batch, device="t4", fail_on="warning")
