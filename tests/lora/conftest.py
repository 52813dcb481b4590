"""What tests of this room share."""

from __future__ import annotations

import pytest
import torch

from isotype.lora.loops import elementwise


@pytest.fixture
def rotations(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call of the loops was one for gradients."""
    if not elementwise.compiled():
        pytest.skip("there is no C++ compiler")
    seen: list[bool] = []
    own = elementwise.rotate

    def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, back: bool = False) -> torch.Tensor:
        seen.append(back)
        return own(x, cos, sin, back)

    monkeypatch.setattr(elementwise, "rotate", rotate)
    return seen
